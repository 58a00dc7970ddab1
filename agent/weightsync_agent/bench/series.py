"""Numbers noted step by step, in memory that is all taken before the first: a list's own growth would be a slope."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import overload


class Series(Sequence[float]):
    """At most `room` numbers, 8 bytes each; what comes after is dropped. Integers are exact up to 2^53."""

    def __init__(self, room: int) -> None:
        self._values = array("d", bytes(8 * room))
        self._count = 0

    def append(self, value: float) -> None:
        if self._count < len(self._values):
            self._values[self._count] = value
            self._count += 1

    def clear(self) -> None:
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[float]: ...
    def __getitem__(self, index: int | slice) -> float | Sequence[float]:
        return self._values[: self._count][index]

    def __iter__(self) -> Iterator[float]:
        return iter(self._values[: self._count])
