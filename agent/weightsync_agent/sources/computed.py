"""A weight that is made when it is sent, from one that lies still."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Computed:
    """Stands where a tensor does in the (name, tensor) pairs of a source."""

    base: torch.Tensor
    """Shape, dtype, device and ties are judged by it; a DTensor where the trainer's ranks share it."""
    value: Callable[[], torch.Tensor]
    """Makes what is sent: of `base`'s shape, whole or a DTensor as `base` is. Under `no_grad`, on every rank."""
