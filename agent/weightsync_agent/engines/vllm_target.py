"""Where a vLLM worker's weights go: straight into its parameters by a learned plan, or layer by layer through its
loaders.

`bind` decides, and refuses what does not fit. The first step by a plan is followed by a proof: the engine reloads the
same weights layer by layer through its own loaders, and every parameter must hold the same bytes at the same address.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import torch

from ..copy_plan import byte_view, is_plain
from ..digest import tensor_digests
from ..errors import ManifestMismatch, VerifyFailed
from ..manifest import Manifest, TensorEntry, summarize
from ..targets import Target
from .learned_plan import LearnedPlan, Placement
from .vllm_model import VllmModel

log = logging.getLogger("weightsync.vllm")

MAX_SHOWN = 5
POISON = 0xA5


class VllmTarget(Target):
    """One worker's model as a receiver's target. `in_place` is known once it is bound."""

    def __init__(self, model: VllmModel, device: torch.device, *, layerwise: bool = False) -> None:
        """`layerwise`: goes through the loaders even where a plan is possible."""
        self.model = model
        self.device = device
        self.in_place = False
        self.proven = False
        """The plan's first step and the engine's own reload gave the same bytes."""
        self.reason = "it was asked for" if layerwise else ""
        """Why weights go through the loaders; empty: they don't."""
        self._layerwise = layerwise
        self._plan: LearnedPlan | None = None
        self._manifest: Manifest | None = None
        self._destinations: list[torch.Tensor] = []
        self._fills: list[tuple[torch.Tensor, float]] = []
        self._left: set[str] = set()

    # --- joining ------------------------------------------------------------------------------------------------

    def bind(self, manifest: Manifest) -> None:
        """Raises ManifestMismatch with every name, shape and dtype that does not fit; nothing was changed."""
        if self._manifest is not None and self._manifest.hash == manifest.hash:
            return
        plan = self.model.learn(manifest)
        if plan.mismatches:
            raise ManifestMismatch(summarize(plan.mismatches))
        self._manifest, self._plan = manifest, plan
        self.proven, self._left = False, set()
        if not self._layerwise:
            self.reason = self._obstacle(plan, manifest)
        self.in_place = not self.reason
        if self.in_place:
            log.info("%d tensors go straight into the engine's parameters", len(manifest.tensors))
        else:
            log.warning("weights go through the engine's loaders, layer by layer: %s", self.reason)

    def _obstacle(self, plan: LearnedPlan, manifest: Manifest) -> str:
        if plan.obstacles:
            shown = [f"{name}: {why}" for name, why in list(plan.obstacles.items())[:MAX_SHOWN]]
            more = len(plan.obstacles) - len(shown)
            return "; ".join(shown) + (f"; and {more} more layers" if more else "")
        live = self.model.tensors()
        placed = plan.by_source()
        destinations: list[torch.Tensor] = []
        for index, entry in enumerate(manifest.tensors):
            parts = placed.get(entry.name) or placed.get(_tied_name(manifest, index, placed))
            if not entry.nbytes:
                destinations.append(torch.empty(entry.shape, dtype=entry.torch_dtype, device=self.device))
                continue
            whole = _whole(entry, parts or [], live)
            if whole is None:
                return f"{entry.name}: {len(parts or [])} pieces of it, not the whole, belong to this worker"
            destinations.append(whole)
        self._destinations = destinations
        self._fills = [(fill.view(live[fill.destination]), fill.value) for fill in plan.fills]
        return ""

    def refuse(self, reason: str) -> None:
        """The plan is not to be used again."""
        self._layerwise, self.reason, self.in_place = True, reason, False
        self._manifest = self._plan = None

    def destinations(self) -> Sequence[torch.Tensor]:
        return self._destinations

    # --- a step -------------------------------------------------------------------------------------------------

    def pad(self) -> None:
        """Padding that the loaders set to a constant: a sleeping engine loses it with the rest of its memory."""
        if self.in_place:
            for view, value in self._fills:
                view.fill_(value)

    def load(self, named: list[tuple[str, torch.Tensor]]) -> None:
        """A bucket's tensors. vLLM keeps them until their layer is complete, so it gets copies."""
        assert self._manifest is not None
        if not self._left:
            self._left = {entry.name for entry in self._manifest.tensors}
        copies: dict[int, torch.Tensor] = {}
        for _, tensor in named:
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.clone()
        self.model.load([(name, copies[id(tensor)]) for name, tensor in named])
        self._left.difference_update(name for name, _ in named)
        if not self._left:
            # Before the step is acknowledged: whoever hears of it may count on the whole.
            self.model.finish()

    def abandon(self) -> None:
        """The step broke off."""
        self._left = set()
        self.model.abandon()

    # --- the proof ----------------------------------------------------------------------------------------------

    def prove(self, digests: Callable[[Sequence[torch.Tensor]], bytes] = tensor_digests) -> str:
        """Reloads the weights that the plan just brought through the engine's own loaders, and compares.

        Gives the parameters that differ, as a sentence; empty: the plan is proven. In either case the engine holds
        what its loaders made. Raises VerifyFailed where the loaders themselves left a parameter unwritten, and
        whatever they raise: then the engine's weights are not whole.
        """
        assert self._manifest is not None
        before = self.model.parameters()
        addresses = {name: tensor.data_ptr() for name, tensor in before.items()}
        expected = digests(list(before.values()))
        self.model.load(self._own_weights())
        self.model.finish()
        after = self.model.parameters()
        found = digests([after[name] for name in before])
        differing = [n for i, n in enumerate(before) if found[8 * i : 8 * i + 8] != expected[8 * i : 8 * i + 8]]
        moved = [name for name, address in addresses.items() if after[name].data_ptr() != address]
        unwritten = [view for view in self._destinations if view.numel() and _is_poison(view)]
        if unwritten:
            raise VerifyFailed("the engine's own reload left parameters unwritten: its weights are not whole")
        self.proven = not differing and not moved
        if self.proven:
            return ""
        return (
            "the engine's own reload gives other bytes than the plan in "
            f"{', '.join((differing + moved)[:MAX_SHOWN])}"
            f"{f' and {len(differing + moved) - MAX_SHOWN} more' if len(differing + moved) > MAX_SHOWN else ''}"
        )

    def _own_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint's tensors, read back out of the parameters; each place is overwritten once it is read.

        So a reload that writes nothing can't pass for one that wrote the same bytes. A layer is written only once its
        last tensor was handed out, so nothing that a loader wrote is overwritten here.
        """
        assert self._manifest is not None
        kept: dict[int, torch.Tensor] = {}
        firsts = {entry.alias for entry in self._manifest.tensors if entry.alias is not None}
        for index, (entry, view) in enumerate(zip(self._manifest.tensors, self._destinations, strict=True)):
            if entry.alias is not None:
                yield entry.name, kept[entry.alias]
                continue
            copy = view.clone(memory_format=torch.contiguous_format)
            if index in firsts:
                kept[index] = copy
            if view.numel():
                byte_view(view).fill_(POISON)
            yield entry.name, copy


def _is_poison(view: torch.Tensor) -> bool:
    head = byte_view(view)[:4096]
    return bool((head == POISON).all())


def _tied_name(manifest: Manifest, index: int, placed: dict[str, list[Placement]]) -> str:
    """The name of the same tie under which the engine took the tensor."""
    entry = manifest.tensors[index]
    first = entry.alias if entry.alias is not None else index
    for other, candidate in enumerate(manifest.tensors):
        if (candidate.alias == first or other == first) and candidate.name in placed:
            return candidate.name
    return ""


def _whole(entry: TensorEntry, parts: list[Placement], live: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """The one plain view of the engine's memory that takes all of a tensor, in its shape; None: there is none."""
    if len(parts) != 1:
        return None
    part = parts[0]
    view = part.view(live[part.destination])
    meta = torch.empty(entry.shape, device="meta")
    if part.numel != meta.numel() or part.source_offset or not is_plain(view):
        return None
    source = torch.empty(entry.shape, device="meta").as_strided(part.shape, part.source_strides)
    return view.view(entry.shape) if source.is_contiguous() else None
