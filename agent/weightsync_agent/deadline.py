"""A point in time by which something must have happened. Every wait of the project takes one."""

from __future__ import annotations

import time


class Deadline:
    """Counts down from `seconds` on the monotonic clock."""

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end

    def earlier(self, seconds: float) -> Deadline:
        """A deadline `seconds` from now, or this one where it comes first."""
        return Deadline(min(seconds, self.remaining))
