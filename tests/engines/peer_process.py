"""Starts a real peer (bucket_peers.py) in the environment that has it, and reads what it says."""

from __future__ import annotations

import json
import os
import select
import subprocess
from pathlib import Path
from typing import Any, Self

import pytest

HERE = Path(__file__).parent
ENVIRONMENTS = Path(os.environ.get("WEIGHTSYNC_ENGINES", Path.home() / ".cache" / "weightsync" / "engines"))
SECONDS = 60.0


def interpreter(environment: str) -> str:
    """The Python of an engine's environment; skips the test where it is not installed."""
    path = ENVIRONMENTS / environment / "bin" / "python"
    if not path.exists():
        pytest.skip(f"{path} is not there: `make test-engines` installs it")
    return str(path)


class PeerProcess:
    """A running peer. Killed at the end of the `with` block if it still runs."""

    def __init__(self, role: str, address: str, *options: str) -> None:
        command = [interpreter("verl"), str(HERE / "bucket_peers.py"), role, address, *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        self._rest = b""

    def line(self, seconds: float = SECONDS) -> dict[str, Any]:
        """The next thing that it says. Fails where it says nothing, or has ended."""
        assert self.process.stdout is not None
        while b"\n" not in self._rest:
            assert select.select([self.process.stdout], [], [], seconds)[0], f"the peer says nothing for {seconds} s"
            part = os.read(self.process.stdout.fileno(), 1 << 20)
            assert part, f"the peer ended with {self.process.wait(10)}"
            self._rest += part
        first, self._rest = self._rest.split(b"\n", 1)
        found: dict[str, Any] = json.loads(first)
        return found

    def ended(self, seconds: float = SECONDS) -> int:
        return self.process.wait(seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
