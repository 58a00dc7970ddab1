"""The bench's other processes. They end with this one, however it ends, and never hear the terminal's Ctrl-C."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from weightsync_api.agent_config import ENV_EXIT_ON_STDIN_EOF

from ..deadline import Deadline
from ..errors import WeightSyncError

START_SECONDS = 300.0
"""Importing torch and touching 61 GB take a while."""
END_SECONDS = 10.0


class BenchError(WeightSyncError):
    """A process of the bench ended or said nothing; or a step did not reach every receiver."""


class Other:
    """`python -m MODULE ARGUMENTS`, in a session of its own; it ends when our end of its stdin closes."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        self._what = module.rpartition(".")[2]
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {ENV_EXIT_ON_STDIN_EOF: "1"},
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self, deadline: Deadline) -> bytes:
        """The next line that it says. Raises BenchError."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], deadline.remaining)[0]:
            raise BenchError(f"the {self._what} process {self.pid} said nothing for {deadline.seconds:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"the {self._what} process {self.pid} ended with exit code {self._process.wait()}")
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: TracebackType | BaseException | None) -> None:
        # After a fault nobody has said goodbye to it.
        try:
            self._process.wait(END_SECONDS if kind is None else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
