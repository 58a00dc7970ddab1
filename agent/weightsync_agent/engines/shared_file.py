"""Host memory under a name in /dev/shm, for peers that open shared memory by name (Python's, as verl uses it).

A memfd (host_memory.py) would be safer, but only what has a name can be opened by a peer that is given one. Our own
files are unlinked as soon as the peer has mapped them, so a process that is killed later leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import stat
from pathlib import Path

import torch

from ..errors import TransportError
from ..host_memory import HostMemory

FOLDER = Path("/dev/shm")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


class SharedFile:
    """Memory of ours that a peer opens by name."""

    def __init__(self, memory: HostMemory, name: str) -> None:
        """Use `create`."""
        self.memory = memory
        self.name = name

    @classmethod
    def create(cls, nbytes: int, prefix: str) -> SharedFile:
        """A new file of `nbytes` bytes, all zero and allocated, that only this user can open. Raises TransportError."""
        name = f"{prefix}_{secrets.token_hex(16)}"
        fd = -1
        try:
            fd = os.open(FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            os.posix_fallocate(fd, 0, nbytes)  # a full /dev/shm is an error here, and a SIGBUS at a write later
            mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
                (FOLDER / name).unlink(missing_ok=True)
            raise TransportError(
                f"can't make {nbytes} bytes of shared memory in {FOLDER}: {error.strerror} (a container has 64 MiB "
                "there unless it mounts a memory-backed volume)"
            ) from error
        return cls(HostMemory(fd, nbytes, mapping), name)

    def unlink(self) -> None:
        """Takes the name away; whoever has it mapped keeps the memory. Idempotent."""
        (FOLDER / self.name).unlink(missing_ok=True)

    def close(self) -> None:
        """Idempotent."""
        self.unlink()
        self.memory.close()


def map_file(name: str, nbytes: int, peer: str) -> HostMemory:
    """Maps the first `nbytes` bytes of a peer's file. Raises TransportError.

    The file can't be sealed, so a peer that shrinks it under us would end this process (SIGBUS): it must be of the
    same user.
    """
    name = name.removeprefix("/")
    if not _NAME.fullmatch(name):
        raise TransportError(f"{peer} names the shared memory {name[:80]!r}, which is no name of a file in {FOLDER}")
    try:
        fd = os.open(FOLDER / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise TransportError(
            f"{peer}'s shared memory {FOLDER / name} can't be opened ({error.strerror}): it runs in another container "
            "(mount one memory-backed volume at /dev/shm in both), as another user, or is gone"
        ) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise TransportError(f"{peer}'s shared memory {FOLDER / name} is not a file of user {os.geteuid()}")
        if not 0 < nbytes <= status.st_size:
            raise TransportError(f"{peer} says {nbytes} bytes, and {FOLDER / name} has {status.st_size}")
        return HostMemory(fd, nbytes, mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED))
    except BaseException:
        os.close(fd)
        raise


def open_shared_file(
    name: str, nbytes: int, _0: None = None, _1: None = None, _2: None = None, _3: None = None, device: object = None
) -> torch.Tensor:
    """uint8 [nbytes] over a file: what checkpoint-engine's worker calls on the CPU to open our buffer.

    It puts its own device in the seventh place of the arguments, as torch's function for CUDA memory has it there.
    """
    memory = map_file(name, nbytes, "the sender")
    tensor = memory.tensor()
    memory.close()  # the mapping lives as long as the tensor
    return tensor
