"""Made-up weights in a real model's shapes, which change at every step: for trials and benchmarks."""

from __future__ import annotations

import torch

from ..deadline import Deadline
from ..errors import SourceError
from ..manifest import Manifest, TensorEntry
from .base import Source
from .shapes import shapes

__all__ = ["SyntheticSource", "shapes"]

_BLOCK = 1 << 22
"""Random elements that all tensors are filled from."""
_CHANGED_TENSORS = 512
_CHANGED_ELEMENTS = 1 << 14
"""At most so much changes in a step, so that a step of 61 GB costs milliseconds here too; all tensors in turn."""


class SyntheticSource(Source):
    """Random weights (normal, deviation 0.02, as models are initialised). The same seed and calls: the same bytes."""

    def __init__(self, model: str, *, dtype: str = "bfloat16", seed: int = 0) -> None:
        """`model`: see `shapes`. `dtype`: torch's name of a floating-point dtype. Raises SourceError."""
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
            raise SourceError(f"synthetic weights of dtype {dtype!r}: write float32, float16 or bfloat16")
        entries = tuple(TensorEntry(name=name, dtype=dtype, shape=shape) for name, shape in shapes(model))
        super().__init__(Manifest(tensors=entries))
        self._dtype = kind
        self._seed = seed
        self._flat: list[torch.Tensor] = []
        self._block = torch.empty(0)
        self._next = 0

    @property
    def whole(self) -> bool:
        return bool(self._flat)

    @property
    def finished(self) -> bool:
        return False

    def attach(self, arena: torch.Tensor) -> dict[str, torch.Tensor]:
        named = super().attach(arena)
        self._flat = [tensor.view(-1) for tensor in named.values()]
        # Made on the CPU, so that the bytes are the same whatever device the arena is on.
        generator = torch.Generator().manual_seed(self._seed)
        self._block = (torch.randn(_BLOCK, generator=generator) * 0.02).to(self._dtype).to(arena.device)
        for number, flat in enumerate(self._flat):
            self._fill(flat, number * 7919)
        return named

    def refresh(self, step: int, deadline: Deadline) -> bool:
        """Changes a run of elements in each of the next tensors in turn. `deadline`: not needed, it never waits."""
        if step == 1:
            return True
        for _ in range(min(_CHANGED_TENSORS, len(self._flat))):
            flat = self._flat[self._next]
            self._next = (self._next + 1) % len(self._flat)
            size = min(_CHANGED_ELEMENTS, flat.numel())
            # Moves through the tensor by the step, and takes other random elements each time.
            start = step * size % max(flat.numel() - size + 1, 1)
            self._fill(flat[start : start + size], step * 104729 + self._next)
        return True

    def _fill(self, flat: torch.Tensor, offset: int) -> None:
        start, done = offset % _BLOCK, 0
        while done < flat.numel():
            size = min(flat.numel() - done, _BLOCK - start)
            flat[done : done + size].copy_(self._block[start : start + size])
            done, start = done + size, 0
