"""Peers of a Sender that a test has in its hand: a receiver in a thread, gated, and one that need not keep to rules."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import samples
import torch
import zmq
from weightsync_agent import protocol
from weightsync_agent.errors import WeightSyncError
from weightsync_agent.identity import local_identity
from weightsync_agent.receiver import Receiver
from weightsync_api.agent_config import AgentConfig

WAIT = 120.0


def eventually(done: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT
    while not done():
        assert time.monotonic() < deadline, f"not within {WAIT:g} s: {what}"
        time.sleep(0.01)


class Killed(BaseException):
    """Ends a thread where it stands, as a kill ends a process: it acknowledges nothing any more, also not by memory."""


class Loader:
    """A `load_weights` that waits at a gate in its first call of a step, and copies then."""

    def __init__(self) -> None:
        self.weights = samples.blank()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.killed = False

    def __call__(self, named: list[tuple[str, torch.Tensor]]) -> None:
        self.entered.set()
        assert self.gate.wait(WAIT)
        if self.killed:
            raise Killed
        for name, tensor in named:
            self.weights[name].copy_(tensor)


class ThreadedReceiver:
    """A Receiver in a thread of this process: gates in its loader order events that processes could only time."""

    def __init__(self, config: AgentConfig, rank: int, target: dict[str, torch.Tensor] | None = None) -> None:
        self.loader = Loader()
        self.receiver = Receiver(self.loader if target is None else target, config=config, rank=rank)
        self.whole: list[int] = []
        self.ended: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                step = self.receiver.poll(timeout=0.02)
                if step is not None:
                    self.whole.append(step)
        except (WeightSyncError, zmq.ZMQError, Killed) as error:
            self.ended = error

    def die(self) -> None:
        """As a kill does: its connection ends, without a goodbye."""
        self.loader.killed = True
        self.receiver._dealer._socket.close(linger=0)
        self._end()
        self.receiver._dealer._monitor.close(linger=0)
        self.receiver._dealer._context.term()

    def close(self) -> None:
        self._end()
        self.receiver.close()

    def _end(self) -> None:
        self._stop.set()
        self.loader.gate.set()
        self._thread.join(WAIT)
        assert not self._thread.is_alive()


@pytest.fixture
def joined(make_config: Callable[..., AgentConfig]) -> Iterator[Callable[..., ThreadedReceiver]]:
    made: list[ThreadedReceiver] = []

    def make(config: AgentConfig, rank: int = 1, target: dict[str, torch.Tensor] | None = None) -> ThreadedReceiver:
        made.append(ThreadedReceiver(config, rank, target))
        return made[-1]

    yield make
    for receiver in made:
        receiver.close()


class RawPeer:
    """Speaks the protocol by hand, and need not keep to it."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(config.connect)

    def hello(self, rank: int = 1, **changes: object) -> None:
        values: dict[str, object] = {
            "protocol": protocol.PROTOCOL_VERSION, "namespace": self.config.namespace, "name": self.config.name,
            "identity": local_identity(rank, torch.device("cpu")),
        }  # fmt: skip
        self.send(protocol.Hello(**(values | changes)))

    def send(self, message: protocol.Message) -> None:
        self.socket.send(protocol.encode(message))

    def until(self, kind: type[protocol.Message]) -> protocol.FromSender:
        while True:
            assert self.socket.poll(WAIT * 1000), f"no {kind.__name__} came"
            message = protocol.decode_from_sender(self.socket.recv())
            if isinstance(message, kind):
                return message

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


@contextmanager
def raw(config: AgentConfig) -> Iterator[RawPeer]:
    peer = RawPeer(config)
    try:
        yield peer
    finally:
        peer.close()
