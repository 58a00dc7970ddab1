"""The weights that are measured: a real model's shapes, or many tensors of one size."""

from __future__ import annotations

import re

import torch

from ..manifest import Manifest, TensorEntry, arena_views
from ..sources.shapes import Shapes, shapes

DTYPE = torch.bfloat16

_MANY = re.compile(r"([0-9]{1,6})x([0-9]{1,9})(B|KB|KiB|MB|MiB)", re.IGNORECASE)
_UNITS = {"b": 1, "kb": 1000, "kib": 1 << 10, "mb": 1000**2, "mib": 1 << 20}
_BLOCK = 1 << 20
"""Random elements that all tensors are filled from."""


def shapes_of(model: str) -> Shapes:
    """Names and shapes. `model`: as for a synthetic source, or COUNTxSIZE such as 310x1KiB. Raises SourceError."""
    many = _MANY.fullmatch(model)
    if many is None:
        return shapes(model)
    elements = int(many[2]) * _UNITS[many[3].lower()] // DTYPE.itemsize
    return [(f"tensor.{number}", (elements,)) for number in range(int(many[1]))]


def manifest_of(model: str) -> Manifest:
    """The model's tensors in DTYPE. Raises SourceError."""
    dtype = str(DTYPE).removeprefix("torch.")
    return Manifest(tensors=tuple(TensorEntry(name=name, dtype=dtype, shape=shape) for name, shape in shapes_of(model)))


def allocate(manifest: Manifest, device: torch.device, arena: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The tensors, every page touched: in `arena` (uint8), or each an allocation of its own as frameworks make them."""
    if arena is not None:
        arena.zero_()
        return arena_views(manifest, arena)
    # Not torch.zeros: it leaves the pages to the first write, which would be the step's.
    return {
        entry.name: torch.empty(entry.shape, dtype=entry.torch_dtype, device=device).fill_(1)
        for entry in manifest.tensors
    }


def fill(weights: dict[str, torch.Tensor], seed: int) -> None:
    """Random bytes, other ones by `seed`, other ones in each tensor, and the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.randint(-(1 << 15), 1 << 15, (_BLOCK,), dtype=torch.int16, generator=generator)
    for number, tensor in enumerate(weights.values()):
        flat = tensor.view(-1).view(torch.int16)
        block = block.to(flat.device)
        for start in range(0, flat.numel(), _BLOCK):
            part = flat[start : start + _BLOCK]
            torch.add(block[: part.numel()], number, out=part)
