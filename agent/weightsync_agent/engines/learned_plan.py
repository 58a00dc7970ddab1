"""A copy plan learned from an engine's own weight loaders: which bytes of a checkpoint go where in its parameters.

`learn` runs the engine's `load_weights` once with meta tensors, which have a shape and a dtype and no bytes, under a
dispatch mode that writes down every copy into memory of the engine instead of doing it. Views that a loader takes on
the way (narrow, chunk, select, transpose) are followed by their offsets and strides. Nothing in the engine changes.

What can't be followed (a cast, arithmetic, a copy into a temporary) is an obstacle: the weights then have to go
through the loaders. What does not fit (names, shapes, dtypes, parameters that nothing fills) is a mismatch: they must
not go at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..manifest import Manifest, TensorEntry

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

MAX_RAISED = 50
"""Tensors that a loader may raise at before the rest is not tried any more."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Elements of one checkpoint tensor and the place in the engine's memory that they go to. Unit: elements."""

    source: str
    source_offset: int
    source_strides: tuple[int, ...]
    shape: tuple[int, ...]
    destination: str
    """Name of the engine's tensor."""
    offset: int
    """Within the destination's storage."""
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The place itself, in the engine's tensor of that name."""
        return tensor.detach().as_strided(self.shape, self.strides, self.offset)

    def of(self, source: torch.Tensor) -> torch.Tensor:
        """The elements, in a tensor of the source's shape that is contiguous."""
        return source.as_strided(self.shape, self.source_strides, self.source_offset + source.storage_offset())


@dataclass(frozen=True, slots=True)
class Fill:
    """Padding that a loader sets to a constant."""

    destination: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    value: float

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The padding itself, in the engine's tensor of that name."""
        return tensor.detach().as_strided(self.shape, self.strides, self.offset)


@dataclass
class LearnedPlan:
    placements: list[Placement] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    """A sentence for each way in which what is sent does not fit the engine."""
    obstacles: dict[str, str] = field(default_factory=dict)
    """Tensor or layer -> why its bytes can't be copied straight into the engine."""

    def by_source(self) -> dict[str, list[Placement]]:
        found: dict[str, list[Placement]] = {}
        for placement in self.placements:
            found.setdefault(placement.source, []).append(placement)
        return found


def learn(manifest: Manifest, load: Load, tensors: Mapping[str, torch.Tensor], required: Iterable[str]) -> LearnedPlan:
    """Learns where `load` puts each tensor of the manifest.

    Args:
        load: the engine's `load_weights`; takes (name, tensor) pairs.
        tensors: whatever the loaders may write to, by name, as the loaders find it (meta or real). Names of the same
            memory are the same destination.
        required: those of `tensors` that have to be filled, every element exactly once.
    """
    entries = {entry.name: entry for entry in manifest.tensors}
    sources = {
        entry.name: torch.empty(entry.shape, dtype=entry.torch_dtype, device="meta") for entry in manifest.tensors
    }
    ties = {e.name: manifest.tensors[e.alias].name if e.alias is not None else e.name for e in manifest.tensors}
    trace = _Trace(sources, tensors)
    pending = iter(sources.items())
    raised = 0
    while True:
        given = _Given(pending)
        try:
            with torch.no_grad(), trace:
                load(given)
        except Exception as error:  # a loader says in any way it likes that a tensor does not fit
            name = given.last
            if not name:
                trace.plan.obstacles["load_weights"] = _said(error)
                break
            raised += 1
            trace.refuse(entries[name], error)
            if raised == MAX_RAISED:
                left = sum(1 for _ in pending)
                trace.plan.mismatches += [f"{left} more tensors were not tried"] if left else []
                break
            continue
        break
    plan = trace.plan
    _drop_repetitions(plan, ties)
    if not plan.placements and not plan.mismatches:
        plan.obstacles.setdefault("load_weights", "no copy into the engine was seen")
    _unused(plan, trace.used, manifest, ties)
    _coverage(plan, tensors, required, trace)
    return plan


class _Given:
    """Hands tensors out and remembers the last one."""

    def __init__(self, items: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._items = items
        self.last = ""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        self.last = ""
        name, tensor = next(self._items)
        self.last = name
        return name, tensor


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, sources: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.plan = LearnedPlan()
        self.used: set[str] = set()
        self.opaque: set[str] = set()
        """Destinations that something was written to that could not be followed."""
        self.refused: set[str] = set()
        """Modules of whose tensors one was refused."""
        self.hidden = False
        """Some source went into memory that is nobody's: what is filled can't be told in full."""
        self._sources = {_storage(t): name for name, t in sources.items()}
        self._derived: dict[int, tuple[str, torch.Tensor]] = {}
        """Storage made from a source -> that source, and the tensor, so that its address stays taken."""
        self._destinations: dict[int, str] = {}
        for name, tensor in tensors.items():
            self._destinations.setdefault(_storage(tensor), name)
        self._kept = (sources, tensors)

    def destination_of(self, tensor: torch.Tensor) -> str:
        """The name under which this memory is a destination; empty: none."""
        return self._destinations.get(_storage(tensor), "")

    def refuse(self, entry: TensorEntry, error: Exception) -> None:
        self.used.add(entry.name)
        self.refused.add(_module(entry.name))
        target = self._target(entry.name)
        if target is not None and tuple(target.shape) != entry.shape:
            self.plan.mismatches.append(
                f"{entry.name}: the sender's shape is {list(entry.shape)}, the engine's {list(target.shape)}"
            )
        else:
            self.plan.mismatches.append(
                f"{entry.name} {entry.dtype} {list(entry.shape)}: the engine's loader refuses it ({_said(error)})"
            )

    def _target(self, name: str) -> torch.Tensor | None:
        return self._kept[1].get(name)

    def _source_of(self, tensor: torch.Tensor) -> str:
        storage = _storage(tensor)
        return self._sources.get(storage, "")

    def _derived_of(self, tensor: torch.Tensor) -> str:
        found = self._derived.get(_storage(tensor))
        return found[0] if found else ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            return self._copy(args[0], args[1])
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default) and first is not None:
            if name := self.destination_of(first):
                if first.numel():
                    value = float(args[1]) if len(args) > 1 else 0.0
                    self.plan.fills.append(
                        Fill(name, int(first.storage_offset()), tuple(first.shape), tuple(first.stride()), value)
                    )
                return first
        elif func._schema.is_mutable and first is not None and (name := self.destination_of(first)):
            self.opaque.add(name)
            self.plan.obstacles[name] = f"its loader computes with {func}"
            return first
        result = func(*args, **(kwargs or {}))
        self._follow(args, result)
        return result

    def _follow(self, args: tuple[Any, ...], result: Any) -> None:
        """What is made out of a source, in memory of its own, is remembered as made out of it."""
        given = list(_tensors_in(args))
        name = next((n for t in given if (n := self._source_of(t) or self._derived_of(t))), "")
        if not name:
            return
        for made in _tensors_in((result,)):
            if not self._source_of(made) and not self.destination_of(made):
                self._derived[_storage(made)] = (name, made)

    def _copy(self, into: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        name, destination = self._source_of(source), self.destination_of(into)
        derived = self._derived_of(source)
        if name or derived:
            self.used.add(name or derived)
        if not destination:
            if name or derived:
                self.hidden = True
                self.plan.obstacles[name or derived] = "its loader copies it into memory that is no parameter's"
                self._derived[_storage(into)] = (name or derived, into)
            return into
        if not name:
            self.opaque.add(destination)
            made = f"from what it makes of {derived}" if derived else "from memory that is not the sender's"
            self.plan.obstacles[destination] = f"its loader fills it {made}"
        elif source.shape != into.shape:
            self.opaque.add(destination)
            self.plan.mismatches.append(
                f"{name}: the sender's {list(source.shape)} does not fit {list(into.shape)} of the engine's "
                f"{destination}"
            )
        elif source.dtype != into.dtype:
            self.opaque.add(destination)
            if source.dtype in (torch.bfloat16, torch.float16) and into.dtype == torch.float32:
                self.plan.obstacles[destination] = f"{name} is {_dtype(source)} and is widened to {_dtype(into)}"
            else:
                self.plan.mismatches.append(
                    f"{name}: the sender's dtype is {_dtype(source)}, the engine's {_dtype(into)}"
                )
        elif into.numel():
            self.plan.placements.append(
                Placement(
                    source=name,
                    source_offset=int(source.storage_offset()),
                    source_strides=tuple(source.stride()),
                    shape=tuple(into.shape),
                    destination=destination,
                    offset=int(into.storage_offset()),
                    strides=tuple(into.stride()),
                )
            )
        return into


def _drop_repetitions(plan: LearnedPlan, ties: Mapping[str, str]) -> None:
    """Tied tensors that an engine takes under both names into one place: once is enough."""
    seen: set[tuple[object, ...]] = set()
    kept: list[Placement] = []
    for p in plan.placements:
        key = (ties[p.source], p.source_offset, p.source_strides, p.shape, p.destination, p.offset, p.strides)
        if key not in seen:
            seen.add(key)
            kept.append(p)
    plan.placements = kept


def _unused(plan: LearnedPlan, used: set[str], manifest: Manifest, ties: Mapping[str, str]) -> None:
    taken = {ties[name] for name in used}
    for entry in manifest.tensors:
        if entry.name in used or ties[entry.name] in taken or not entry.nbytes:
            continue
        hint = ""
        if entry.name.endswith("lm_head.weight"):
            hint = ": the engine ties its head to the embedding, and the sender does not"
        plan.mismatches.append(f"{entry.name}: sent, but the engine takes nothing of it{hint}")


def _coverage(plan: LearnedPlan, tensors: Mapping[str, torch.Tensor], required: Iterable[str], trace: _Trace) -> None:
    """Every element of every required tensor is written exactly once."""
    written: dict[str, list[tuple[npt.NDArray[np.int64], int]]] = {}
    parts: list[Placement | Fill] = [*plan.placements, *plan.fills]
    for part in parts:
        written.setdefault(part.destination, []).append(runs_of(part.offset, part.shape, part.strides))
    named: set[str] = set()
    for name in required:
        tensor = tensors[name]
        known = trace.destination_of(tensor) or name
        # What a refused tensor would have filled was said already.
        if known in named or not tensor.numel() or known in trace.opaque or _module(name) in trace.refused:
            continue
        named.add(known)
        ends = _sorted(written.get(known, []))
        count = int((ends[1] - ends[0]).sum())
        if (ends[0][1:] < ends[1][:-1]).any():
            plan.obstacles[known] = "its loader writes some elements twice"
        elif count != tensor.numel():
            left = f"{tensor.numel() - count} of its {tensor.numel()} elements"
            sentence = f"{name}: the engine has it, but {left} are in no tensor that is sent"
            if trace.hidden:
                plan.obstacles[known] = sentence
            else:
                plan.mismatches.append(sentence)


def _sorted(runs: list[tuple[npt.NDArray[np.int64], int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    if not runs:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    starts = np.concatenate([start for start, _ in runs])
    ends = np.concatenate([start + length for start, length in runs])
    order = np.argsort(starts, kind="stable")
    return starts[order], ends[order]


def runs_of(offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[npt.NDArray[np.int64], int]:
    """The runs of neighbouring elements that make up a strided view, in the view's own order.

    Gives (first element of each, int64 [n]; elements in each).
    """
    dims = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    length = 1
    while dims and dims[-1][1] == length:
        length *= dims.pop()[0]
    starts = np.array([offset], np.int64)
    for size, stride in dims:
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return starts, length


def _module(name: str) -> str:
    """Of a parameter's name, what stays when its projections are fused: `layers.0.self_attn` of `..q_proj.weight`."""
    return ".".join(name.split(".")[:-2]) or name


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _said(error: Exception) -> str:
    text = str(error).strip().replace("\n", " ")
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
