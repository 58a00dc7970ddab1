"""A second process for the tests: it runs functions of the test modules and answers with what they return."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

SECONDS = 90.0


class Here:
    """What a function finds in the other process."""

    def __init__(self, passing: socket.socket) -> None:
        self.passing = passing
        self.kept: dict[str, Any] = {}

    def receive_fd(self) -> int:
        _, descriptors, _, _ = socket.recv_fds(self.passing, 1, 1)
        return descriptors[0]


def _serve(connection: Connection, passing: socket.socket, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    here = Here(passing)
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        if request is None:
            return
        function, arguments = request
        try:
            connection.send((True, function(here, *arguments)))
        except Exception:
            connection.send((False, traceback.format_exc()))


class Peer:
    """A spawned process. `call` runs a module's function in it, with a `Here` and the arguments."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.passing, passing = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.process = context.Process(target=_serve, args=(theirs, passing, environment or {}), daemon=True)
        self.process.start()
        theirs.close()
        passing.close()

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._connection.send((function, arguments))

    def result(self) -> Any:
        """What the started function returned. Fails where it raised, or did not answer in SECONDS."""
        assert self._connection.poll(SECONDS), "the other process does not answer"
        good, value = self._connection.recv()
        assert good, f"in the other process:\n{value}"
        return value

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.start(function, *arguments)
        return self.result()

    def send_fd(self, fd: int) -> None:
        """Passes a descriptor, and closes this process' own."""
        socket.send_fds(self.passing, [b"."], [fd])
        os.close(fd)

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(SECONDS)
        assert not self.process.is_alive()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.is_alive():
            self._connection.send(None)
            self.process.join(10)
            if self.process.is_alive():
                self.kill()
        self._connection.close()
        self.passing.close()
