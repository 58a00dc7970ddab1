"""What the wire lets in: messages of the protocol, each part of them within its bounds."""

from __future__ import annotations

import json

import pytest
import torch
from weightsync_agent import protocol
from weightsync_agent.identity import local_identity
from weightsync_api.reports import MemorySample

HELLO = protocol.Hello(
    protocol=protocol.PROTOCOL_VERSION,
    namespace="default",
    name="sample",
    identity=local_identity(1, torch.device("cpu")),
)
ACK = protocol.Ack(step=1, load_microseconds=5, verified=False, memory=MemorySample())
FROM_RECEIVER = [
    HELLO,
    ACK,
    protocol.Joined(route="SharedMemory"),
    protocol.Drained(step=1, bucket=0),
    protocol.Error(step=1, bucket=2, cause="no memory"),
    protocol.Error(step=1, received=True, cause="no memory"),
    protocol.Regrouped(epoch=1, route="gloo"),
    protocol.Differs(differences="a: shape"),
    protocol.Bye(),
]
FROM_SENDER = [
    protocol.Begin(step=1, manifest_hash="", verify=False, whole=True, timeout_seconds=1),
    protocol.Bucket(step=1, bucket=0, slot=0),
    protocol.Commit(step=1),
    protocol.Abort(step=1, cause="it broke"),
    protocol.Admitted(step=0),
    protocol.Regroup(epoch=1, ranks=(0, 1), rendezvous="localhost:1", timeout_seconds=1),
    protocol.Ping(),
]


@pytest.mark.parametrize("message", FROM_RECEIVER, ids=lambda message: message.kind)
def test_a_receivers_message_comes_through_as_it_was(message) -> None:
    assert protocol.decode_from_receiver(protocol.encode(message)) == message


@pytest.mark.parametrize("message", FROM_SENDER, ids=lambda message: message.kind)
def test_a_senders_message_comes_through_as_it_was(message) -> None:
    assert protocol.decode_from_sender(protocol.encode(message)) == message


def numbers(tree: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Where the numbers of a message are."""
    if isinstance(tree, dict):
        return [found for key, value in tree.items() for found in numbers(value, (*path, key))]
    if isinstance(tree, list):
        return [found for index, value in enumerate(tree) for found in numbers(value, (*path, index))]
    return [path] if isinstance(tree, int | float) and not isinstance(tree, bool) else []


def changed(message: protocol.Message, path: tuple[object, ...], value: object) -> bytes:
    tree = json.loads(protocol.encode(message))
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(tree).encode()


EVERY_NUMBER = [
    pytest.param(message, path, id=f"{message.kind}-{'.'.join(map(str, path))}")
    for message in FROM_RECEIVER + FROM_SENDER
    for path in numbers(json.loads(protocol.encode(message)))
]


@pytest.mark.parametrize("value", [-1, 1 << 64, 10**400, 1e300, float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize(("message", "path"), EVERY_NUMBER)
def test_a_number_out_of_its_bounds_is_no_message(message, path, value) -> None:
    decode = protocol.decode_from_receiver if message in FROM_RECEIVER else protocol.decode_from_sender
    with pytest.raises(protocol.ProtocolError, match=str(path[-1])):
        decode(changed(message, path, value))


@pytest.mark.parametrize(
    "versions", [{"torch": "2" * 1000}, {"t" * 1000: "2"}, {f"package {n}": "1" for n in range(100)}]
)
def test_versions_that_are_none_are_no_message(versions) -> None:
    with pytest.raises(protocol.ProtocolError, match="versions"):
        protocol.decode_from_receiver(changed(HELLO, ("identity", "versions"), versions))


@pytest.mark.parametrize("frame", [b"", b"{}", b"[" * 100_000, b"\x80", b'{"kind":"Ack"}', b'{"kind":"Nothing"}'])
def test_what_is_no_message_is_told_in_a_short_sentence(frame) -> None:
    with pytest.raises(protocol.ProtocolError) as error:
        protocol.decode_from_receiver(frame)
    assert len(str(error.value)) < 500
