"""Host memory that another process can map: an anonymous file (memfd) that is passed as a file descriptor.

Nothing of it has a name in a file system, so a killed process leaves nothing behind. Its size is sealed, so that a
peer can't shrink it under a mapping (which would be a SIGBUS at the next access). See memfd_create(2), fcntl(2).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import weakref

import numpy as np
import torch

from .errors import TransportError, ViewsRetained

# linux/fcntl.h; Python's fcntl module has these names from 3.13 on only.
_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_F_SEAL_SEAL = 0x1
_F_SEAL_SHRINK = 0x2
_F_SEAL_GROW = 0x4
_HUGE_PAGE = 2 << 20


class HostMemory:
    """One mapping of anonymous host memory, shared by everyone who has its descriptor.

    `create` makes it, `map` maps what another process made. The descriptor lives as long as this object is open.
    """

    def __init__(self, fd: int, nbytes: int, mapping: mmap.mmap) -> None:
        """Takes ownership of both. Use `create` or `map`."""
        self._fd = fd
        self.nbytes = nbytes
        self._mapping: mmap.mmap | None = mapping
        self._windows: list[weakref.ref[np.ndarray[tuple[int], np.dtype[np.uint8]]]] = []

    @classmethod
    def create(cls, nbytes: int, name: str = "weightsync", *, prefault: bool = True) -> HostMemory:
        """New memory of `nbytes` bytes, all zero. `name` is shown in /proc/PID/maps only and need not be unique.

        `prefault`: allocates every page now, so that no step pays for it, and a machine without room says so here
        and not by a signal in a step. Raises TransportError.
        """
        if nbytes <= 0:
            raise TransportError(f"shared host memory {name!r} of {nbytes} bytes: the size must be above 0")
        fd = -1
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
            mapping = _map(fd, nbytes, prefault)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            hint = " (the container's memory limit counts shared memory too)" if error.errno == errno.ENOMEM else ""
            raise TransportError(f"can't make {nbytes} bytes of shared host memory {name!r}: {error}{hint}") from error
        return cls(fd, nbytes, mapping)

    @classmethod
    def map(cls, fd: int, nbytes: int, *, prefault: bool = True) -> HostMemory:
        """Maps the first `nbytes` bytes of a peer's memory. Takes ownership of `fd`, also when it fails.

        Raises TransportError where the descriptor is smaller than `nbytes`, is no memfd, or its size is not sealed.
        """
        try:
            size = os.fstat(fd).st_size
            if nbytes <= 0 or size < nbytes:
                raise TransportError(f"the peer's shared host memory has {size} bytes, and its offer says {nbytes}")
            try:
                seals = fcntl.fcntl(fd, _F_GET_SEALS)
            except OSError:
                raise TransportError("the peer's descriptor is no shared host memory (memfd)") from None
            if not seals & _F_SEAL_SHRINK:
                raise TransportError("the peer's shared host memory could be shrunk under us: its size is not sealed")
            mapping = _map(fd, nbytes, prefault)
        except OSError as error:
            os.close(fd)
            raise TransportError(f"can't map {nbytes} bytes of the peer's shared host memory: {error}") from error
        except TransportError:
            os.close(fd)
            raise
        return cls(fd, nbytes, mapping)

    @property
    def fd(self) -> int:
        """The descriptor, to be passed on; it stays this object's. Raises TransportError when closed."""
        if self._fd < 0:
            raise TransportError("this shared host memory is closed")
        return self._fd

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def tensor(self) -> torch.Tensor:
        """uint8 [nbytes] over the whole mapping, for this process's own use; `views_alive` does not count it."""
        return torch.from_numpy(self._array(0, self.nbytes))

    def window(self, start: int = 0, nbytes: int | None = None) -> torch.Tensor:
        """uint8 [nbytes] over a part, to be handed to someone who must not keep it; `end_window` proves that.

        The proof is exact: the tensor's storage holds the only reference to an array, so the array dies when the last
        view does, whoever holds it. (`torch.frombuffer` can't serve: it gives the buffer back at once.)
        """
        array = self._array(start, self.nbytes - start if nbytes is None else nbytes)
        self._windows.append(weakref.ref(array))
        return torch.from_numpy(array)

    def views_alive(self) -> bool:
        """Whether a tensor over any window ever handed out still lives, anywhere in this process."""
        self._windows = [window for window in self._windows if window() is not None]
        return bool(self._windows)

    def end_window(self) -> None:
        """Call when every window must be gone. Raises ViewsRetained while one is not, now and at later calls."""
        if self.views_alive():
            raise ViewsRetained(
                f"{len(self._windows)} view(s) of a staging buffer of {self.nbytes} bytes outlived the load: whoever "
                "holds it would see later weights under its feet. Copy the tensors that load_weights keeps "
                "(tensor.clone() or parameter.copy_(tensor))"
            )

    def close(self) -> None:
        """Gives the descriptor and the mapping back. Idempotent.

        A tensor that still lives keeps the mapping (never a dangling pointer); it goes when the tensor does.
        """
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._mapping is not None:
            with contextlib.suppress(BufferError):  # views are alive: the mapping goes with the last of them
                self._mapping.close()
            self._mapping = None

    def __enter__(self) -> HostMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def _array(self, start: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        if self._mapping is None:
            raise TransportError("this shared host memory is closed")
        if start < 0 or nbytes <= 0 or start + nbytes > self.nbytes:
            raise ValueError(f"bytes {start} to {start + nbytes} are not within {self.nbytes}")
        return np.frombuffer(self._mapping, np.uint8, count=nbytes, offset=start)


def _map(fd: int, nbytes: int, prefault: bool) -> mmap.mmap:
    mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    try:
        if nbytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages for shared memory
                mapping.madvise(mmap.MADV_HUGEPAGE)
        if prefault:
            # Allocates pages with an error instead of a signal where there is no room; then maps them.
            os.posix_fallocate(fd, 0, nbytes)
            _populate(mapping, nbytes)
    except BaseException:
        mapping.close()
        raise
    return mapping


def _populate(mapping: mmap.mmap, nbytes: int) -> None:
    """Maps every page, by MADV_POPULATE_WRITE (Linux 5.14), else by reading one byte of each."""
    try:
        mapping.madvise(23)  # MADV_POPULATE_WRITE of linux/mman.h; Python has no name for it
    except OSError:
        np.frombuffer(mapping, np.uint8)[:: mmap.PAGESIZE].max()


class ControlPage:
    """Words of 32 bits in shared host memory; a load or store of one is atomic (aligned), and nothing more is.

    Use as an export counter: the exporter sets a word to 1 when it exports, the importer sets it to 0 when it has
    released, the exporter reads it. A word that stays 1 after the importer is gone is memory that it did not give back.
    """

    def __init__(self, memory: HostMemory) -> None:
        """Over the whole of `memory`, which stays the caller's to close. Words of new memory are 0."""
        self._words = memory.tensor()[: memory.nbytes // 4 * 4].numpy().view(np.uint32)

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, index: int) -> int:
        return int(self._words[index])

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index] = value

    def fill(self, value: int) -> None:
        self._words[:] = value
