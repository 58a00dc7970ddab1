"""Staging memory on the sender's GPU: slots that are made once, and the plans that fill them bucket by bucket."""

from __future__ import annotations

import torch

from ..cuda.arena import DeviceArena
from ..cuda.copy_plan import DeviceCopyPlan, piece_runs
from ..cuda.digest import DeviceDigest
from ..cuda.streams import NamedStream
from ..manifest import Piece, align, layout
from .base import SendPlan
from .stand_ins import StandIns


class BucketSlots:
    """At most `plan.slots` pieces of driver memory, as large as the largest bucket. Bucket n is in slot n % slots."""

    def __init__(self, plan: SendPlan, stream: NamedStream, stand_ins: StandIns | None, *, converts: bool) -> None:
        """`stand_ins`: what is packed; None: `plan.gather` makes it, bucket by bucket. `converts`: to another dtype.

        Raises DriverError where there is no room.
        """
        self._plan = plan
        self._stream = stream
        self._converts = converts
        self._plans: list[DeviceCopyPlan] = []
        self.layout = layout(plan.manifest, plan.bucket_bytes)
        self.count = len(self.layout.buckets)
        """Buckets of a step."""
        used = max((self.layout.used_bytes(bucket) for bucket in range(self.count)), default=0)
        slots = max(1, min(plan.slots, self.count))
        self.slots = [DeviceArena.create(max(align(used), 1), plan.device) for _ in range(slots)]
        self.replan(stand_ins)

    @property
    def mapped_bytes(self) -> int:
        return sum(slot.mapped_bytes for slot in self.slots)

    def replan(self, stand_ins: StandIns | None) -> None:
        """The tensors that are packed lie there now."""
        self._stand_ins, self._plans = stand_ins, []
        if stand_ins is None:
            return
        pointers = stand_ins.pointers
        for bucket, pieces in enumerate(self.layout.buckets):
            slot = self.slots[bucket % len(self.slots)]
            if self._converts:
                pairs = self._converting_pairs(stand_ins, pieces, slot)
                self._plans.append(DeviceCopyPlan.of_tensors(pairs, self._plan.device))
            else:
                runs = piece_runs(pieces, pointers, slot.pointer, into="Slot")
                self._plans.append(DeviceCopyPlan(runs, self._plan.device))

    def _converting_pairs(
        self, stand_ins: StandIns, pieces: tuple[Piece, ...], slot: DeviceArena
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of the trainer's tensors and the parts of the slot that they go to, in the manifest's dtype."""
        staged = slot.tensor()
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for piece in pieces:
            dtype = self._plan.manifest.tensors[piece.tensor].torch_dtype
            part = staged[piece.bucket_offset : piece.bucket_offset + piece.nbytes].view(dtype)
            first = piece.tensor_offset // dtype.itemsize
            source = stand_ins.tensors[piece.tensor].reshape(-1)[first : first + part.numel()]
            pairs.append((source, part))
        return pairs

    def fill(self, bucket: int) -> None:
        """Queues a bucket's copies into its slot, which must be free by then."""
        if self._plans:
            self._plans[bucket].run(self._stream.stream)
        else:
            self._gather(bucket)

    def _gather(self, bucket: int) -> None:
        """FSDP's shards: gathered by torch, on the caller's stream, tensor by tensor."""
        assert self._plan.gather is not None
        pieces = self.layout.buckets[bucket]
        staged = self.slots[bucket % len(self.slots)].tensor()
        indices = list(dict.fromkeys(piece.tensor for piece in pieces))
        whole = dict(zip(indices, self._plan.gather(indices), strict=True))
        self._stream.follow()
        with torch.cuda.stream(self._stream.stream), torch.no_grad():
            for piece in pieces:
                tensor = whole[piece.tensor].reshape(-1).view(torch.uint8)
                staged[piece.bucket_offset : piece.bucket_offset + piece.nbytes].copy_(
                    tensor[piece.tensor_offset : piece.tensor_offset + piece.nbytes]
                )
        self._stream.lead()  # the next gather may reuse what this one reads

    def digest(self, bucket: int, digests: dict[int, int]) -> None:
        """Adds what the slot holds, by tensor: the digest is linear, so a split tensor's parts add up."""
        pieces = self.layout.buckets[bucket]
        slot = self.slots[bucket % len(self.slots)]
        parts = [(slot.pointer + p.bucket_offset, p.nbytes, i, p.tensor_offset) for i, p in enumerate(pieces)]
        made = DeviceDigest(parts, len(pieces), self._plan.device)
        raw = made.bytes(self._stream.stream)
        for place, piece in enumerate(pieces):
            value = int.from_bytes(raw[8 * place : 8 * place + 8], "little")
            digests[piece.tensor] = (digests.get(piece.tensor, 0) + value) & 0xFFFFFFFFFFFFFFFF

    def in_order(self, digests: dict[int, int]) -> bytes:
        """8 bytes little-endian a tensor, in manifest order."""
        entries = self._plan.manifest.tensors
        values = (digests.get(i if e.alias is None else e.alias, 0) for i, e in enumerate(entries))
        return b"".join(value.to_bytes(8, "little") for value in values)

    def close(self) -> None:
        self._plans, self._stand_ins = [], None
        for slot in self.slots:
            slot.close()
        self.slots = []
