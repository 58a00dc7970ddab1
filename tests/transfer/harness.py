"""Real senders and receivers: each receiver is a process of its own, over real sockets and shared memory."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from weightsync_api.agent_config import AgentConfig

torch.set_num_threads(1)

START_SECONDS = 200
"""Importing torch on a busy machine takes a while; a wait this long only ends early."""


class ReceiverProcess:
    """One `receiver_process.py`, and the lines that it says."""

    def __init__(self, config_path: Path, rank: int, options: dict[str, Any]) -> None:
        self.rank = rank
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "receiver_process.py"), str(config_path), str(rank),
             json.dumps(options)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **options.get("environment", {})},
        )  # fmt: skip
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)

    def until(self, key: str, value: object = None, timeout: float = START_SECONDS) -> dict[str, Any]:
        """The next line that has `key` (equal to `value`, where given). Fails at the end of output or the timeout."""
        while True:
            try:
                line = self._lines.get(timeout=timeout)
            except queue.Empty:
                pytest.fail(f"rank {self.rank} said nothing with {key!r} within {timeout} s")
            if line is None:
                pytest.fail(f"rank {self.rank} ended (exit {self.process.wait()}) before it said {key!r}")
            if key in line and (value is None or line[key] == value):
                return line

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def run_dir() -> Iterator[Path]:
    # Not pytest's tmp_path: a Unix socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ws-") as directory:
        yield Path(directory)


@pytest.fixture
def make_config(run_dir: Path) -> Callable[..., AgentConfig]:
    def make(**changes: Any) -> AgentConfig:
        endpoint = f"ipc://{run_dir}/control"
        values: dict[str, Any] = {
            "namespace": "default", "name": "sample", "device": "CPU", "transport": "IPC", "mode": "Packed",
            "bucket_bytes": 16384, "slots": 2, "receivers": 1, "join_timeout_seconds": START_SECONDS,
            "ack_timeout_seconds": 120, "step_timeout_seconds": 150, "bind": endpoint, "connect": endpoint,
            "runtime_dir": str(run_dir),
        }  # fmt: skip
        return AgentConfig(**(values | changes))

    return make


@pytest.fixture
def start(run_dir: Path) -> Iterator[Callable[..., ReceiverProcess]]:
    started: list[ReceiverProcess] = []

    def begin(config: AgentConfig, rank: int = 1, **options: Any) -> ReceiverProcess:
        path = run_dir / f"config-{rank}-{len(started)}.json"
        path.write_text(config.model_dump_json())
        started.append(ReceiverProcess(path, rank, options))
        return started[-1]

    yield begin
    for receiver in started:
        receiver.kill()
