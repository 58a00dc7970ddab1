"""A sender and a receiver in this process, each with the agent's HTTP, and how they are asked."""

from __future__ import annotations

import http.client
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from weightsync_agent.errors import Closed
from weightsync_agent.http import AgentServer
from weightsync_agent.receiver import Receiver
from weightsync_agent.sender import Sender
from weightsync_api.agent_config import AgentConfig
from weightsync_api.reports import AgentState, Report

__all__ = ["directory", "group"]

WAIT_SECONDS = 120
"""Deadline of everything that must happen; nothing waits this long unless it is broken."""


class Engine:
    """A receiver and its loop in a thread, whose `load_weights` can be told to fail."""

    def __init__(self, config: AgentConfig, rank: int) -> None:
        self.fail = threading.Event()
        self.receiver = Receiver(self._load, config=config, rank=rank)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()

    def _load(self, named: list[tuple[str, torch.Tensor]]) -> None:
        if self.fail.is_set():
            raise RuntimeError("the loader is broken")

    def _loop(self) -> None:
        while not self._end.is_set():
            try:
                self.receiver.poll(timeout=0.05)
            except Closed:
                break
        self.receiver.close()

    def close(self) -> None:
        self._end.set()
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()


class Group:
    """A sender and one receiver of one WeightSync, in this process, each served over HTTP."""

    def __init__(self, directory: Path) -> None:
        endpoint = f"ipc://{directory}/control"
        config = AgentConfig.model_validate(
            {
                "namespace": "default", "name": "sample", "uid": "17", "device": "CPU", "transport": "IPC",
                "receivers": 1, "joinTimeoutSeconds": WAIT_SECONDS, "bind": endpoint, "connect": endpoint,
                "runtimeDir": str(directory),
            }
        )  # fmt: skip
        self.sender = Sender({"weight": torch.ones(1000), "bias": torch.ones(10)}, config=config)
        self.engine = Engine(config, 1)
        self.sending = AgentServer(self.sender, "127.0.0.1:0", 0)
        self.receiving = AgentServer(self.engine.receiver, f"unix:{directory}", 1)
        until(lambda: self.engine.receiver.state.state == AgentState.JOINED)

    def close(self) -> None:
        self.sender.close()
        self.engine.close()
        self.sending.close()
        self.receiving.close()


@pytest.fixture
def directory() -> Iterator[Path]:
    # Not pytest's tmp_path: a Unix socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ws-") as name:
        yield Path(name)


@pytest.fixture
def group(directory: Path) -> Iterator[Group]:
    made = Group(directory)
    yield made
    made.close()


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=WAIT_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(WAIT_SECONDS)
        self.sock.connect(self._path)


def ask(server: AgentServer, path: str, method: str = "GET", **options: Any) -> tuple[int, str]:
    """Status and body."""
    if server.address.startswith("/"):
        connection: http.client.HTTPConnection = UnixConnection(server.address)
    else:
        host, _, port = server.address.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_SECONDS)
    try:
        connection.request(method, path, **options)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def report(server: AgentServer, query: str) -> Report:
    status, body = ask(server, f"/report?{query}")
    assert status == 200, body
    return Report.model_validate_json(body)


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not reached():
        assert time.monotonic() < deadline, "it did not come to this in time"
        time.sleep(0.01)
