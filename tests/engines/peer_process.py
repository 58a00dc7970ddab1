"""Starts real peers (bucket_peers.py) in the environment that has them, and reads what they say."""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Self

import pytest

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
ENVIRONMENTS = Path(os.environ.get("WEIGHTSYNC_ENGINES") or CACHE / "weightsync" / "engines")
"""Where install.sh puts them."""
SECONDS = 120.0


def interpreter(environment: str) -> str:
    """The Python of an engine's environment; skips the test where it is not installed."""
    path = ENVIRONMENTS / environment / "bin" / "python"
    if not path.exists():
        pytest.skip(f"{path} is not there: `tests/engines/install.sh {environment}` makes it")
    return str(path)


@cache
def _maker() -> str:
    """The socket of the process that forks peers: started once a session, it ends with this process."""
    folder = tempfile.mkdtemp(prefix="ws-peers-")
    path = f"{folder}/s"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [interpreter("verl"), str(HERE / "bucket_peers.py"), path]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    atexit.register(_end, process, folder)
    began = time.monotonic()
    while not os.path.exists(path):
        assert process.poll() is None, "the process that makes peers has ended"
        assert time.monotonic() - began < 100, "the process that makes peers does not start"
        time.sleep(0.05)
    return path


def _end(process: subprocess.Popen[bytes], folder: str) -> None:
    assert process.stdin is not None
    process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
    process.kill()
    shutil.rmtree(folder, ignore_errors=True)


class PeerProcess:
    """A running peer. Killed at the end of the `with` block if it still runs."""

    def __init__(self, role: str, address: str, *options: str) -> None:
        self._said = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._said.connect(_maker())
        self._rest = b""
        self._said.sendall(json.dumps([role, address, *options]).encode() + b"\n")
        self.pid = int(self.line()["pid"])

    def line(self, seconds: float = SECONDS) -> dict[str, Any]:
        """The next thing that it says. Fails where it says nothing, or has ended."""
        while b"\n" not in self._rest:
            assert select.select([self._said], [], [], seconds)[0], f"the peer says nothing for {seconds} s"
            part = self._said.recv(1 << 20)
            assert part, "the peer has ended"
            self._rest += part
        first, self._rest = self._rest.split(b"\n", 1)
        found: dict[str, Any] = json.loads(first)
        return found

    def result(self) -> dict[str, Any]:
        """What became of it, whatever it says before."""
        while "result" not in (said := self.line()):
            pass
        return said

    def kill(self) -> None:
        """Returns when it is gone: its end of the socket is closed then."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        while select.select([self._said], [], [], SECONDS)[0] and self._said.recv(1 << 20):
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._said.close()
