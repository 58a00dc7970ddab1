"""torch's reference counters of exported CUDA memory, read and reset where they lie: in /dev/shm, one word an export.

An export sets its word to 1, the importer's release takes 1 away, unatomically; the exporter frees the memory only once
it reads 0. The word is unsigned: releasing twice wraps it, and the memory would never come back. (torch's
StorageSharing.cpp and CudaIPCTypes.cpp.)
"""

from __future__ import annotations

import mmap
import os
import re
import weakref
from pathlib import Path

from ..errors import TransportError

FOLDER = Path("/dev/shm")
HEADER_BYTES = 64
"""torch's RefcountedMapAllocator keeps a count of its own in front of the data."""
SLOTS = 10_000
"""CUDA_IPC_REF_COUNTER_FILE_SIZE: words in one file, each used once."""
FILE_BYTES = HEADER_BYTES + 8 * SLOTS

_NAME = re.compile(r"/torch_(\d+)_[A-Za-z0-9_]+")
_open: weakref.WeakValueDictionary[str, CounterFile] = weakref.WeakValueDictionary()


class CounterFile:
    """One file of counters, mapped. It stays readable after torch has unlinked it."""

    def __init__(self, name: str) -> None:
        """Use `counter_file`."""
        path = FOLDER / name.lstrip("/")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise TransportError(
                f"torch's counter {path} is not here: the exporter has another /dev/shm (mount one memory-backed "
                "volume at /dev/shm in both containers), or is gone"
            ) from None
        except PermissionError:
            raise TransportError(
                f"torch's counter {path} belongs to another user: run both containers under one user (runAsUser)"
            ) from None
        try:
            size = os.fstat(descriptor).st_size
            if size != FILE_BYTES:
                raise TransportError(
                    f"torch's counters {path} take {size} bytes, not {FILE_BYTES}: this version of torch lays them out "
                    "differently, so releases can't be proved; use descriptors (mode Packed, or adopt=True)"
                )
            self._words = memoryview(mmap.mmap(descriptor, size))[HEADER_BYTES:].cast("Q")
        finally:
            os.close(descriptor)
        self.name = name

    def read(self, slot: int) -> int:
        """The counter, unsigned 64 bits."""
        return int(self._words[slot])

    def write(self, slot: int, value: int) -> None:
        self._words[slot] = value


def counter_file(name: str) -> CounterFile:
    """The file of this name: one mapping a file, for as long as somebody holds it. Raises TransportError."""
    owner_pid(name)
    found = _open.get(name)
    if found is None:
        found = _open[name] = CounterFile(name)
    return found


def owner_pid(name: str) -> int:
    """PID of the exporter, in its own PID namespace. Raises TransportError for what is no counter's name."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise TransportError(f"{name!r} is no name of torch's counters")
    return int(match[1])
