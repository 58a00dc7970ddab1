"""Device memory that other processes map: cuMemCreate memory, passed as a file descriptor.

No counter, no limbo, no name: it works across namespaces, users and equal PIDs, and when its last mapping is gone,
however the process died, the driver frees it. A process on another GPU maps it too and reads it over NVLink, where
both processes see both GPUs' device nodes. See the CUDA driver API, "Virtual Memory Management".
"""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import Any

import torch

from ..errors import TransportError
from .driver import DriverError, bindings, call, device_index, gpu_uuid, on

GRANULARITY = 2 << 20
"""Bytes. Both sides round up to it, or to what the driver asks where that is more."""


class _Window:
    """What `torch.as_tensor` makes a tensor of: its storage keeps this object alive until the last view is gone."""

    def __init__(self, pointer: int, nbytes: int, keep: object) -> None:
        self.keep = keep
        # https://numpy.org/doc/stable/reference/arrays.interface.html, as Numba's CUDA form of it, version 3.
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
            "stream": None,
        }


def bytes_at(pointer: int, nbytes: int, keep: object = None) -> tuple[torch.Tensor, weakref.ref[Any]]:
    """uint8 [nbytes] over device memory, and a reference that is dead once the last view of it is. `keep` lives along.

    Raises TransportError where torch would copy instead of looking at the memory itself.
    """
    window = _Window(pointer, nbytes, keep)
    tensor = torch.as_tensor(window)
    if tensor.data_ptr() != pointer:
        raise TransportError(f"torch made a copy of the {nbytes} bytes at {pointer:#x} instead of a view")
    return tensor, weakref.ref(window)


class _Mapping:
    """The driver's objects. Given back exactly once, by `free` or when the last view dies."""

    def __init__(self, index: int, pointer: int, mapped_bytes: int, handle: Any) -> None:
        self.index = index
        self.pointer = pointer
        self.mapped_bytes = mapped_bytes
        self.handle = handle
        self.freed = False

    def free(self) -> None:
        if self.freed:
            return
        self.freed = True
        with on(self.index):
            # Unmapping under a kernel that still reads is a fault that poisons the whole context.
            call("cuCtxSynchronize")
            call("cuMemUnmap", self.pointer, self.mapped_bytes)
            call("cuMemAddressFree", self.pointer, self.mapped_bytes)
            call("cuMemRelease", self.handle)

    def __del__(self) -> None:
        if not self.freed:
            with suppress(Exception):  # the interpreter or the driver is shutting down: the kernel frees it all
                self.free()


class DeviceArena:
    """One piece of device memory. `create` makes it, `map` maps what another process made."""

    def __init__(self, mapping: _Mapping, nbytes: int, gpu: str) -> None:
        """Use `create` or `map`."""
        self._mapping: _Mapping | None = mapping
        self._views: list[weakref.ref[Any]] = []
        self.pointer = mapping.pointer
        """Address of the first byte in this process; dead after `close`."""
        self.nbytes = nbytes
        self.mapped_bytes = mapping.mapped_bytes
        """`nbytes` rounded up to the driver's granularity: what the device really gives."""
        self.device = torch.device("cuda", mapping.index)
        """The device that may access it. The memory itself may be another GPU's."""
        self.gpu = gpu
        """UUID of the GPU whose memory it is."""

    @classmethod
    def create(cls, nbytes: int, device: torch.device | int) -> DeviceArena:
        """New memory of a device; its content is undefined. Raises TransportError, DriverError when there is no room.

        It is outside torch's allocator: `torch.cuda.memory_reserved` doesn't count it.
        """
        index = device_index(device)
        mapped = mapped_size(nbytes, index)
        with on(index):
            try:
                handle = call("cuMemCreate", mapped, _properties(index), 0)
            except DriverError as error:
                free = int(call("cuMemGetInfo")[0])
                raise DriverError(
                    f"{error}: {mapped} bytes of shared memory were asked of cuda:{index}, and {free} are free "
                    "(torch.cuda.empty_cache() gives back what torch's allocator only keeps)",
                    error.name,
                ) from None
        return cls(_map(index, handle, mapped), nbytes, gpu_uuid(index))

    @classmethod
    def map(cls, fd: int, nbytes: int, device: torch.device | int, gpu: str = "") -> DeviceArena:
        """Maps a peer's memory for `device`; `gpu`: the UUID of its GPU. Takes ownership of `fd`, also when it fails.

        Raises TransportError: the descriptor is none of device memory, or its GPU can't be reached from here.
        """
        try:
            index = device_index(device)
            mapped = mapped_size(nbytes, index)
            with on(index):
                handle = call("cuMemImportFromShareableHandle", fd, _handle_type())
            mapping = _map(index, handle, mapped)
        except DriverError as error:
            hint = (
                f"; the memory is on GPU {gpu or 'unknown'}, which this process can't reach: both must be in one "
                "container that sees both device nodes, or name one DRA claim"
                if error.name == "CUDA_ERROR_INVALID_DEVICE"
                else "; is the driver the same in both containers?"
            )
            raise TransportError(f"can't map {nbytes} bytes of the peer's device memory: {error}{hint}") from error
        finally:
            os.close(fd)
        return cls(mapping, nbytes, gpu or gpu_uuid(index))

    @property
    def closed(self) -> bool:
        return self._mapping is None

    def export_fd(self) -> int:
        """A new descriptor of the memory, the caller's to close: while one is open, the memory lives."""
        mapping = self._open()
        with on(mapping.index):
            return int(call("cuMemExportToShareableHandle", mapping.handle, _handle_type(), 0))

    def tensor(self) -> torch.Tensor:
        """uint8 [nbytes] over the memory. For memory of this device; a peer GPU's goes by `pointer`.

        The memory outlives `close` for as long as a view of it lives; `views_alive` says whether one does.
        """
        tensor, view = bytes_at(self.pointer, self.nbytes, self._open())
        self._views = [*(v for v in self._views if v() is not None), view]
        return tensor

    def views_alive(self) -> bool:
        """Whether any tensor over this memory still lives anywhere in this process."""
        self._views = [view for view in self._views if view() is not None]
        return bool(self._views)

    def close(self) -> None:
        """Gives the memory back: now, or where views of it still live, with the last of them. Idempotent.

        Waits for all of the device's work in this process: release waiting streams (flags.py) before.
        """
        mapping, self._mapping = self._mapping, None
        if mapping is not None and not self.views_alive():
            mapping.free()

    def __enter__(self) -> DeviceArena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> _Mapping:
        if self._mapping is None:
            raise TransportError("this device memory is closed")
        return self._mapping


def mapped_size(nbytes: int, device: torch.device | int) -> int:
    """Bytes that `nbytes` take when mapped on a device. Raises TransportError for a size that is none."""
    if not 0 < nbytes <= 1 << 46:
        raise TransportError(f"{nbytes} is no size of device memory")
    index = device_index(device)
    minimum = bindings().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    with on(index):
        step = max(GRANULARITY, int(call("cuMemGetAllocationGranularity", _properties(index), minimum)))
    return -(-nbytes // step) * step


def _handle_type() -> Any:
    return bindings().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _properties(index: int) -> Any:
    driver = bindings()
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = _handle_type()
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = int(call("cuDeviceGet", index))
    return properties


def _map(index: int, handle: Any, mapped_bytes: int) -> _Mapping:
    """Maps a handle at a fresh address with access for `index`. On failure everything is undone, the handle too."""
    driver = bindings()
    pointer, mapped = 0, False
    with on(index):
        try:
            pointer = int(call("cuMemAddressReserve", mapped_bytes, 0, 0, 0))
            call("cuMemMap", pointer, mapped_bytes, 0, handle, 0)
            mapped = True
            access = driver.CUmemAccessDesc()
            access.location = _properties(index).location
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            call("cuMemSetAccess", pointer, mapped_bytes, [access], 1)
        except DriverError:
            with suppress(DriverError):
                if mapped:
                    call("cuMemUnmap", pointer, mapped_bytes)
                if pointer:
                    call("cuMemAddressFree", pointer, mapped_bytes)
                call("cuMemRelease", handle)
            raise
    return _Mapping(index, pointer, mapped_bytes, handle)
