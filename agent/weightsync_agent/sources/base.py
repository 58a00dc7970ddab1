"""What a source of weights is to the agent's sender loop: a manifest, tensors in an arena, and new values at times."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ..deadline import Deadline
from ..manifest import Manifest, arena_views


class Source(ABC):
    """Weights that the agent reads or makes by itself, without a trainer.

    Life: construct (raises SourceError where there is nothing to send) -> make an arena of `manifest.arena_bytes` ->
    `attach` it -> before each step `refresh`.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.named: dict[str, torch.Tensor] = {}
        """The tensors by name in manifest order, at addresses that stay; empty until `attach`."""

    def attach(self, arena: torch.Tensor) -> dict[str, torch.Tensor]:
        """Puts the tensors into `arena` (uint8 [>= manifest.arena_bytes], any device) at `manifest.arena_offsets`.

        Gives `named`. Their values are undefined until the first `refresh`.
        """
        self.named = arena_views(self.manifest, arena)
        return self.named

    @property
    @abstractmethod
    def whole(self) -> bool:
        """The tensors hold one version, whole: they may be sent."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """No later `refresh` will bring anything."""

    @abstractmethod
    def refresh(self, step: int, deadline: Deadline) -> bool:
        """Puts the values of step `step` (from 1) in place. False: there is nothing new, up to the deadline.

        Raises SourceError where the weights can't be read. Then `whole` says whether the tensors still hold the last
        ones or are mixed, in which case they must not be sent until a later call gave True.
        """
