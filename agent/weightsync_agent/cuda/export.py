"""Exports of memory that torch's allocator owns, by torch's own handles: one export, one import, one proved release.

Memory that we allocate ourselves goes by descriptor instead (arena.py), which has none of the traps below.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

import torch

from ..deadline import Deadline
from ..errors import ConfigError, TransportError
from ..protocol import Identity, TorchHandle
from .counters import CounterFile, counter_file
from .driver import allocation_of, device_index, gpu_uuid, normal_uuid

log = logging.getLogger(__name__)

IPC_HANDLE_BYTES = 64
"""cudaIpcMemHandle_t. torch puts a version and a letter for the kind in front of it (older versions nothing)."""
WRAPPED = 1 << 63
"""A counter at or above this was released more often than exported."""

Placements = tuple[tuple[int, int], ...]
"""(index of the handle, offset in bytes within the allocation that it opens) of each tensor."""


class TorchExport:
    """One export of one storage, for exactly one importer. Holds the storage until `retire`."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        """Exports. Raises ConfigError for memory that torch's handles can't carry, with what to do instead."""
        if storage.device.type != "cuda" or storage.nbytes() == 0:
            raise ConfigError(f"only CUDA memory is exported, not {storage.nbytes()} bytes on {storage.device}")
        try:
            fields = storage._share_cuda_()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            raise ConfigError(
                f"torch can't export this memory ({first}): it was received from another process, or comes from a "
                "cuMem pool or a pluggable allocator. Use mode Packed, or adopt=True"
            ) from None
        _, handle, nbytes, offset, counter, slot, event, synchronise = fields
        if kind := handle_kind(handle):
            raise ConfigError(kind)
        self._storage: torch.UntypedStorage | None = storage
        self.nbytes = int(nbytes)
        self.handle = TorchHandle(
            gpu=gpu_uuid(storage.device),
            handle=handle,
            storage_bytes=nbytes,
            storage_offset_bytes=offset,
            counter_name=counter.decode("ascii"),
            counter_slot=slot,
            event=event,
            event_sync_required=bool(synchronise),
        )
        self._counters: CounterFile = counter_file(self.handle.counter_name)
        if self.counter() != 1:
            raise TransportError(
                f"torch's counter reads {self.counter()} right after an export, not 1: this version of torch lays it "
                "out differently; use mode Packed, or adopt=True"
            )

    def counter(self) -> int:
        """1: exported, not released yet (or not even imported). 0: released. Anything else is a fault of the peer."""
        return self._counters.read(self.handle.counter_slot)

    @property
    def released(self) -> bool:
        return self.counter() == 0

    @property
    def retired(self) -> bool:
        return self._storage is None

    def wait_released(self, deadline: Deadline) -> bool:
        """Whether the importer released it by the deadline."""
        while not self.released:
            if deadline.passed:
                return False
            time.sleep(min(0.0005, deadline.remaining))
        return True

    def retire(self, *, importer_gone: bool = False) -> int:
        """Lets go of the storage; gives the bytes that stay stranded, 0 for a release that is proved.

        `importer_gone`: its process is known to be dead, so its mapping is gone with it, and the counter that it can
        no longer lower is set to 0 here: nothing is stranded then. Never say so of a process that may still live.
        May be called again, once more is known of the importer.
        """
        value = self.counter()
        if value >= WRAPPED:
            log.error(
                "an export of %d bytes was released %d times too often (by a consumer that opens one handle several "
                "times); its counter is set right, or the memory would never come back",
                self.nbytes,
                (1 << 64) - value,
            )
        if value and (importer_gone or value >= WRAPPED):
            self._counters.write(self.handle.counter_slot, 0)
        self._storage = None
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        return self.stranded()

    def stranded(self) -> int:
        """Bytes that are dropped here and that the importer still holds, or never released."""
        return self.nbytes if self.retired and not self.released else 0


class ExportLedger:
    """All exports to one importer; bounds and counts what importers leave stranded."""

    def __init__(self, device: torch.device | int, limit_bytes: int) -> None:
        """`limit_bytes`: most bytes that may lie stranded before no more is exported."""
        self.device = torch.device("cuda", device_index(device))
        self.limit_bytes = limit_bytes
        self._live: list[TorchExport] = []
        self._retired: list[TorchExport] = []

    def export(self, tensor: torch.Tensor) -> TorchExport:
        """A new export, with a counter of its own, of the tensor's storage. Raises ConfigError, TransportError."""
        stranded = self.stranded_bytes()
        if stranded > self.limit_bytes:
            raise TransportError(
                f"{stranded} bytes that were exported were never released, above the limit of {self.limit_bytes}: "
                "restart the receivers that hold them, or this process"
            )
        made = TorchExport(tensor.untyped_storage())
        self._live.append(made)
        return made

    def export_all(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[TorchHandle, ...], Placements]:
        """One export for each driver allocation that the tensors lie in, however many lie in one, and their places.

        torch's handle opens the whole allocation anyway, and opening 18,867 takes 2 s. The tensors are the caller's to
        hold. Zero-size tensors are placed at (0, 0).
        """
        order = sorted((t.data_ptr(), i) for i, t in enumerate(tensors) if t.numel())
        places: dict[int, tuple[int, int]] = {}
        handles: list[TorchHandle] = []
        base = end = 0
        for pointer, index in order:
            if not base <= pointer < end:
                base, size = allocation_of(pointer, self.device)
                end = base + size
                made = self.export(tensors[index])
                handles.append(made.handle)
                start = tensors[index].untyped_storage().data_ptr()
                if start - base != made.handle.storage_offset_bytes:
                    raise ConfigError(
                        f"torch exports a storage at offset {made.handle.storage_offset_bytes} of an allocation "
                        f"where it lies at {start - base}: use mode Packed, or adopt=True"
                    )
            places[index] = (len(handles) - 1, pointer - base)
        return tuple(handles), tuple(places.get(index, (0, 0)) for index in range(len(tensors)))

    def retire_all(self, *, importer_gone: bool = False) -> int:
        """Retires every export; gives the bytes left stranded. See TorchExport.retire."""
        for made in self._live:
            made.retire(importer_gone=importer_gone)
        self._retired += self._live
        self._live = []
        return self.stranded_bytes()

    @property
    def unreleased(self) -> int:
        """Exports that are alive and not released."""
        return sum(not made.released for made in self._live)

    def stranded_bytes(self) -> int:
        """What is stranded now. An importer that releases late takes its part out again."""
        late = [made for made in self._retired if made.stranded()]
        if len(late) < len(self._retired):
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            self._retired = late
        return sum(made.stranded() for made in late)


def handle_kind(handle: bytes) -> str:
    """Why this handle can't be used; empty where it can: memory of cudaMalloc, in torch's or in the bare form."""
    if len(handle) == IPC_HANDLE_BYTES:
        return ""
    if len(handle) >= 2 and handle[1:2] == b"e":
        return _EXPANDABLE
    if len(handle) == IPC_HANDLE_BYTES + 2 and handle[1:2] == b"c":
        return ""
    return f"a CUDA IPC handle of {len(handle)} bytes is of a kind that this version does not know"


_EXPANDABLE = (
    "memory of expandable segments can't be shared by CUDA IPC handles: remove expandable_segments:True from "
    "PYTORCH_CUDA_ALLOC_CONF (or PYTORCH_ALLOC_CONF) of the trainer, or use mode Packed or adopt=True"
)


def allocator_problem() -> str | None:
    """Why this process' torch allocator makes memory that can't be exported, or None."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        for part in os.environ.get(name, "").replace(" ", "").split(","):
            if part.lower() == "expandable_segments:true":
                return _EXPANDABLE
    if torch.cuda.is_available() and torch.cuda.get_allocator_backend() != "native":
        return (
            f"memory of torch's allocator backend {torch.cuda.get_allocator_backend()} can't be shared by CUDA IPC "
            "handles: remove backend:... from PYTORCH_CUDA_ALLOC_CONF, or use mode Packed or adopt=True"
        )
    return None


def why_torch_handles_fail(local: Identity, remote: Identity) -> str | None:
    """Why `remote` can't open torch handles that this process (`local`) exports, with what to change; None: it can.

    For the hello, before anything is exported. Descriptors need none of it.
    """
    return why_apart(local, remote) or allocator_problem()


def why_apart(local: Identity, remote: Identity) -> str | None:
    """Why torch's handles can't go between these two processes, either way, whatever memory it is; None: they can."""
    if local.node != remote.node:
        return (
            f"CUDA IPC needs one machine: this is node {local.node}, rank {remote.rank} is on {remote.node}; use NCCL"
        )
    if normal_uuid(local.gpu) != normal_uuid(remote.gpu):
        slices = (
            " (of MIG instances only the same one is shared)"
            if "MIG-" in (local.gpu + remote.gpu) or "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", "")
            else ""
        )
        return (
            f"torch's handles need one GPU{slices}: this process has {local.gpu or 'none'}, rank {remote.rank} has "
            f"{remote.gpu or 'none'}; use placement Colocated, mode Packed, or NCCL"
        )
    if local.pid == remote.pid:
        return (
            f"this process and rank {remote.rank} both have the PID {local.pid} in their containers, which the CUDA "
            "driver takes for one process: set shareProcessNamespace: true, or run both in one container"
        )
    if not local.shm or local.shm != remote.shm:
        return (
            f"this process and rank {remote.rank} have different /dev/shm, so a release could not be seen: mount one "
            "memory-backed volume (emptyDir, medium: Memory) at /dev/shm in both containers"
        )
    if local.uid != remote.uid:
        return (
            f"this process runs as user {local.uid} and rank {remote.rank} as {remote.uid}, so it can't lower torch's "
            "counter: give both containers one runAsUser"
        )
    return None
