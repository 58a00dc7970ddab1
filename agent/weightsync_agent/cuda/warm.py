"""Loads the kernels of copy plans and digests when an agent starts, so that no receiver's join waits for a compiler."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import torch

from .copy_plan import DeviceCopyPlan
from .digest import DeviceDigest


def warm(device: torch.device, *, permitted: bool = False) -> None:
    """Makes a plan and a digest of nothing. Some 0.8 s where Triton compiles, nothing the second time.

    `permitted`: as for plans that ask for a permission.
    """
    permit = torch.zeros(1, dtype=torch.int32, device=device) if permitted else None
    with suppress(ValueError):  # a plan that needs Triton where there is none says so when it is made
        DeviceCopyPlan(np.zeros((0, 3), np.int64), device, permit=permit)
    DeviceDigest(np.zeros((0, 4), np.int64), 1, device)
