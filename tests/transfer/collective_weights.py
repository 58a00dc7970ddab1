"""Weights for a collective's buckets of 1 MiB, made alike by both ends: every kind of tensor, at every place of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from transfer.samples import DTYPES

MIB = 1 << 20

Random = Callable[..., torch.Tensor]
"""(*shape, dtype=float32): a tensor of random bytes, NaNs among them."""


def randomly(seed: int, device: str = "cpu") -> Random:
    """Other values for each seed, the same on every device."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        count = int(torch.Size(shape).numel()) * dtype.itemsize
        data = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
        return data.to(device).view(dtype).view(shape)

    return random


def tricky(random: Random, also: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every dtype, odd sizes, tied, transposed, scalar, empty, as large as a bucket, and at the end thousands of small
    ones."""
    embedding = random(300, 1024)
    found = {f"kind.{dtype}": random(3, 7, dtype=getattr(torch, dtype)) for dtype in DTYPES}
    found |= {
        "odd": random(7, dtype=torch.uint8),
        "scalar": random(dtype=torch.float64),
        "nothing": random(0, 5),
        "embedding": embedding,
        "head": embedding,
        "transposed": random(40, 90).t(),
        "large.transposed": random(700, 900).t(),
        "exactly.a.bucket": random(MIB, dtype=torch.uint8),
        "a.bucket.and.a.byte": random(MIB + 1, dtype=torch.uint8),
    }
    return found | dict(also) | {f"small.{i}": random(257 + i, dtype=torch.bfloat16) for i in range(3000)}


def blank_like(tensors: Mapping[str, torch.Tensor], strided: str, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Zeros in a layout of their own: nothing is tied or transposed, and `strided`, in one piece there, is not here."""
    fresh = {name: torch.zeros(tensor.shape, dtype=tensor.dtype, device=device) for name, tensor in tensors.items()}
    for name in (strided, "small.7"):
        fresh[name] = torch.zeros(len(fresh[name]), 2, dtype=fresh[name].dtype, device=device)[:, 0]
    return fresh


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).cpu()


def differing(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are missing, too many, or not the same to the bit."""
    return sorted(found.keys() ^ wanted.keys()) + [
        name for name in found.keys() & wanted.keys() if not torch.equal(bits(found[name]), bits(wanted[name]))
    ]
