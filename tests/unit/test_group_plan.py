"""The order of a collective's operations: the same on both sides, every byte once, no slot as large as a tensor."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weightsync_agent.manifest import ALIGNMENT, Manifest, TensorEntry
from weightsync_agent.transport.group_plan import (
    LONE_BUCKET_BYTES,
    STRAIGHT_BYTES,
    Bucket,
    Straight,
    group_plan,
    straight_bytes,
)

MIB = 1 << 20


def manifest_of(*sizes: int, aliases: dict[int, int] | None = None) -> Manifest:
    return Manifest(
        tensors=tuple(
            TensorEntry(name=f"t{i}", dtype="uint8", shape=(size,), alias=(aliases or {}).get(i))
            for i, size in enumerate(sizes)
        )
    )


@settings(deadline=None, max_examples=200)
@given(
    sizes=st.lists(st.integers(0, 5000), max_size=60),
    bucket=st.integers(1, 16).map(lambda n: n * ALIGNMENT),
    threshold=st.integers(1, 6000),
)
def test_every_byte_goes_exactly_once_and_whole(sizes: list[int], bucket: int, threshold: int) -> None:
    plan = group_plan(manifest_of(*sizes), bucket, min(threshold, bucket))
    moved: dict[int, int] = {}
    for op in plan.ops:
        for piece in op.pieces:
            assert piece.tensor not in moved
            assert piece.tensor_offset == 0
            assert piece.bucket_offset % ALIGNMENT == 0
            assert piece.bucket_offset + piece.nbytes <= op.nbytes
            moved[piece.tensor] = piece.nbytes
    assert moved == {index: size for index, size in enumerate(sizes) if size}
    assert plan.slot_bytes <= bucket
    assert [op.index for op in plan.ops if isinstance(op, Bucket)] == list(range(plan.buckets))
    assert all(sum(isinstance(op, Bucket) for op in call) <= 1 and call for call in plan.calls)
    assert all(len(call) == 1 or sum(op.nbytes for op in call) <= 2 * bucket for call in plan.calls)


def test_both_sides_derive_the_same_plan_from_what_the_wire_carries() -> None:
    manifest = manifest_of(5 * MIB, 100, 7, 4 * MIB, 3 * MIB, 0, 9 * MIB)
    received = Manifest.model_validate_json(manifest.model_dump_json())
    assert group_plan(manifest, 8 * MIB, 4 * MIB).calls == group_plan(received, 8 * MIB, 4 * MIB).calls


def test_an_alias_and_a_tensor_without_bytes_are_in_no_operation() -> None:
    plan = group_plan(manifest_of(5000, 0, 5000, aliases={2: 0}), 8192, 8192)
    assert [piece.tensor for op in plan.ops for piece in op.pieces] == [0]


def test_a_slot_does_not_grow_to_the_largest_tensor() -> None:
    plan = group_plan(manifest_of(700 * MIB, 1000, 2000), 256 * MIB, straight_bytes("Packed", 256 * MIB))
    assert plan.slot_bytes < 4096


def test_direct_packs_nothing() -> None:
    plan = group_plan(manifest_of(1, 1000, 70 * MIB), 256 * MIB, straight_bytes("Direct", 256 * MIB))
    assert plan.buckets == 0
    assert plan.slot_bytes == 0


def test_packed_sends_large_tensors_straight_even_with_small_buckets() -> None:
    assert straight_bytes("Packed", 256 * MIB) == STRAIGHT_BYTES
    assert straight_bytes("Packed", 1 * MIB) == 1 * MIB


def test_straight_tensors_are_on_the_wire_before_the_first_bucket_and_after_the_last() -> None:
    plan = group_plan(manifest_of(*[40 * MIB] * 8, *[MIB] * 200), 64 * MIB, 4 * MIB)
    kinds = [type(op) for op in plan.ops]
    assert kinds[:3] == [Straight] * 3
    assert kinds[-3:] == [Straight] * 3
    assert kinds.count(Bucket) == 4


def test_a_small_bucket_shares_a_call_and_a_large_one_has_its_own() -> None:
    small = group_plan(manifest_of(*[30 * MIB] * 4, 1000), 256 * MIB, 4 * MIB)
    assert any(len(call) > 1 and any(isinstance(op, Bucket) for op in call) for call in small.calls)
    large = group_plan(manifest_of(*[30 * MIB] * 4, *[3 * MIB] * 40), 256 * MIB, 4 * MIB)
    assert any(op.nbytes >= LONE_BUCKET_BYTES for op in large.ops if isinstance(op, Bucket))
    assert all(len(call) == 1 for call in large.calls if any(isinstance(op, Bucket) for op in call))


@pytest.mark.parametrize(("bucket", "threshold"), [(1024, 0), (1024, 1025), (100, 100)])
def test_sizes_out_of_range_are_refused(bucket: int, threshold: int) -> None:
    with pytest.raises(ValueError, match=r"\d"):
        group_plan(manifest_of(10), bucket, threshold)
