"""NCCL as plainly as it gets, for what is measured beside ours: blocking, no deadline, on the current stream."""

from __future__ import annotations

import ctypes

import torch
from weightsync_agent.cuda import nccl


def new_id() -> bytes:
    return nccl.unique_id()


class PlainGroup:
    """A blocking communicator, with `broadcast` as vLLM's PyNcclCommunicator has it."""

    def __init__(self, identity: bytes, rank: int, size: int) -> None:
        self._nccl = nccl.library()
        self._comm = ctypes.c_void_p()
        unset = nccl._UNDEFINED
        config = nccl._Config(
            ctypes.sizeof(nccl._Config), nccl._CONFIG_MAGIC, nccl._CONFIG_VERSION, 1, unset, unset, unset, None, unset
        )
        self._nccl.checked(
            "ncclCommInitRankConfig",
            ctypes.byref(self._comm),
            size,
            nccl._UniqueId.from_buffer_copy(identity),
            rank,
            ctypes.byref(config),
        )

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Queues the broadcast of a contiguous tensor on the current stream. Raises TransportError."""
        pointer, stream = tensor.data_ptr(), torch.cuda.current_stream().cuda_stream
        self._nccl.checked("ncclBroadcast", pointer, pointer, tensor.nbytes, nccl.UINT8, src, self._comm, stream)

    def close(self) -> None:
        torch.cuda.synchronize()
        self._nccl.checked("ncclCommDestroy", self._comm)
