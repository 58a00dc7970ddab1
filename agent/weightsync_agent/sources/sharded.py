"""Weights that a trainer's ranks share: gathered bucket by bucket, by all ranks together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import is_not
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..errors import ConfigError, GatherFailed
from ..manifest import Manifest, identity_of
from .gatherer import Gatherer
from .lookup import Found


def broken_group(cause: BaseException) -> GatherFailed:
    """What torch raised where a collective of the trainer's ranks did not come through, and what to do."""
    said = next(iter(str(cause).splitlines()), "")
    return GatherFailed(
        f"trainer rank {dist.get_rank()}: the ranks can't gather the weights any more: a rank has died, or was waited "
        "for longer than the process group's timeout. The group is broken for good: end all ranks and start the "
        f"trainer from its last checkpoint; the log of the rank that went first has the cause ({said})"
    )


class ShardedGatherer(Gatherer):
    """FSDP2's DTensors: gathered a bucket at a time by all ranks of their mesh; only the leader keeps the result.

    The leader tells the others what to gather next, as a broadcast of indices over the same process group, and 0 when
    its step is over. So all ranks run the same collectives in the same order, whatever order the transport needs and
    wherever the step breaks off. Waits are bounded by the process group's own timeout. Once a collective failed, none
    is tried any more: `GatherFailed`.
    """

    plain = False
    sharded = True
    all_lead = False

    def __init__(self, sent: Found, manifest: Manifest) -> None:
        super().__init__(sent, manifest)
        mesh = next(tensor.device_mesh for tensor in sent.tensors if isinstance(tensor, DTensor))
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
        self.leads = self.all_lead or dist.get_rank() == self._leader
        self._control_device = torch.device(mesh.device_type)
        self._kept: dict[int, torch.Tensor] = {}
        self._broken: GatherFailed | None = None

    def gather(self, indices: Sequence[int]) -> list[torch.Tensor]:
        wanted = list(dict.fromkeys(index for index in indices if index not in self._kept))
        shared = [index for index in wanted if self._is_shared(index)]
        kept = {index: self._kept[index] for index in indices if index in self._kept}
        kept |= self._gathered(shared) if shared else {}
        kept |= {index: self._whole(index) for index in wanted if index not in kept}
        self._kept = kept
        return [kept[index] for index in indices]

    def refresh(self) -> None:
        now = None if self.lookup is None else self.lookup.at_hand(self.tensors)
        if self.lookup is None or (now is not None and not any(map(is_not, now, self.tensors))):
            return
        if (found := self.lookup.again()) is None:
            return
        tensors, entries = found.tensors, self.manifest.tensors
        pairs = zip(tensors, self.tensors, entries, strict=True)
        fits = [
            (new.shape, new.dtype) == (had.shape, had.dtype)
            and (entry.alias is None or _is_one(new, tensors[entry.alias]))
            for new, had, entry in pairs
        ]
        if other := [name for name, fit in zip(self.names, fits, strict=True) if not fit]:
            raise ConfigError(
                f"{', '.join(other[:20])} changed shape or dtype, or is no longer tied, since the Sender was made, and "
                "nothing was sent: close this Sender and make another"
            )
        self.replace(found)

    def conclude(self) -> None:
        self._kept = {}
        if self._broken is None:
            self._announce([])

    def follow(self) -> None:
        while indices := self._announced():
            for index in indices:
                self._whole(index)  # takes part in the collective, and keeps nothing

    def _is_shared(self, index: int) -> bool:
        """Every rank has to take part in making it."""
        return isinstance(self.tensors[index], DTensor) or index in self._values

    def _gathered(self, indices: list[int]) -> dict[int, torch.Tensor]:
        self._announce(indices)
        return {index: self._whole(index) for index in indices}

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Around what all ranks take part in. Raises GatherFailed."""
        if self._broken is not None:
            raise self._broken
        try:
            yield
        except RuntimeError as error:
            # Gloo's errors have no class of their own, but a source file of its own.
            if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            self._broken = broken_group(error)
            raise self._broken from error

    def _whole(self, index: int) -> torch.Tensor:
        entry = self.manifest.tensors[index]
        with torch.no_grad(), self._together():
            tensor = self.value(index)
            device = tensor.device
            if isinstance(tensor, DTensor):
                if device.type != tensor.device_mesh.device_type:  # FSDP2 with its parameters offloaded to the host
                    tensor = tensor.to(tensor.device_mesh.device_type)
                # Converted before it is gathered, so that only what is sent goes over the wire.
                tensor = cast(DTensor, tensor.to(entry.torch_dtype)).full_tensor()
            return tensor.to(device=device, dtype=entry.torch_dtype).contiguous()

    def _announce(self, indices: list[int]) -> None:
        count = torch.tensor([len(indices)], device=self._control_device)
        with self._together():
            dist.broadcast(count, self._leader, self._group)
            if indices:
                dist.broadcast(torch.tensor(indices, device=self._control_device), self._leader, self._group)

    def _announced(self) -> list[int]:
        count = torch.zeros(1, dtype=torch.int64, device=self._control_device)
        with self._together():
            dist.broadcast(count, self._leader, self._group)
            indices = torch.zeros(int(count), dtype=torch.int64, device=self._control_device)
            if len(indices):
                dist.broadcast(indices, self._leader, self._group)
            return [int(index) for index in indices.tolist()]


def _is_one(tensor: torch.Tensor, first: torch.Tensor) -> bool:
    """Whether two are tied. Shards by the object, as all ranks see it alike: empty ones have no memory."""
    if isinstance(tensor, DTensor) or isinstance(first, DTensor):
        return tensor is first
    return identity_of(tensor) == identity_of(first)


class EachRankGatherer(ShardedGatherer):
    """Every rank sends, to receivers of its own: each gathers a bucket at a time into its own slots.

    The ranks go in rounds. In each, all say what they want next, gather all of that together, and keep their own. A
    rank whose step is over, whole or broken off, wants nothing and takes part until nobody wants anything. So nobody
    waits for a rank that left, and where all are at the same bucket, as they are unless one failed, each tensor is
    gathered once. Who is slow holds up the others: their deadlines are the process group's timeout.
    """

    all_lead = True

    def conclude(self) -> None:
        self._kept = {}
        while self._broken is None and self._round([]) is not None:
            pass

    def _gathered(self, indices: list[int]) -> dict[int, torch.Tensor]:
        return self._round(indices) or {}

    def _round(self, mine: list[int]) -> dict[int, torch.Tensor] | None:
        """Gathers what all want; gives `mine`, or None where nobody wants anything."""
        width = max(int(count) for count in self._told(torch.tensor([len(mine)])))
        if not width:
            return None
        padded = torch.full((width,), -1, dtype=torch.int64)
        padded[: len(mine)] = torch.tensor(mine, dtype=torch.int64)
        wanted = dict.fromkeys(int(index) for told in self._told(padded) for index in told.tolist() if index >= 0)
        kept, own = {}, set(mine)
        for index in wanted:
            whole = self._whole(index)
            if index in own:
                kept[index] = whole
        return kept

    def _told(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """`mine` of every rank, by rank."""
        own = mine.to(self._control_device)
        told = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        with self._together():
            dist.all_gather(told, own, group=self._group)
        return told
