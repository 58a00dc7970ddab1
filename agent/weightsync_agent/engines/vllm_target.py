"""Where a vLLM worker's weights go: straight into its parameters by a learned plan, or layer by layer through its
loaders.

`bind` decides, and refuses what does not fit. By a plan there are two ways. Where every tensor has a place of its own,
the transport writes it there. Where a worker has only a part of some (tensor parallelism), the transport hands tensors
over and this copies the parts. The first step by a plan is followed by a proof: the engine reloads the
same weights layer by layer through its own loaders, and every parameter must hold the same bytes at the same address.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Sequence

import torch

from ..copy_plan import is_plain
from ..digest import tensor_digests
from ..errors import ManifestMismatch, VerifyFailed
from ..manifest import Manifest, TensorEntry, summarize
from ..targets import Target
from .learned_plan import LearnedPlan, Placement
from .vllm_model import VllmModel

log = logging.getLogger("weightsync.vllm")

MAX_SHOWN = 5
POISON = -7.0
"""Exact in every floating dtype."""


class VllmTarget(Target):
    """One worker's model as a receiver's target. `in_place` and `planned` are known once it is bound."""

    def __init__(self, model: VllmModel, device: torch.device, *, layerwise: bool = False) -> None:
        """`layerwise`: goes through the loaders even where a plan is possible."""
        self.model = model
        self.device = device
        self.in_place = False
        self.planned = False
        """Weights go by the plan, whole or in parts."""
        self.proven = False
        """The plan's first step and the engine's own reload gave the same bytes."""
        self.reason = "it was asked for" if layerwise else ""
        """Why weights go through the loaders; empty: they don't."""
        self._layerwise = layerwise
        self._copies_all = False
        self._plan: LearnedPlan | None = None
        self._manifest: Manifest | None = None
        self._destinations: list[torch.Tensor] = []
        self._parts: dict[str, list[tuple[Placement, torch.Tensor]]] = {}
        """By the tensor's name: its parts and their places in this worker's parameters."""
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
            self.reason = _obstacles(plan)
        self.planned = not self.reason
        self.in_place = self.planned and self._place(plan, manifest)
        if self.in_place:
            log.info("%d tensors go straight into the engine's parameters", len(manifest.tensors))
        elif self.planned:
            log.info("%d parts of tensors go straight into this worker's parameters", len(plan.placements))
        else:
            log.warning("weights go through the engine's loaders, layer by layer: %s", self.reason)

    def _place(self, plan: LearnedPlan, manifest: Manifest) -> bool:
        """Finds the plan's places in the engine's memory. Gives whether every tensor has one for the whole of it."""
        live = self.model.tensors()
        placed = plan.by_source()
        self._fills = [(fill.view(live[fill.destination]), fill.value) for fill in plan.fills]
        self._parts = {name: [(part, part.view(live[part.destination])) for part in p] for name, p in placed.items()}
        self._destinations = []
        for index, entry in enumerate(manifest.tensors):
            parts = self._parts.get(entry.name) or self._parts.get(_tied_name(manifest, index, placed), [])
            if entry.nbytes:
                whole = _whole(entry, parts)
                if whole is None:
                    return False
                self._destinations.append(whole)
            else:
                self._destinations.append(torch.empty(entry.shape, dtype=entry.torch_dtype, device=self.device))
        return True

    def refuse(self, reason: str) -> None:
        """The plan is not to be used again."""
        self._layerwise, self.reason, self.in_place, self.planned = True, reason, False, False
        self._manifest = self._plan = None

    def destinations(self) -> Sequence[torch.Tensor]:
        return self._destinations

    # --- a step -------------------------------------------------------------------------------------------------

    def pad(self) -> None:
        """Padding that the loaders set to a constant: a sleeping engine loses it with the rest of its memory."""
        if self.planned:
            for view, value in self._fills:
                view.fill_(value)

    def load(self, named: list[tuple[str, torch.Tensor]]) -> None:
        """A bucket's tensors: the worker's parts of them by the plan, or all of them through the loaders.

        Nothing of the tensors is held afterwards: what the loaders keep of layers that a later bucket completes is
        copied within the call, and the last bucket completes all.
        """
        assert self._manifest is not None
        if self.planned:
            self._copy_parts(named)
            return
        if not self._left:
            self._left = {entry.name for entry in self._manifest.tensors}
        if self._copies_all:
            named = [(name, tensor.clone()) for name, tensor in named]
        try:
            self.model.load(named)
            self._left.difference_update(name for name, _ in named)
            if self._left:
                self.model.copy_kept()
            else:
                # Before the step is acknowledged: whoever hears of it may count on the whole.
                self.model.finish()
        except BaseException:
            self.abandon()  # or vLLM would hold views of memory that is about to be unmapped
            raise

    def copy_all(self) -> None:
        """From now on the loaders get copies: they hold tensors beyond a call, elsewhere than vLLM's reload does."""
        if not self._copies_all:
            log.warning("this model's loaders hold tensors beyond a call: from the next step on they get copies")
        self._copies_all = True

    def _copy_parts(self, named: list[tuple[str, torch.Tensor]]) -> None:
        places: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for name, tensor in named:
            for part, view in self._parts.get(name, ()):
                places.append(view)
                sources.append(part.of(tensor))
        if places:
            with torch.no_grad():
                torch._foreach_copy_(places, sources)

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
        places = [view for parts in self._parts.values() for _, view in parts]
        if any(_is_poison(view) for view in places):
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
        last tensor was handed out, so nothing that a loader wrote is overwritten here. Of what other workers have a
        part is zero; this one's loaders don't read it.
        """
        assert self._manifest is not None
        kept: dict[int, torch.Tensor] = {}
        tied = {entry.alias for entry in self._manifest.tensors if entry.alias is not None}
        for index, entry in enumerate(self._manifest.tensors):
            if entry.alias is not None:
                yield entry.name, kept[entry.alias]
                continue
            parts = self._parts.get(entry.name)
            if parts is None:
                parts = self._parts.get(_tied_name(self._manifest, index, self._parts), [])
            made = torch.zeros(entry.shape, dtype=entry.torch_dtype, device=self.device)
            for part, view in parts:
                part.of(made).copy_(view)
            for _, view in parts:
                view.fill_(POISON)
            if index in tied:
                kept[index] = made
            yield entry.name, made


def _is_poison(view: torch.Tensor) -> bool:
    head = view.reshape(-1)[:1024] if view.is_contiguous() else view[(0,) * (view.dim() - 1)][:1024]
    return bool(head.numel()) and bool((head == torch.full((), POISON).to(head)).all())


def _obstacles(plan: LearnedPlan) -> str:
    shown = [f"{name}: {why}" for name, why in list(plan.obstacles.items())[:MAX_SHOWN]]
    more = len(plan.obstacles) - len(shown)
    return "; ".join(shown) + (f"; and {more} more layers" if more else "")


def _tied_name(manifest: Manifest, index: int, placed: Container[str]) -> str:
    """The name of the same tie under which the engine took the tensor."""
    entry = manifest.tensors[index]
    first = entry.alias if entry.alias is not None else index
    for other, candidate in enumerate(manifest.tensors):
        if (candidate.alias == first or other == first) and candidate.name in placed:
            return candidate.name
    return ""


def _whole(entry: TensorEntry, parts: list[tuple[Placement, torch.Tensor]]) -> torch.Tensor | None:
    """The one plain view of the engine's memory that takes all of a tensor, in its shape; None: there is none."""
    if len(parts) != 1:
        return None
    part, view = parts[0]
    if part.numel != torch.Size(entry.shape).numel() or part.source_offset or not is_plain(view):
        return None
    source = torch.empty(entry.shape, device="meta").as_strided(part.shape, part.source_strides)
    return view.view(entry.shape) if source.is_contiguous() else None
