"""A trainer's weights as the sender wants them: in place where they are whole, gathered or converted where not.

`gatherer_for` takes what a user passes to `Sender`: an nn.Module, a dict, or an iterator of (name, tensor).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import ConfigError
from ..manifest import ALIGNMENT, Manifest, TensorEntry, align, describe
from ..targets import named_tensors

Weights = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

CONVERTED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""What `dtype=` converts. Integers are no weights of that kind, and float8 has scales that belong to its bits."""


class Gatherer:
    """Weights that are whole and sent as they are: nothing to gather. The base of the others.

    The trainer's rank that `leads` sends; it calls `gather` within a step and `conclude` after it, whatever became of
    the step. Every other rank calls `follow` once a step, which returns when the leader concludes.
    """

    plain = True
    """`tensors` are what is sent, so their memory may be read in place."""
    leads = True
    """This process is the one that sends."""

    def __init__(self, names: list[str], tensors: list[torch.Tensor], manifest: Manifest) -> None:
        self.names = names
        self.tensors = tensors
        """In manifest order, aliases included; their addresses are the trainer's and stay."""
        self.manifest = manifest

    def gather(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """The whole tensors of these manifest entries: contiguous, in the manifest's dtype, valid until the next call
        (those that both calls name, until the one after it)."""
        return [self.tensors[index].detach().contiguous() for index in indices]

    def conclude(self) -> None:
        """The leader's step is over. Exactly once a `step()`, in a `finally`; free of cost where no one follows."""

    def follow(self) -> None:
        """Takes part in the leader's gathering until it concludes."""


class ConvertingGatherer(Gatherer):
    """Whole weights that are converted to another dtype on the way: float32 masters sent as bfloat16."""

    plain = False

    def __init__(self, names: list[str], tensors: list[torch.Tensor], manifest: Manifest) -> None:
        super().__init__(names, tensors, manifest)
        self._scratch = [torch.empty(0, dtype=torch.uint8)] * 2
        self._kept: dict[int, torch.Tensor] = {}
        self._kept_in = 0

    def gather(self, indices: Sequence[int]) -> list[torch.Tensor]:
        # A tensor that is split over buckets comes in consecutive calls: it is converted once. What both calls name
        # stays in the one scratch buffer, and the rest goes into the other.
        kept = {index: self._kept[index] for index in indices if index in self._kept}
        fresh = [index for index in dict.fromkeys(indices) if index not in kept]
        if fresh:
            place = 1 - self._kept_in if kept else self._kept_in
            views = self._views(place, fresh)
            with torch.no_grad():
                for index, view in views.items():
                    view.copy_(self.tensors[index])
            kept |= views
            # Two generations in one dict would outlive a buffer: only what this call made lies in `place` for certain.
            self._kept, self._kept_in = views, place
        return [kept[index] for index in indices]

    def conclude(self) -> None:
        self._kept = {}

    def _views(self, place: int, indices: list[int]) -> dict[int, torch.Tensor]:
        """Tensors in the manifest's shapes and dtypes over one scratch buffer, which grows once to what it needs."""
        entries = [self.manifest.tensors[index] for index in indices]
        need = sum(align(entry.nbytes) for entry in entries)
        device = self.tensors[indices[0]].device
        if self._scratch[place].numel() < need or self._scratch[place].device != device:
            self._scratch[place] = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            self._scratch[place] = torch.empty(max(need, ALIGNMENT), dtype=torch.uint8, device=device)
        views: dict[int, torch.Tensor] = {}
        start = 0
        for index, entry in zip(indices, entries, strict=True):
            raw = self._scratch[place][start : start + entry.nbytes]
            views[index] = raw.view(entry.torch_dtype).view(entry.shape)
            start += align(entry.nbytes)
        return views


class ShardedGatherer(Gatherer):
    """FSDP2's DTensors: gathered a bucket at a time by all ranks of their mesh; only the leader keeps the result.

    The leader tells the others what to gather next, as a broadcast of indices over the same process group, and 0 when
    its step is over. So all ranks run the same collectives in the same order, whatever order the transport needs and
    wherever the step breaks off. Waits are bounded by the process group's own timeout.
    """

    plain = False

    def __init__(self, names: list[str], tensors: list[torch.Tensor], manifest: Manifest) -> None:
        super().__init__(names, tensors, manifest)
        mesh = next(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
        if mesh.size() == dist.get_world_size():
            self._group = dist.group.WORLD
        elif mesh.ndim == 1:
            self._group = mesh.get_group()
        else:
            raise ConfigError(
                f"the weights are sharded over a mesh of shape {list(mesh.shape)} that is a part of the "
                f"{dist.get_world_size()} ranks: WeightSync gathers over all ranks or over a mesh of one dimension"
            )
        self._leader = int(mesh.mesh.flatten()[0])
        self.leads = dist.get_rank() == self._leader
        self._control_device = torch.device(mesh.device_type)
        self._kept: dict[int, torch.Tensor] = {}

    def gather(self, indices: Sequence[int]) -> list[torch.Tensor]:
        wanted = list(dict.fromkeys(index for index in indices if index not in self._kept))
        sharded = [index for index in wanted if isinstance(self.tensors[index], DTensor)]
        if sharded:
            self._announce(sharded)
        kept = {index: self._kept[index] for index in indices if index in self._kept}
        kept |= {index: self._whole(index) for index in wanted}
        self._kept = kept
        return [kept[index] for index in indices]

    def conclude(self) -> None:
        self._kept = {}
        self._announce([])

    def follow(self) -> None:
        while indices := self._announced():
            for index in indices:
                self._whole(index)  # takes part in the collective, and keeps nothing

    def _whole(self, index: int) -> torch.Tensor:
        entry = self.manifest.tensors[index]
        with torch.no_grad():
            tensor = self.tensors[index].detach()
            device = tensor.device
            if isinstance(tensor, DTensor):
                if device.type != tensor.device_mesh.device_type:  # FSDP2 with its parameters offloaded to the host
                    tensor = tensor.to(tensor.device_mesh.device_type)
                # Converted before it is gathered, so that only what is sent goes over the wire.
                tensor = cast(DTensor, tensor.to(entry.torch_dtype)).full_tensor()
            return tensor.to(device=device, dtype=entry.torch_dtype).contiguous()

    def _announce(self, indices: list[int]) -> None:
        count = torch.tensor([len(indices)], device=self._control_device)
        dist.broadcast(count, self._leader, self._group)
        if indices:
            dist.broadcast(torch.tensor(indices, device=self._control_device), self._leader, self._group)

    def _announced(self) -> list[int]:
        count = torch.zeros(1, dtype=torch.int64, device=self._control_device)
        dist.broadcast(count, self._leader, self._group)
        indices = torch.zeros(int(count), dtype=torch.int64, device=self._control_device)
        if len(indices):
            dist.broadcast(indices, self._leader, self._group)
        return [int(index) for index in indices.tolist()]


def gatherer_for(source: Weights, dtype: torch.dtype | None = None) -> Gatherer:
    """The Gatherer of a trainer's weights.

    `dtype`: floating-point tensors (float16 to float64) are sent converted to it. Raises ConfigError, naming the
    tensor, for anything that can't be sent: no tensor, no memory (meta), sparse, quantised, a name twice.
    """
    names, tensors = _named(source)
    sharded = any(isinstance(tensor, DTensor) for tensor in tensors)
    converted = any(dtype not in (None, tensor.dtype) and tensor.dtype in CONVERTED for tensor in tensors)
    try:
        manifest = _describe(names, tensors, dtype)
    except ValueError as error:
        raise ConfigError(f"the weights can't be sent: {error}") from None
    kind = ShardedGatherer if sharded else ConvertingGatherer if converted else Gatherer
    return kind(names, tensors, manifest)


def _named(source: Weights) -> tuple[list[str], list[torch.Tensor]]:
    items: Iterable[tuple[str, torch.Tensor]]
    if isinstance(source, torch.nn.Module):
        # `extra_state` of some modules is no tensor; it is no weight either.
        items = [(k, v) for k, v in named_tensors(source).items() if isinstance(v, torch.Tensor)]
    else:
        items = source.items() if isinstance(source, Mapping) else source
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    for name, tensor in items:
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ConfigError(
                f"the weights are (name, tensor) pairs, and {name!r} comes with a {type(tensor).__name__}"
            )
        if not isinstance(tensor, DTensor) and is_traceable_wrapper_subclass(tensor):
            raise ConfigError(
                f"{name} is a {type(tensor).__name__}, which has no bytes of its own: send the tensors it is made of"
            )
        names.append(name)
        tensors.append(tensor)
    return names, tensors


def _describe(names: list[str], tensors: list[torch.Tensor], dtype: torch.dtype | None) -> Manifest:
    """The manifest of what is sent: global shapes, converted dtypes; ties by memory, or by object where sharded."""
    locals_ = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    # Ties and what can't be sent are judged on local memory; an empty shard is no tie, hence the objects' identity.
    ties = describe((name, local) for name, local in zip(names, locals_, strict=True))
    first: dict[int, int] = {}
    entries: list[TensorEntry] = []
    for index, (entry, tensor) in enumerate(zip(ties.tensors, tensors, strict=True)):
        alias = entry.alias
        if isinstance(tensor, DTensor):
            earlier = first.setdefault(id(tensor), index)
            alias = earlier if earlier != index else None
        sent = dtype if dtype is not None and tensor.dtype in CONVERTED else tensor.dtype
        entries.append(
            TensorEntry(name=entry.name, dtype=str(sent).removeprefix("torch."), shape=tuple(tensor.shape), alias=alias)
        )
    return Manifest(tensors=tuple(entries))
