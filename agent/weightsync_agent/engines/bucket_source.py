"""A trainer's weights as one peer's buckets: every tensor whole in one, packed by turns into two halves of one buffer.

The peers' buckets have no place for a part of a tensor, so the bucket grows to the largest tensor where it must. While
the peer works on one half, the other is filled.
"""

from __future__ import annotations

import torch

from ..addresses import Addresses, Moved
from ..copy_plan import Bounces, CopyPlan, Pair, byte_view, pack_pairs
from ..errors import ConfigError
from ..manifest import Layout, align, layout
from ..names import NameRules
from ..sources.module import Weights, gatherer_for
from .bucket_messages import Placed

NOTHING_SENT = "nothing was sent"
"""What became of the step where a tensor is not as it was."""


class BucketSource:
    """Raises ConfigError, naming the tensor, for what can't be sent: meta, sparse, quantised, a name twice."""

    def __init__(
        self,
        source: Weights,
        bucket_bytes: int,
        dtype: torch.dtype | None = None,
        names: NameRules = (),
        each_rank: bool = False,
        halves: int = 2,
    ) -> None:
        """`bucket_bytes`: of the buffer; a half of it is a bucket, and grows to the largest tensor where it must."""
        self.gatherer = gatherer_for(source, dtype, names, each_rank=each_rank)
        if not self.gatherer.tensors:
            raise ConfigError("there are no weights to send: the source has no tensors")
        devices = {tensor.device for tensor in self.gatherer.tensors}
        if len(devices) > 1:
            raise ConfigError(f"the weights are on several devices ({', '.join(map(str, devices))}): move them to one")
        self.device = devices.pop()
        self.manifest = self.gatherer.manifest
        largest = max(entry.nbytes for entry in self.manifest.tensors)
        whole = sum(align(entry.nbytes) for entry in self.manifest.tensors if entry.alias is None)
        self.half = align(max(min(bucket_bytes // halves, whole), largest, 1))
        """Bytes of one bucket."""
        self._lay_out(layout(self.manifest, self.half), halves)
        self._plans: list[CopyPlan] | None = None
        self._pairs: list[list[Pair]] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._addresses = Addresses(self.gatherer)
        self._aliases: dict[int, list[int]] = {}
        for index, entry in enumerate(self.manifest.tensors):
            if entry.alias is not None:
                self._aliases.setdefault(entry.alias, []).append(index)

    def _lay_out(self, layout: Layout, halves: int) -> None:
        self._layout = layout
        self.buckets = max(1, len(layout.buckets))
        self.halves = min(halves, self.buckets)
        self.nbytes = self.half * self.halves
        """Bytes of the buffer."""

    def look(self) -> None:
        """Before a step: finds tensors that moved. Copy plans are of one step, so they are read where they are by then.

        Raises ConfigError, naming the tensor, where one is of another shape, dtype or device than it was.
        """
        self.gatherer.refresh()
        try:
            self._addresses.check(NOTHING_SENT)
        except Moved:
            self._addresses.settle()
        self._addresses.check_sizes(NOTHING_SENT)

    def attach(self, buffer: torch.Tensor) -> None:
        """`buffer`: uint8 [nbytes] on the weights' device, for the step that begins."""
        self._buffer = buffer
        if not self.gatherer.plain:
            return
        halves = [buffer[start : start + self.half] for start in range(0, self.nbytes, self.half)]
        bounces = Bounces()
        pairs = [
            pack_pairs(self.gatherer.tensors, pieces, halves[bucket % len(halves)], bounces)
            for bucket, pieces in enumerate(self._layout.buckets)
        ]
        if self.device.type == "cpu":
            self._plans = [CopyPlan(some) for some in pairs]
        else:
            self._pairs = pairs

    def follow(self) -> None:
        """The step of a rank that does not lead: takes part in the leader's. Raises ConfigError, as `look`."""
        self.gatherer.refresh()
        self.gatherer.follow()

    def detach(self) -> None:
        """The buffer goes: no view of it stays here."""
        self._plans, self._pairs = None, []
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def pack(self, bucket: int) -> None:
        """Fills the half of this bucket; on a GPU queues it."""
        if bucket >= len(self._layout.buckets):
            return  # nothing but tensors without bytes
        if not self.gatherer.plain:
            self._pack_gathered(bucket)
        elif self._plans is not None:
            self._plans[bucket].run()
        else:
            sources, destinations = zip(*self._pairs[bucket], strict=True)
            with torch.inference_mode():
                torch._foreach_copy_(list(destinations), list(sources))

    def _pack_gathered(self, bucket: int) -> None:
        pieces = self._layout.buckets[bucket]
        tensors = self.gatherer.gather([piece.tensor for piece in pieces])
        start = self.start(bucket)
        for piece, tensor in zip(pieces, tensors, strict=True):
            place = start + piece.bucket_offset
            self._buffer[place : place + piece.nbytes].copy_(byte_view(tensor))

    def start(self, bucket: int) -> int:
        """First byte in the buffer of the half that this bucket goes through."""
        return bucket % self.halves * self.half

    def placed(self, bucket: int) -> list[Placed]:
        """The bucket's tensors and their places in the buffer; tied ones lie at one place, empty ones in bucket 0."""
        start = self.start(bucket)
        found: list[Placed] = []
        if bucket == 0:
            found += [Placed(entry, 0) for entry in self.manifest.tensors if not entry.nbytes]
        for piece in self._layout.buckets[bucket] if self._layout.buckets else ():
            found += [
                Placed(self.manifest.tensors[index], start + piece.bucket_offset)
                for index in (piece.tensor, *self._aliases.get(piece.tensor, ()))
            ]
        return found
