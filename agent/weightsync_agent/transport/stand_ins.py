"""Contiguous stand-ins for strided tensors on a GPU, so that every copy is a run of bytes between two addresses.

Only strided tensors have one (transposed, sliced, channels_last); it is kept for the agent's life and filled, or
emptied, once a step. A contiguous tensor is its own stand-in.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..copy_plan import is_plain
from ..manifest import identity_of


class StandIns:
    """Stand-ins of `tensors`, in order; tensors of the same memory share one."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        made: dict[tuple[object, ...], torch.Tensor] = {}
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.tensors: list[torch.Tensor] = []
        for tensor in tensors:
            plain = tensor.detach()
            if not is_plain(plain):
                key = identity_of(tensor)
                if key not in made:
                    made[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                    self._pairs.append((plain, made[key]))
                plain = made[key]
            self.tensors.append(plain)

    @property
    def needed(self) -> bool:
        """Whether there are any: with none, `fill` and `empty` have nothing to do."""
        return bool(self._pairs)

    @property
    def pointers(self) -> npt.NDArray[np.int64]:
        """Address of each, int64 [n]; 0 for a tensor without bytes."""
        return np.array([t.data_ptr() if t.numel() else 0 for t in self.tensors], np.int64)

    def fill(self) -> None:
        """Strided tensors into their stand-ins, on the current stream."""
        if not self._pairs:
            return
        with torch.no_grad():
            for tensor, stand_in in self._pairs:
                stand_in.copy_(tensor)

    def empty(self) -> None:
        """Stand-ins into their strided tensors, on the current stream."""
        with torch.no_grad():
            for tensor, stand_in in self._pairs:
                tensor.copy_(stand_in)
