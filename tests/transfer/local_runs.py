"""Starts `weightsync run` for tests, and watches what it says and leaves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml

WAIT_SECONDS = 120.0
"""Only ends a wait that would not end: everything waited for comes as soon as a busy machine allows."""
STUB = Path(__file__).with_name("stub_agent.py")


def manifest(
    name: str = "demo",
    *,
    count: int = 5,
    replicas: int = 2,
    sender: Mapping[str, Any] | None = None,
    receiver: Mapping[str, Any] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """A WeightSync whose containers are stub agents; `sender` and `receiver` are their STUB."""

    def template(stub: Mapping[str, Any] | None) -> dict[str, Any]:
        env = [{"name": "STUB", "value": json.dumps(stub or {})}]
        return {"spec": {"containers": [{"name": "stub", "command": ["python", str(STUB)], "env": env}]}}

    return {
        "apiVersion": "weightsync.dev/v1alpha1",
        "kind": "WeightSync",
        "metadata": {"name": name},
        "spec": {
            "device": "CPU",
            "placement": "Colocated",
            "sender": {"source": {"trainer": {}}, "template": template(sender)},
            "receivers": {"replicas": replicas, "template": template(receiver)},
            "steps": {"count": count},
            **spec,
        },
    }


class LocalRun:
    """One `weightsync run` of documents, in a state directory of the test's own."""

    def __init__(self, folder: Path, documents: Sequence[Mapping[str, Any]], *options: str) -> None:
        self.home = folder / "state"
        self.home.mkdir(exist_ok=True)
        self.file = folder / "manifest.yaml"
        self.file.write_text(yaml.safe_dump_all(documents))
        self.stdout: list[str] = []
        self.stderr: list[str] = []
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            [*COMMAND, "run", str(self.file), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.env,
        )
        self._readers = [
            threading.Thread(target=self._read, args=(source, lines), daemon=True)
            for source, lines in ((self.process.stdout, self.stdout), (self.process.stderr, self.stderr))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def env(self) -> dict[str, str]:
        return os.environ | {"XDG_RUNTIME_DIR": str(self.home), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def said(self, pattern: str, *, times: int = 1) -> list[re.Match[str]]:
        """Waits until so many lines of stderr match."""
        return self._until(self.stderr, pattern, times, "")

    def printed(self, pattern: str, *, after: str = "") -> list[re.Match[str]]:
        """Waits until a line of stdout matches, below the first one that matches `after`."""
        return self._until(self.stdout, pattern, 1, after)

    def pid(self, agent: str, start: int = 1) -> int:
        """Process id of a stub agent at its nth start."""
        return int(self.said(rf"^\[{agent}\] pid (\d+)$", times=start)[-1][1])

    def pids(self) -> list[int]:
        """Of every stub agent that said its own so far."""
        return [int(m[1]) for line in self.stderr if (m := re.search(r"\] pid (\d+)$", line))]

    def exit_code(self) -> int:
        """Waits for the end, its output included."""
        code = self.process.wait(timeout=WAIT_SECONDS)
        for reader in self._readers:
            reader.join(timeout=WAIT_SECONDS)
        return code

    def ask(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another `weightsync` command of the same user."""
        return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env=self.env, check=False)

    def left(self) -> list[str]:
        """Files and processes that are still there and should not be."""
        files = [str(path.relative_to(self.home)) for path in self.home.rglob("*") if not path.is_dir()]
        return files + [f"process {pid}" for pid in self.pids() if alive(pid)]

    def _read(self, source: Any, lines: list[str]) -> None:
        for line in source:
            with self._news:
                lines.append(line.rstrip("\n"))
                self._news.notify_all()

    def _until(self, lines: list[str], pattern: str, times: int, after: str) -> list[re.Match[str]]:
        deadline = time.monotonic() + WAIT_SECONDS
        with self._news:
            while True:
                first = next((i for i, line in enumerate(lines) if re.search(after, line)), len(lines)) if after else 0
                found = [match for line in lines[first:] if (match := re.search(pattern, line))]
                if len(found) >= times:
                    return found
                if time.monotonic() > deadline or (self.process.poll() is not None and not self._reading()):
                    raise AssertionError(f"{pattern!r} did not come {times} times; stderr: {self.stderr[-30:]}")
                self._news.wait(0.2)

    def _reading(self) -> bool:
        return any(reader.is_alive() for reader in self._readers)


COMMAND = (sys.executable, "-c", "from weightsync_operator.cli import main; main(prog_name='weightsync')")


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)
