"""Every dtype that is moved, and tensors of random bits in it."""

from __future__ import annotations

import math
import random

import torch

DTYPES = [
    torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
    torch.complex128,
]  # fmt: skip


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Contiguous, NaNs among its values."""
    count = math.prod(shape) * dtype.itemsize
    raw = torch.tensor(list(random.Random(seed).randbytes(count)), dtype=torch.uint8)
    return (raw % 2 if dtype == torch.bool else raw).view(dtype).view(shape)
