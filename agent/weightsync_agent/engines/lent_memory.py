"""The buffer of a step: ours, that a peer opens, or a peer's, that we open. Host memory by name, CUDA memory by IPC."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import torch

from ..deadline import Deadline
from ..errors import ConfigError, TransportError, ViewsRetained
from ..host_memory import HostMemory
from .bucket_messages import CudaHandle, FileHandle, Handle
from .shared_file import SharedFile, map_file

RELEASE_SECONDS = 10.0
"""How long a peer may take to release CUDA memory after it said that it has."""


class Lent(ABC):
    """A buffer of ours. Life of a step: `lend`, `opened`, `returned`."""

    buffer: torch.Tensor
    """uint8 [nbytes]."""

    @abstractmethod
    def lend(self) -> Handle:
        """For one peer, once. Raises TransportError, ConfigError."""

    def opened(self) -> None:
        """The peer has it mapped."""

    def settle(self) -> None:
        """What was queued into the buffer is in it."""

    @abstractmethod
    def returned(self, deadline: Deadline, peer_gone: bool = False) -> int:
        """The step is over: takes it back; gives the bytes that the peer still holds, 0 where that is proved."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""


class LentFile(Lent):
    """A file in /dev/shm, new for every step: its name is gone as soon as the peer has it mapped."""

    def __init__(self, nbytes: int, prefix: str) -> None:
        self._nbytes, self._prefix = nbytes, prefix
        self._file: SharedFile | None = None

    def lend(self) -> FileHandle:
        self.close()
        self._file = SharedFile.create(self._nbytes, self._prefix)
        self.buffer = self._file.memory.tensor()
        return FileHandle(name=self._file.name, nbytes=self._nbytes)

    def opened(self) -> None:
        if self._file is not None:
            self._file.unlink()

    def returned(self, deadline: Deadline, peer_gone: bool = False) -> int:
        self.close()
        return 0  # the kernel frees it with its last holder

    def close(self) -> None:
        if self._file is not None:
            del self.buffer
            self._file.close()
            self._file = None


class LentCuda(Lent):
    """Device memory of torch's allocator, kept for life; exported anew for every step, since each export is opened
    once and its release is counted."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        from ..cuda.export import ExportLedger

        self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._ledger = ExportLedger(device, limit_bytes=2 * nbytes)

    def lend(self) -> CudaHandle:
        made = self._ledger.export(self.buffer)
        return CudaHandle(
            shape=tuple(self.buffer.shape),
            stride=(1,),
            offset=0,
            dtype="uint8",
            handle=made.handle,
        )

    def settle(self) -> None:
        torch.cuda.synchronize(self.buffer.device)

    def returned(self, deadline: Deadline, peer_gone: bool = False) -> int:
        while not peer_gone and self._ledger.unreleased and not deadline.passed:
            time.sleep(0.0005)
        return self._ledger.retire_all(importer_gone=peer_gone)

    def close(self) -> None:
        self._ledger.retire_all()
        self.buffer = torch.empty(0, dtype=torch.uint8)


class Borrowed(ABC):
    """A buffer of the peer's, mapped for one step."""

    nbytes: int

    @abstractmethod
    def window(self) -> torch.Tensor:
        """uint8 [nbytes], counted by `views_alive`."""

    @abstractmethod
    def views_alive(self) -> bool: ...

    @abstractmethod
    def close(self) -> None:
        """Releases it, once. Idempotent."""

    def end(self, what: str) -> None:
        """Raises ViewsRetained while a view lives: whoever holds it would see later weights under its feet."""
        if self.views_alive():
            raise ViewsRetained(
                f"{what}: a view of the sender's buffer outlived the load, and whoever holds it would see later "
                "weights under its feet: copy the tensors that load_weights keeps (tensor.clone() or "
                "parameter.copy_(tensor))"
            )


class BorrowedFile(Borrowed):
    def __init__(self, handle: FileHandle, peer: str) -> None:
        self._memory: HostMemory = map_file(handle.name, handle.nbytes, peer)
        self.nbytes = handle.nbytes

    def window(self) -> torch.Tensor:
        return self._memory.window()

    def views_alive(self) -> bool:
        return self._memory.views_alive()

    def close(self) -> None:
        self._memory.close()


class BorrowedCuda(Borrowed):
    def __init__(self, handle: CudaHandle, device: torch.device, peer: str) -> None:
        from ..cuda.driver import gpu_uuid
        from ..cuda.importer import TorchImport

        self._import = TorchImport(handle.handle.model_copy(update={"gpu": gpu_uuid(device)}), device)
        self._handle = handle
        dtype = getattr(torch, handle.dtype)
        extent = sum((n - 1) * s for n, s in zip(handle.shape, handle.stride, strict=True)) + 1
        self.nbytes = dtype.itemsize
        for size in handle.shape:
            self.nbytes *= size
        inside = (
            handle.offset >= 0
            and min(handle.stride, default=1) >= 0
            and ((handle.offset + extent) * dtype.itemsize <= handle.handle.storage_bytes)
        )
        if not inside:
            self._import.close()
            raise TransportError(
                f"{peer} describes a tensor of shape {list(handle.shape)} beyond the {handle.handle.storage_bytes} "
                "bytes that it lends"
            )

    def tensor(self) -> torch.Tensor:
        """The tensor that the handle describes, counted by `views_alive`."""
        raw = self._import.tensor()
        whole = raw[: raw.numel() // self._itemsize * self._itemsize].view(getattr(torch, self._handle.dtype))
        return whole.as_strided(self._handle.shape, self._handle.stride, self._handle.offset)

    @property
    def _itemsize(self) -> int:
        dtype = getattr(torch, self._handle.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype.itemsize

    def window(self) -> torch.Tensor:
        found = self.tensor()
        if found.dtype != torch.uint8 or found.dim() != 1 or not found.is_contiguous():
            raise TransportError("the peer's buffer is not a flat one of bytes")
        return found

    def views_alive(self) -> bool:
        return self._import.views_alive()

    def close(self) -> None:
        self._import.close()


def lend(nbytes: int, device: torch.device, prefix: str) -> Lent:
    """A buffer on `device`. Raises ConfigError."""
    if device.type == "cuda":
        return LentCuda(nbytes, device)
    if device.type != "cpu":
        raise ConfigError(f"buffers are lent in host memory or on a CUDA device, not on {device}")
    return LentFile(nbytes, prefix)


def borrow(handle: Handle, device: torch.device, peer: str) -> Borrowed:
    """Opens a peer's buffer. Raises TransportError."""
    if isinstance(handle, FileHandle):
        return BorrowedFile(handle, peer)
    if device.type != "cuda":
        raise TransportError(
            f"{peer} lends CUDA memory, and this receiver's target is on {device}: use shared memory there"
        )
    return BorrowedCuda(handle, device, peer)
