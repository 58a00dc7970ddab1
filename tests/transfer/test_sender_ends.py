"""How a Sender begins and ends: an endpoint is one sender's, and whatever ends it gives everything back."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import samples
import zmq.auth
from forked_child import idle_child
from peers_by_hand import WAIT, eventually
from weightsync_agent.errors import Closed, ConfigError
from weightsync_agent.receiver import Receiver
from weightsync_agent.sender import Sender
from weightsync_agent.targets import TensorTarget
from weightsync_api.reports import AgentState

GREETING = 10
"""Bytes that ZMTP's greeting begins with, before the peer's are there."""
THREADS = 2
"""Of one ZeroMQ context: I/O and reaper."""


def zmq_threads() -> int:
    """Threads of this process that belong to a ZeroMQ context."""

    def name(task: Path) -> str:
        try:
            return (task / "comm").read_text()
        except OSError:  # it has ended
            return ""

    return sum(name(task).startswith("ZMQ") for task in Path("/proc/self/task").iterdir())


def ours() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("weightsync")}


def listeners(path: Path) -> int:
    return sum(line.endswith(f" {path}") for line in Path("/proc/net/unix").read_text().splitlines())


def connected(endpoint: str) -> socket.socket:
    """To a sender, which has taken it in and waits for what it says."""
    if endpoint.startswith("ipc://"):
        found = socket.socket(socket.AF_UNIX)
        found.settimeout(WAIT)
        found.connect(endpoint.removeprefix("ipc://").replace("@", "\0", 1))
    else:
        parts = urlsplit(endpoint)
        found = socket.create_connection((parts.hostname, parts.port), timeout=WAIT)
    assert len(found.recv(GREETING, socket.MSG_WAITALL)) == GREETING
    return found


def test_second_sender_at_an_endpoint_is_refused_and_the_first_goes_on(make_config, joined, run_dir) -> None:
    config = make_config()
    receiver = joined(config)
    with Sender(samples.mixed(0), config=config) as sender:
        assert sender.step().complete
        with pytest.raises(ConfigError, match=r"can't bind ipc://.*in use by another sender"):
            Sender(samples.mixed(0), config=config)
        assert sender.step().complete
        eventually(lambda: receiver.whole == [1, 2], "both steps arrived")


def test_socket_of_a_sender_that_was_killed_is_taken_over(make_config, joined, run_dir) -> None:
    config = make_config()
    # A child that the dead sender forked still holds its listening socket, and answers nobody.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as orphan:
        orphan.bind(str(run_dir / "control"))
        orphan.listen()
        joined(config)
        with Sender(samples.mixed(0), config=config) as sender:
            assert sender.step().complete


@pytest.mark.parametrize("bind", ["tcp://{host}:*", "tcp://*:*", "ipc://{run}/control", "ipc://@{run}"])
def test_forked_child_holds_neither_the_endpoint_nor_a_connection_beyond_its_parents_sender(
    bind, make_config, joined, run_dir
) -> None:
    # Where no other process takes the port in the moment in which it is free.
    config = make_config(bind=bind.format(host=f"127.{os.getpid() % 250 + 2}.7.9", run=run_dir))
    first = Sender(samples.mixed(0), config=config)
    endpoint = first._router._socket.getsockopt(zmq.LAST_ENDPOINT).decode()
    config = make_config(bind=endpoint, connect=endpoint)
    joined(config)
    assert first.step().complete
    other = connected(endpoint)
    with closing(other), idle_child():
        assert first.step().complete  # the parent's are untouched
        first.close()
        assert other.recv(1) == b"", "its connections end with it"
        if bind == "ipc://{run}/control":
            assert listeners(run_dir / "control") == 0
        if bind != "tcp://*:*":
            joined(config)  # the other's work ended with the goodbye
            with Sender(samples.mixed(0), config=config) as second:
                assert second.step().complete


@pytest.mark.parametrize("keys", [False, True])
def test_sender_that_can_not_bind_leaves_nothing_behind(keys, make_config, run_dir, tmp_path) -> None:
    if keys:
        zmq.auth.create_certificates(tmp_path, "sender")
    config = make_config(bind=f"ipc://{run_dir}/no/such/directory", curve_dir=str(tmp_path) if keys else "")
    threads, before, descriptors = zmq_threads(), ours(), len(os.listdir("/proc/self/fd"))
    weights = samples.mixed(0)
    with pytest.raises(ConfigError, match="can't bind") as failure:
        Sender(weights, config=config, adopt=True)
    # A thread that has been joined is listed for a moment yet.
    eventually(lambda: zmq_threads() <= threads, "ZeroMQ's threads have ended")
    assert ours() <= before
    del weights, failure  # the arena is the tensors' memory, and the traceback still holds the half-made Sender
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors, "its descriptors are closed")


def test_sender_that_is_dropped_without_close_gives_everything_back(make_config, joined, run_dir) -> None:
    config = make_config(mode="Direct")
    receiver = joined(config)
    eventually(lambda: zmq_threads() == THREADS, "the receiver's context has named its threads")
    weights = samples.mixed(0)
    sender = Sender(weights, config=config, adopt=True)
    assert sender.step().complete
    service, gone = sender._router._service, weakref.ref(sender)
    with pytest.warns(ResourceWarning, match="dropped without close"):
        del sender
    assert gone() is None
    service.join(60)
    assert not service.is_alive()
    eventually(lambda: zmq_threads() == THREADS, "the sender's context has ended, and the receiver's has not")
    assert listeners(run_dir / "control") == 0
    # As after a crash, the receiver keeps what it has and joins the next one.
    eventually(lambda: receiver.whole == [1], "the first step arrived")
    assert receiver.ended is None
    weights["large"].add_(1)
    with Sender(weights, config=config, adopt=True) as second:
        assert second.step().step == 2
    eventually(lambda: receiver.whole == [1, 2], "and the second")
    assert samples.fingerprint(receiver.loader.weights) == samples.fingerprint(weights)


def test_the_goodbye_of_a_trainer_that_failed_says_of_what(make_config) -> None:
    config, weights = make_config(), samples.mixed(0)
    target = TensorTarget({name: tensor.clone() for name, tensor in weights.items()})

    def train() -> None:
        with Sender(weights, config=config):
            while receiver.state.state != AgentState.JOINED:
                receiver.poll(0.05)
            raise ZeroDivisionError("no prompts are left")

    with Receiver(target, config=config, rank=1) as receiver:
        with pytest.raises(ZeroDivisionError):
            train()
        with pytest.raises(Closed, match="the sender ended with ZeroDivisionError: no prompts are left"):
            receiver.poll(WAIT)
