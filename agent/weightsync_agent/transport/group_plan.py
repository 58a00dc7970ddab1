"""What a collective transport moves, in which order: derived by every member from the manifest alone, and so the same.

A large tensor goes straight: from and into the parameter itself, with no staging at all. Only small ones are packed
into buckets, so a slot never has to grow to the largest tensor. Where a member's large tensor is not contiguous, that
member alone goes through a bounce buffer; the plan does not change.

Order: about half of the straight bytes, then the buckets, then the rest. The first buckets are packed while straight
tensors are on the wire, and the last are unpacked while others still are, so that no copy is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ..manifest import Manifest, Piece, layout

STRAIGHT_BYTES = 4 << 20
"""In Packed mode, tensors of at least so many bytes go straight. Both sides must have the same number."""

CALL_BUCKETS = 2
"""A call of straight tensors holds up to the bytes of so many buckets: what a receiver that loads needs to land it."""

FIRST_CALL_BYTES = 64 << 20
"""The first call holds less: a group is on the wire only when all of it is queued, some 3 us an operation."""

LONE_BUCKET_BYTES = 32 << 20
"""A bucket of at least so many bytes is a call of its own; a smaller one shares a call with straight tensors, since
each call costs some 20 us between two kernels."""


@dataclass(frozen=True, slots=True)
class Straight:
    """One tensor, whole."""

    tensor: int
    """Index in the manifest."""
    nbytes: int

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The tensor as the one piece of a bucket of its own."""
        return (Piece(self.tensor, 0, 0, self.nbytes),)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Small tensors packed into one slot. Every one of them lies whole in it."""

    index: int
    """Counts the plan's buckets from 0; bucket i goes through slot i modulo their number."""
    pieces: tuple[Piece, ...]
    nbytes: int
    """From the start of the bucket to the end of its last piece."""


Op = Straight | Bucket


@dataclass(frozen=True)
class GroupPlan:
    """The step's operations, in order."""

    bucket_bytes: int
    calls: tuple[tuple[Op, ...], ...]
    """Operations of one call are handed to the collective library together. At most one of them is a Bucket."""

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        return tuple(op for call in self.calls for op in call)

    @cached_property
    def slot_bytes(self) -> int:
        """The largest bucket: what a slot needs; 0 where nothing is packed."""
        return max((op.nbytes for op in self.ops if isinstance(op, Bucket)), default=0)

    @cached_property
    def buckets(self) -> int:
        return sum(isinstance(op, Bucket) for op in self.ops)


def straight_bytes(mode: Literal["Direct", "Packed"], bucket_bytes: int) -> int:
    """From which size on tensors go straight, in bytes. Never above a bucket, so that none is ever split."""
    return 1 if mode == "Direct" else min(STRAIGHT_BYTES, bucket_bytes)


def group_plan(manifest: Manifest, bucket_bytes: int, straight_bytes: int) -> GroupPlan:
    """Derives the plan. Aliases and tensors of no bytes are in none of its operations.

    Args:
        bucket_bytes: bytes of a bucket, a positive multiple of ALIGNMENT; a call holds up to CALL_BUCKETS.
        straight_bytes: tensors of at least so many bytes go straight; at most `bucket_bytes`.

    Raises ValueError where an argument is out of its range.
    """
    if not 1 <= straight_bytes <= bucket_bytes:
        raise ValueError(f"straight_bytes of {straight_bytes} is not between 1 and the bucket's {bucket_bytes}")
    straights = [
        Straight(index, entry.nbytes)
        for index, entry in enumerate(manifest.tensors)
        if entry.alias is None and entry.nbytes >= straight_bytes
    ]
    packed = layout(manifest, bucket_bytes, frozenset(op.tensor for op in straights))
    buckets = [Bucket(index, pieces, packed.used_bytes(index)) for index, pieces in enumerate(packed.buckets)]
    before, after = _halves(straights) if buckets else (straights, [])
    return GroupPlan(bucket_bytes, tuple(_calls([*before, *buckets, *after], CALL_BUCKETS * bucket_bytes)))


def _halves(straights: list[Straight]) -> tuple[list[Straight], list[Straight]]:
    total, so_far = sum(op.nbytes for op in straights), 0
    for count, op in enumerate(straights):
        if so_far * 2 >= total:
            return straights[:count], straights[count:]
        so_far += op.nbytes
    return straights, []


def _calls(ops: list[Op], call_bytes: int) -> list[tuple[Op, ...]]:
    calls: list[tuple[Op, ...]] = []
    current: list[Op] = []
    size, has_bucket = 0, False
    for op in ops:
        is_bucket = isinstance(op, Bucket)
        alone = is_bucket and op.nbytes >= LONE_BUCKET_BYTES
        limit = call_bytes if calls else min(call_bytes, FIRST_CALL_BYTES)
        if current and (alone or size + op.nbytes > limit or (is_bucket and has_bucket)):
            calls.append(tuple(current))
            current, size, has_bucket = [], 0, False
        current.append(op)
        size, has_bucket = size + op.nbytes, has_bucket or is_bucket
        if alone:
            calls.append(tuple(current))
            current, size, has_bucket = [], 0, False
    if current:
        calls.append(tuple(current))
    return calls
