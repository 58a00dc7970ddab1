"""The importer: opens one torch handle once and releases it once, whatever happens in between."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch

from ..errors import Closed, TransportError
from ..protocol import TorchHandle
from .arena import bytes_at
from .counters import SLOTS, counter_file, owner_pid
from .driver import DriverError, allocation_of, device_index, gpu_uuid, normal_uuid
from .export import IPC_HANDLE_BYTES, handle_kind


class TorchImport:
    """One opened handle. A second release can't happen: the storage is made once and has one destructor."""

    def __init__(self, handle: TorchHandle, device: torch.device | int) -> None:
        """Checks every field, then opens. The device index is this process' own, whatever the exporter's was.

        Raises TransportError with what to change; nothing was opened then, or it was released again.
        """
        self.device = torch.device("cuda", device_index(device))
        self.handle = handle
        self._storage: torch.UntypedStorage | None = None
        self._views: list[weakref.ref[Any]] = []
        _check(handle, self.device)
        with torch.cuda.device(self.device):
            try:
                storage = torch.UntypedStorage._new_shared_cuda(
                    self.device.index,
                    handle.handle,
                    handle.storage_bytes,
                    handle.storage_offset_bytes,
                    handle.counter_name.encode(),
                    handle.counter_slot,
                    handle.event,
                    # Every step is fenced by its Begin, and torch never destroys an event that it opened.
                    False,
                )
            except RuntimeError as error:
                raise TransportError(
                    f"CUDA can't open the peer's memory ({str(error).splitlines()[0]}). Equal PIDs in two PID "
                    "namespaces look so (shareProcessNamespace: true), and so does a peer that is gone"
                ) from None
        self._storage = storage
        start = int(storage.data_ptr())
        self.base = start - handle.storage_offset_bytes
        """Address of the allocation's first byte in this process; dead after `close`."""
        try:
            first, self.allocation_bytes = allocation_of(start, self.device)
        except DriverError:
            self.close()
            raise
        if first != self.base or handle.storage_offset_bytes + handle.storage_bytes > self.allocation_bytes:
            offset, size = handle.storage_offset_bytes, self.allocation_bytes
            self.close()
            raise TransportError(
                f"the peer's handle says {handle.storage_bytes} bytes at {offset}, and the allocation has {size}"
            )

    @property
    def closed(self) -> bool:
        return self._storage is None

    def pointer_at(self, offset: int, nbytes: int) -> int:
        """Address of `nbytes` bytes at `offset` of the allocation. Raises TransportError where they are not in it."""
        if self._storage is None:
            raise Closed("this import is released")
        if offset < 0 or nbytes < 0 or offset + nbytes > self.allocation_bytes:
            raise TransportError(
                f"the peer places {nbytes} bytes at {offset} of an allocation of {self.allocation_bytes}"
            )
        return self.base + offset

    def tensor(self) -> torch.Tensor:
        """uint8 [storage_bytes] over the exported storage. A view that outlives `close` delays the release."""
        if self._storage is None:
            raise Closed("this import is released")
        pointer = self.base + self.handle.storage_offset_bytes
        tensor, view = bytes_at(pointer, self.handle.storage_bytes, self._storage)
        self._views = [*(v for v in self._views if v() is not None), view]
        return tensor

    def views_alive(self) -> bool:
        """Whether a tensor over it lives: the release waits for the last one."""
        self._views = [view for view in self._views if view() is not None]
        return bool(self._views)

    def close(self) -> None:
        """Releases, once all work of this device that may read the memory is done. Idempotent.

        torch's own release waits for the current stream only, so all streams are waited for here: release waiting
        streams (flags.py) before.
        """
        if self._storage is None:
            return
        torch.cuda.synchronize(self.device)
        with torch.cuda.device(self.device):
            self._storage = None

    def __enter__(self) -> TorchImport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check(handle: TorchHandle, device: torch.device) -> None:
    if normal_uuid(handle.gpu) != gpu_uuid(device):
        raise TransportError(
            f"the peer's memory is on GPU {handle.gpu}, and {device} is GPU {gpu_uuid(device)}: torch's handles need "
            "one GPU; use descriptors or NCCL"
        )
    if kind := handle_kind(handle.handle):
        raise TransportError(kind)
    if len(handle.event) != IPC_HANDLE_BYTES:
        raise TransportError(f"the peer's event handle has {len(handle.event)} bytes, not {IPC_HANDLE_BYTES}")
    if owner_pid(handle.counter_name) == os.getpid():
        raise TransportError(
            f"the exporter has this process' own PID {os.getpid()}: it is this process, or the CUDA driver would take "
            "it for it (set shareProcessNamespace: true, or run both in one container)"
        )
    if handle.counter_slot >= SLOTS:
        raise TransportError(f"torch's counters have {SLOTS} slots, and the peer names slot {handle.counter_slot}")
    counter = counter_file(handle.counter_name).read(handle.counter_slot)
    if counter != 1:
        raise TransportError(
            f"the peer's counter reads {counter}, not 1: this export was already released, and opening it would "
            "release it twice; it needs a new export"
        )
