"""Whether the trainer's tensors still lie where they were when the transport's copy plans were made.

Looking is a loop in C, and yet takes 0.1 us a tensor where all is in the CPU's caches and 0.4 us where nothing is: each
tensor is two or three places in memory of its own. So a sender of many tensors looks while its receivers copy, and
commits the step only then (carrier.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import ConfigError

MANY_TENSORS = 1_000
MANY_ON_GPU = 64
"""From here on looking costs more than the Commit message that looking later costs; on a GPU, whose copies leave the
host free, sooner."""

_ADDRESS = torch.Tensor.data_ptr
_ELEMENTS = torch.Tensor.numel


class Addresses:
    """Remembers address and number of elements of each tensor, and finds those that changed."""

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        self._names = names
        self._tensors = tensors
        self._addresses = list(map(_ADDRESS, tensors))
        self._elements = list(map(_ELEMENTS, tensors))

    @property
    def many(self) -> bool:
        on_gpu = bool(self._tensors) and self._tensors[0].is_cuda
        return len(self._tensors) >= (MANY_ON_GPU if on_gpu else MANY_TENSORS)

    def let_go(self) -> None:
        """Keeps no tensor alive, and finds nothing from now on."""
        self._names, self._tensors, self._addresses, self._elements = (), (), [], []

    def check(self, consequence: str) -> None:
        """What is sent from an old address is old bytes, or another's. Raises ConfigError, with the tensors' names.

        `consequence`: what became of the step, for the sentence.
        """
        now = list(map(_ADDRESS, self._tensors))
        if now == self._addresses:
            return
        pairs = zip(self._names, now, self._addresses, strict=True)
        raise _changed([name for name, after, before in pairs if after != before], "moved", consequence)

    def check_sizes(self, consequence: str) -> None:
        """A tensor that was resized where it lies is sent as it was before. As `check`."""
        now = list(map(_ELEMENTS, self._tensors))
        if now == self._elements:
            return
        triples = zip(self._names, now, self._elements, strict=True)
        resized = [f"{name} (from {before} to {after} elements)" for name, after, before in triples if after != before]
        raise _changed(resized, "were resized", consequence)


def _changed(names: list[str], how: str, consequence: str) -> ConfigError:
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ConfigError(
        f"{', '.join(names[:20])}{more} {how} since the Sender was made (`param.data = ...`, `resize_`, "
        f"`model.to(...)`), and {consequence}: write weights in place (`param.data.copy_(...)`), or close this Sender "
        "and make another"
    )
