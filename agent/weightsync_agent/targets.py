"""Where a receiver's weights go: into tensors in place, or through a callable such as an engine's `load_weights`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from .errors import ConfigError, ManifestMismatch
from .manifest import Manifest, describe, differences, summarize
from .names import unwrapped

log = logging.getLogger("weightsync.receiver")

LoadWeights = Callable[[list[tuple[str, torch.Tensor]]], object]


class Target:
    """Where the weights go. `bind` once at join, then for each step: bytes arrive, `finish`."""

    in_place: bool

    def bind(self, manifest: Manifest) -> None:
        """Checks the manifest before any byte moves. Raises ManifestMismatch that lists every difference."""

    def destinations(self) -> Sequence[torch.Tensor]:
        """In place: the tensor of each manifest entry, in order. An alias' may be the very tensor of its first."""
        raise NotImplementedError

    def load(self, named: list[tuple[str, torch.Tensor]]) -> None:
        """Not in place: takes tensors that are valid only within the call."""
        raise NotImplementedError


class TensorTarget(Target):
    """An nn.Module's state or a dict of tensors, overwritten in place."""

    in_place = True

    def __init__(self, target: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
        self.tensors = named_tensors(target)
        self._bound: list[torch.Tensor] = []

    def bind(self, manifest: Manifest) -> None:
        mine, named = describe(self.tensors), self.tensors
        if found := differences(manifest, mine):
            # Either side may be wrapped: torch.compile's `_orig_mod.` and the like say nothing about the weights.
            manifest, mine = unwrapped(manifest), unwrapped(mine)
            if left := differences(manifest, mine):
                raise ManifestMismatch(summarize(min(found, left, key=len)))
            log.info("names: they fit without the parts that wrappers put into them, on either side")
            named = dict(zip((entry.name for entry in mine.tensors), self.tensors.values(), strict=True))
        self._bound = [named[entry.name] for entry in manifest.tensors]

    def destinations(self) -> Sequence[torch.Tensor]:
        return self._bound


class StoreTarget(Target):
    """Holds whatever the sender has: the agent's own receivers, which nobody gave an engine."""

    in_place = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: dict[str, torch.Tensor] = {}
        self._bound: list[torch.Tensor] = []

    def bind(self, manifest: Manifest) -> None:
        fitting = self.tensors and not differences(manifest, describe(self.tensors))
        if not fitting:
            self.tensors = {}
            bound: list[torch.Tensor] = []
            for entry in manifest.tensors:
                fresh = (
                    bound[entry.alias]
                    if entry.alias is not None
                    else torch.zeros(entry.shape, dtype=entry.torch_dtype, device=self.device)
                )
                bound.append(fresh)
                self.tensors[entry.name] = fresh
        self._bound = [self.tensors[entry.name] for entry in manifest.tensors]

    def destinations(self) -> Sequence[torch.Tensor]:
        return self._bound


class LoaderTarget(Target):
    """A `load_weights(list[(name, tensor)])` callable. It must copy what it keeps: the tensors are staging memory."""

    in_place = False

    def __init__(self, load_weights: LoadWeights) -> None:
        self._load = load_weights

    def load(self, named: list[tuple[str, torch.Tensor]]) -> None:
        self._load(named)


def named_tensors(source: torch.nn.Module | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, tied ones under each of their names; values are the live tensors."""
    if isinstance(source, torch.nn.Module):
        return dict(source.state_dict(keep_vars=True))
    return dict(source)


def target_for(target: torch.nn.Module | Mapping[str, torch.Tensor] | LoadWeights | Target) -> Target:
    """The Target of what a user passes to `Receiver`. Raises ConfigError for anything else."""
    if isinstance(target, Target):
        return target
    if isinstance(target, torch.nn.Module | Mapping):
        return TensorTarget(target)
    if callable(target):
        return LoaderTarget(target)
    raise ConfigError(
        f"a target is an nn.Module, a dict of tensors or a load_weights callable, not {type(target).__name__}"
    )
