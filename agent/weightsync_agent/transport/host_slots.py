"""Staging buckets in host memory, which are filled in turn."""

from __future__ import annotations

import mmap

import torch

from ..host_memory import HostMemory
from ..manifest import align


class HostSlots:
    """`count` slots that hold `nbytes` each: bucket b goes through slot b modulo their number."""

    def __init__(self, nbytes: int = 0, count: int = 0) -> None:
        size = max(align(nbytes), mmap.PAGESIZE)
        self.memories = [HostMemory.create(size, "weightsync-slot") for _ in range(count)]
        self.views = [memory.tensor() for memory in self.memories]
        """uint8, one a slot."""

    def __len__(self) -> int:
        return len(self.memories)

    @property
    def nbytes(self) -> int:
        """Of all slots together."""
        return sum(memory.nbytes for memory in self.memories)

    def place(self, bucket: int) -> int:
        """Which slot the bucket goes through."""
        return bucket % len(self.memories)

    def of(self, bucket: int) -> torch.Tensor:
        return self.views[self.place(bucket)]

    def close(self) -> None:
        """Gives the memory back. Idempotent."""
        self.views = []
        for memory in self.memories:
            memory.close()
        self.memories = []
