"""An agent's output: into a bounded log file, into the last lines kept for an error, and on to whoever shows it."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

MAX_LOG_BYTES = 4 << 20
"""A log that grows beyond this becomes NAME.log.1, and the one before it goes: 8 MiB an agent at most."""
MAX_LINE_BYTES = 8192
TAIL_LINES = 20

_ENDS = re.compile(rb"\r\n|\n|\r")
_ERROR = re.compile(r"(\[rank\d+\]: )?[\w.]*(Error|Exception|Timeout|Failed|Mismatch|Closed|Refused): \S")
"""The last line of a traceback; with the rank that torch writes before."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class AgentLog:
    """The log of one agent over all its processes.

    Args:
        path: the file.
        on_line: takes each line as it comes: its stream (1: stdout, 2: stderr) and its text without control characters.
    """

    def __init__(self, path: Path, on_line: Callable[[int, str], None]) -> None:
        self.path = path
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        """The last lines of the process that ran last."""
        self._error = ""
        self._on_line = on_line
        self._file: BinaryIO = path.open("ab")
        self._size = self._file.tell()
        self._partial: dict[int, bytes] = {}

    def begin(self) -> None:
        """A new process begins: its lines alone are in `tail`."""
        self.tail.clear()
        self._error = ""
        self._partial.clear()

    @property
    def cause(self) -> str:
        """Why the process ended, as far as it said: its last line; after a launcher's ruled summary (torchrun) the last
        error of a process that it started."""
        last = next(reversed(self.tail), "")
        return last if re.search(r"\w", last) else self._error or last

    def feed(self, stream: int, data: bytes) -> None:
        """Takes what was read from a stream, in pieces of any size."""
        self._write(data)
        # A carriage return ends a line too: progress bars redraw theirs so. One at the very end may be half of \r\n.
        *lines, rest = _ENDS.split(self._partial.pop(stream, b"") + data)
        while len(rest) > MAX_LINE_BYTES:
            lines.append(rest[:MAX_LINE_BYTES])
            rest = rest[MAX_LINE_BYTES:]
        self._partial[stream] = rest
        for line in lines:
            self._line(stream, line)

    def end(self, stream: int) -> None:
        """The stream has ended: what has no line end is a line too."""
        self._line(stream, self._partial.pop(stream, b""))

    def close(self) -> None:
        self._file.close()

    def _line(self, stream: int, line: bytes) -> None:
        text = _CONTROL.sub("", line[:MAX_LINE_BYTES].decode(errors="replace")).rstrip()
        if text:
            self.tail.append(text)
            if _ERROR.match(text):
                self._error = text
            self._on_line(stream, text)

    def _write(self, data: bytes) -> None:
        if self._size + len(data) > MAX_LOG_BYTES:
            self._file.close()
            self.path.replace(self.path.with_name(self.path.name + ".1"))
            self._file = self.path.open("wb")
            self._size = 0
        self._file.write(data)
        self._file.flush()
        self._size += len(data)
