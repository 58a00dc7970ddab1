"""Moves a trainer's parameters into one arena, so that other processes map them all at once: Direct mode's best case.

The Parameter objects stay: `param.data` becomes a view of the arena with the same values. So the optimizer's state,
hooks and names are untouched. Generic over the arena: host memory or a GPU's, as a uint8 tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .errors import ConfigError
from .manifest import Manifest, TensorEntry, identity_of

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class Adopted:
    """What `adopt` did."""

    tensors: int
    """Distinct tensors that were moved."""
    nbytes: int
    """Their bytes."""
    made_contiguous: tuple[str, ...]
    """Names of those that were strided before (channels_last, transposed) and are contiguous now: same values."""


def adopt(named: Mapping[str, torch.Tensor], manifest: Manifest, arena: torch.Tensor) -> Adopted:
    """Moves `named` (live tensors, as `targets.named_tensors` gives them) into `arena` at `manifest.arena_offsets`.

    `manifest`: `describe(named)`. `arena`: uint8 [at least manifest.arena_bytes] on the tensors' device. Tied tensors
    stay tied. For a moment the device holds the weights twice; then the old storages are free, unless someone else
    holds them. Call it before torch.compile's first run and before a CUDA graph is captured: both keep old addresses.

    Raises ConfigError, with nothing changed, where a tensor can't be moved: on another device, a DTensor or another
    subclass, an expanded tensor, or one that overlaps another in part (moving both apart would untie them).
    """
    tensors = [named[entry.name] for entry in manifest.tensors]
    check_adoptable(manifest, tensors, arena)
    views: list[torch.Tensor] = []
    made_contiguous: list[str] = []
    nbytes = 0
    with torch.no_grad():
        for index, (entry, offset) in enumerate(zip(manifest.tensors, manifest.arena_offsets, strict=True)):
            if entry.alias is not None:
                views.append(views[entry.alias])
                continue
            view = _view(entry, arena, offset)
            view.copy_(tensors[index])
            if not tensors[index].is_contiguous():
                made_contiguous.append(entry.name)
            nbytes += entry.nbytes
            views.append(view)
    # Only now, when every value is in its new place, do the tensors move: a failure above changed nothing.
    for tensor, view in zip(tensors, views, strict=True):
        tensor.data = view
    distinct = sum(entry.alias is None for entry in manifest.tensors)
    return Adopted(distinct, nbytes, tuple(made_contiguous))


def bring_back(tensors: Sequence[torch.Tensor], manifest: Manifest, arena: torch.Tensor, moved: Sequence[int]) -> None:
    """Brings tensors that left their place in the arena back to it, with the values that they have by now.

    `tensors`: all of them, in manifest order, as `check_adoptable` passed them. `moved`: indices, aliases included.
    Wherever it is interrupted, every tensor has its values.
    """
    own = arena.untyped_storage().data_ptr()
    with torch.no_grad():
        for index in moved:
            if manifest.tensors[index].alias is None and tensors[index].untyped_storage().data_ptr() == own:
                tensors[index].data = tensors[index].detach().clone()  # it lies in another's place
        for index in moved:
            entry = manifest.tensors[index]
            view = _view(entry, arena, manifest.arena_offsets[index])
            if entry.alias is None:
                view.copy_(tensors[index])
            tensors[index].data = view


def _view(entry: TensorEntry, arena: torch.Tensor, offset: int) -> torch.Tensor:
    return arena[offset : offset + entry.nbytes].view(entry.torch_dtype).view(entry.shape)


def check_adoptable(manifest: Manifest, tensors: Sequence[torch.Tensor], arena: torch.Tensor) -> None:
    """Raises ConfigError unless `tensors`, in manifest order, can lie in `arena`: see `adopt`."""
    if arena.dtype != torch.uint8 or arena.dim() != 1 or arena.numel() < manifest.arena_bytes:
        raise ConfigError(f"an arena for these weights is uint8 [{manifest.arena_bytes}], not {arena.dtype}")
    spans: dict[int, list[tuple[int, int, str, tuple[object, ...]]]] = {}
    for entry, tensor in zip(manifest.tensors, tensors, strict=True):
        if type(tensor) not in _PLAIN:
            raise ConfigError(
                f"{entry.name} is a {type(tensor).__name__}, which can't be moved into an arena: use adopt=False"
            )
        if tensor.device != arena.device:
            raise ConfigError(f"{entry.name} is on {tensor.device} and the arena on {arena.device}: use adopt=False")
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ConfigError(f"{entry.name} is expanded (its elements share memory): make it contiguous first")
        if tensor.numel():
            extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            start = tensor.data_ptr()
            storage = tensor.untyped_storage().data_ptr()
            span = (start, start + extent * tensor.element_size(), entry.name, identity_of(tensor))
            spans.setdefault(storage, []).append(span)
    for found in spans.values():
        found.sort(key=lambda span: (span[0], span[1]))
        before = found[0]
        for after in found[1:]:
            if after[0] < before[1] and after[3] != before[3]:
                raise ConfigError(
                    f"{before[2]} and {after[2]} share memory in part: moving them apart would untie them; "
                    "use adopt=False"
                )
            if after[1] > before[1]:
                before = after
