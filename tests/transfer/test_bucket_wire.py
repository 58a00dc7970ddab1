"""The wire that verl and checkpoint-engine speak, ours at both ends: what needs no other project to be shown."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pytest
import torch
import zmq
from moved_promises import away_and_back, other_memory, other_objects, tied
from samples import blank, fingerprint, mixed
from weightsync_agent.deadline import Deadline
from weightsync_agent.engines import shared_file
from weightsync_agent.engines.bucket_messages import FileHandle, Placed, write_bucket, write_handle, write_none
from weightsync_agent.engines.checkpoint_engine import CheckpointEngineReceiver, CheckpointEngineSender
from weightsync_agent.engines.lockstep import Lockstep
from weightsync_agent.engines.shared_file import SharedFile, map_file
from weightsync_agent.engines.verl import VerlReceiver, VerlSender
from weightsync_agent.errors import ConfigError, JoinTimeout, ManifestMismatch, StepFailed, TransportError
from weightsync_agent.manifest import TensorEntry

T = TypeVar("T")


def beside(function: Callable[[], T]) -> Future[T]:
    """Runs it in a thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/w.sock"


@pytest.fixture(autouse=True)
def nothing_is_left_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    mine = secrets.token_hex(8)  # other runs have files there too
    monkeypatch.setattr(shared_file, "secrets", SimpleNamespace(token_hex=lambda n: mine + secrets.token_hex(n - 8)))
    yield
    assert list(shared_file.FOLDER.glob(f"*{mine}*")) == []


@pytest.mark.parametrize("bucket_bytes", [256, 100_000, 1 << 30])
def test_both_wires_carry_every_dtype_and_shape(address: str, bucket_bytes: int) -> None:
    weights, target = mixed(3), blank()
    receiver = VerlReceiver(address, target, allow_object_wire=True)
    with VerlSender(weights, address, bucket_bytes=bucket_bytes, allow_object_wire=True) as sender:
        for seed in (3, 4):
            for name, tensor in mixed(seed).items():
                weights[name].copy_(tensor)
            received = beside(receiver.receive)
            sender.step()
            assert received.result(60).tensors == len(weights)
            assert fingerprint(target) == fingerprint(mixed(seed))

    target, results = blank(), []

    def request(handles: dict[str, str]) -> None:
        ours = CheckpointEngineReceiver(handles["uuid"], target, allow_object_wire=True)
        results.append(ours.receive())

    with CheckpointEngineSender(weights, "uuid", bucket_bytes=bucket_bytes, allow_object_wire=True) as other:
        assert other.step(request).complete
    assert results[0].tensors == len(weights)
    assert fingerprint(target) == fingerprint(mixed(4))


def test_a_receiver_that_is_ahead_of_its_sender_waits_for_the_next_step(address: str) -> None:
    """It connects while the sender still has the last step's socket open, which then closes under it."""
    weights, target = {"a": torch.zeros(1000)}, {"a": torch.ones(1000)}
    receiver = VerlReceiver(address, target, allow_object_wire=True)
    received = beside(lambda: [receiver.receive().step for _ in range(100)])
    with VerlSender(weights, address, allow_object_wire=True) as sender:
        for step in range(1, 101):
            weights["a"].fill_(step)
            sender.step()
    assert received.result(60) == list(range(1, 101))
    assert bool((target["a"] == 100).all())


def test_tied_tensors_go_once_and_fill_both_names_where_the_receiver_has_them_apart(address: str) -> None:
    tied = torch.randn(100, 16)
    target = {"embedding": torch.zeros(100, 16), "head": torch.zeros(100, 16)}
    receiver = VerlReceiver(address, target, allow_object_wire=True)
    with VerlSender({"embedding": tied, "head": tied}, address, allow_object_wire=True) as sender:
        received = beside(receiver.receive)
        assert sender.step().bytes == tied.nbytes
        assert received.result(60).tensors == 2
    assert torch.equal(target["embedding"], tied)
    assert torch.equal(target["head"], tied)


def test_tensors_that_moved_are_read_where_they_are_by_then(address: str) -> None:
    weights, target = mixed(0), blank()
    receiver = VerlReceiver(address, target, allow_object_wire=True)
    with VerlSender(weights, address, bucket_bytes=100_000, allow_object_wire=True) as sender:

        def step(seed: int) -> None:
            for name, tensor in mixed(seed).items():
                weights[name].copy_(tensor)
            received = beside(receiver.receive)
            assert sender.step().complete
            received.result(60)
            assert fingerprint(target) == fingerprint(mixed(seed))

        step(0)
        for number, move in enumerate([other_memory, tied, other_objects, away_and_back], 1):
            move(weights)
            step(number)


def test_a_module_that_was_given_other_parameters_is_sent_with_those_converted_too(address: str) -> None:
    def net(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 300))

    model, target = net(0), {name: t.bfloat16() for name, t in net(0).state_dict().items() if t.is_floating_point()}
    rules = ((r".*\.num_batches_tracked$", ""),)
    receiver = VerlReceiver(address, target, allow_object_wire=True)
    with VerlSender(model, address, dtype=torch.bfloat16, names=rules, allow_object_wire=True) as sender:
        for seed in (1, 2):
            model.load_state_dict({k: v.clone() for k, v in net(seed).state_dict().items()}, assign=True)
            received = beside(receiver.receive)
            assert sender.step().complete
            received.result(60)
            assert all(torch.equal(target[name], model.state_dict()[name].bfloat16()) for name in target)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.double(), r"a \(from torch.float32 \[4, 3\] .* to torch.float64"),
        (lambda t: t[:3].clone(), r"a \(from .*\[4, 3\] .* to .*\[3, 3\]"),
        (lambda t: t.resize_(2, 3), r"a \(from 12 to 6 elements\)"),
    ],
    ids=["dtype", "shape", "resized"],
)
def test_a_tensor_of_another_kind_is_refused_by_name_and_can_be_put_back(
    change: Callable[[torch.Tensor], torch.Tensor], said: str, address: str
) -> None:
    weights, target = {"a": torch.ones(4, 3)}, {"a": torch.zeros(4, 3)}
    receiver = VerlReceiver(address, target, allow_object_wire=True)
    with VerlSender(weights, address, allow_object_wire=True) as sender:
        weights["a"] = change(weights["a"])
        received = beside(receiver.receive)
        with pytest.raises(ConfigError, match=said + ".*nothing was sent"):
            sender.step()
        weights["a"] = torch.full((4, 3), 2.0)
        assert sender.step().step == 1
        received.result(60)
        assert bool((target["a"] == 2).all())


def test_a_mismatch_in_a_later_bucket_taints_in_place_and_changes_nothing_when_atomic(address: str) -> None:
    weights = {"a": torch.ones(1000), "b": torch.ones(1000)}
    for atomic in (False, True):
        target = {"a": torch.zeros(1000), "b": torch.zeros(999)}
        receiver = VerlReceiver(address, target, allow_object_wire=True, atomic=atomic)
        with VerlSender(weights, address, bucket_bytes=4096, allow_object_wire=True) as sender:
            received = beside(receiver.receive)
            sender.step()
            with pytest.raises(ManifestMismatch, match=r"b: the sender's shape is \[1000\], the receiver's \[999\]"):
                received.result(60)
        assert (target["a"].sum().item() == 0) == atomic
        assert receiver.message.startswith("it holds no" if atomic else "step 1 broke off")


def test_a_prefix_that_differs_is_named_as_the_likely_cause(address: str) -> None:
    weights = {"policy.a": torch.ones(3), "policy.b": torch.ones(3)}
    receiver = VerlReceiver(address, {"a": torch.ones(3), "b": torch.ones(3)}, allow_object_wire=True)
    with VerlSender(weights, address, allow_object_wire=True) as sender:
        received = beside(receiver.receive)
        sender.step()
        with pytest.raises(ManifestMismatch, match="the sender's names have the prefix 'policy"):
            received.result(60)


def test_a_server_whose_half_is_not_aligned_is_understood(address: str) -> None:
    """checkpoint-engine's buffer has an odd half where its bucket size in GiB is a fraction."""
    weights = {"odd": torch.randn(5), "next": torch.randn(3).double()}
    target = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    file = SharedFile.create(1000, "checkpoint_engine")
    placed, start = [], 501
    for name, tensor in weights.items():
        file.memory.tensor()[start : start + tensor.nbytes].copy_(tensor.view(torch.uint8))
        dtype = str(tensor.dtype).removeprefix("torch.")
        placed.append(Placed(TensorEntry(name=name, dtype=dtype, shape=tuple(tensor.shape)), start))
        start += tensor.nbytes
    received = beside(CheckpointEngineReceiver(address, target, allow_object_wire=True).receive)
    deadline = Deadline(60)
    with Lockstep(address, "asks", "a test") as channel:
        handle = write_handle(FileHandle(name=file.name, nbytes=1000))
        for message in (handle, write_bucket(placed), write_none(), write_none()):
            channel.send(message, deadline, "testing")
            assert channel.receive(deadline, "testing") == b""
    received.result(60)
    file.close()
    assert all(torch.equal(target[name], weights[name]) for name in weights)


def test_a_tensor_that_lies_beyond_the_buffer_is_refused(address: str) -> None:
    target = {"a": torch.zeros(300)}
    file = SharedFile.create(1000, "checkpoint_engine")
    received = beside(CheckpointEngineReceiver(address, target, allow_object_wire=True).receive)
    deadline = Deadline(60)
    with Lockstep(address, "asks", "a test") as channel:
        channel.send(write_handle(FileHandle(name=file.name, nbytes=1000)), deadline, "testing")
        channel.receive(deadline, "testing")
        beyond = Placed(TensorEntry(name="a", dtype="float32", shape=(300,)), 0)
        channel.send(write_bucket([beyond]), deadline, "testing")
        assert b"a: bytes 0 to 1200 of 1000" in channel.receive(deadline, "testing")
    file.close()
    with pytest.raises(TransportError, match="closed its socket or ended"):
        received.result(60)


# --- the socket -------------------------------------------------------------------------------------------------------


def test_a_socket_that_a_dead_process_left_is_taken_over_and_nothing_else_is(tmp_path: Path) -> None:
    path = tmp_path / "w.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert path.exists()
    with Lockstep(f"ipc://{path}", "asks", "a test"):
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(ConfigError, match="in use: another sender listens there, or a process that one forked"):
            Lockstep(f"ipc://{path}", "asks", "a test")
    assert not path.exists()
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is no socket: it is left alone"):
        Lockstep(f"ipc://{path}", "asks", "a test")
    assert path.read_text() == "precious"


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5555", "ipc://", "/tmp/x", "ipc:///" + "x" * 200, ""])
def test_objects_are_never_read_from_a_network(address: str) -> None:
    with pytest.raises(ConfigError, match="no Unix socket"):
        Lockstep(address, "answers", "a test")


def test_a_receiver_leaves_a_socket_where_nobody_answers_for_the_next_senders(tmp_path: Path) -> None:
    """A child that a dead sender forked still holds the old one, and the path is the next sender's by then."""
    path = tmp_path / "w.sock"
    with socket.socket(socket.AF_UNIX) as orphan:
        orphan.bind(str(path))
        orphan.listen()
        target = {"a": torch.zeros(3)}
        received = beside(VerlReceiver(f"ipc://{path}", target, allow_object_wire=True).receive)
        held, _ = orphan.accept()
        path.unlink()
        with held, VerlSender({"a": torch.ones(3)}, f"ipc://{path}", allow_object_wire=True) as sender:
            assert sender.step().complete
        received.result(60)


def test_two_receivers_at_one_socket_fail_the_step_instead_of_sharing_it(address: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    two = [context.socket(zmq.REP) for _ in range(2)]
    for one in two:
        one.connect(address)

    def ask() -> None:
        with Lockstep(address, "asks", "a test") as channel:
            channel.send(b"x", Deadline(60), "testing")  # fails here where both are there already
            channel.receive(Deadline(60), "testing")

    try:
        with pytest.raises(TransportError, match="2 peers are connected"):
            ask()
    finally:
        for one in two:
            one.close(linger=0)
        context.term()


def test_nobody_is_a_join_timeout_at_either_end(address: str) -> None:
    with Lockstep(address, "asks", "a test") as channel, pytest.raises(JoinTimeout):
        channel.send(b"x", Deadline(0.2), "testing")
    with Lockstep(address, "answers", "a test") as channel, pytest.raises(JoinTimeout):
        channel.receive(Deadline(0.2), "testing")


# --- memory by name ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../etc/passwd", "a/b", "", ".hidden", "x" * 300, "a b", "a\n"])
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(TransportError, match="no name of a file"):
        map_file(name, 10, "a test")


def test_what_is_no_file_of_ours_is_refused() -> None:
    with pytest.raises(TransportError, match="can't be opened"):
        map_file("weightsync_test_absent", 10, "a test")
    file = SharedFile.create(1000, "weightsync_test")
    link = Path("/dev/shm") / f"{file.name}_link"
    try:
        with pytest.raises(TransportError, match=r"says 1001 bytes, and .* has 1000"):
            map_file(file.name, 1001, "a test")
        os.symlink(Path("/dev/shm") / file.name, link)
        with pytest.raises(TransportError, match="can't be opened"):
            map_file(link.name, 10, "a test")
    finally:
        link.unlink(missing_ok=True)
        file.close()
    with pytest.raises(TransportError, match="can't make"):
        SharedFile.create(1 << 50, "weightsync_test")


def test_a_step_that_fails_for_want_of_memory_says_so(address: str) -> None:
    expanded = torch.zeros(1, dtype=torch.uint8).expand(1 << 45)
    sender = VerlSender({"huge": expanded}, address, allow_object_wire=True)
    with sender, pytest.raises(StepFailed, match=r"can't make \d+ bytes of shared memory in /dev/shm"):
        sender.step()
