"""Manifest and layout: every byte has exactly one place, both sides agree on it, and what differs is told before."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from random_tensors import DTYPES
from weightsync_agent.manifest import (
    ALIGNMENT,
    MAX_LISTED,
    Manifest,
    TensorEntry,
    align,
    arena_views,
    describe,
    differences,
    layout,
    summarize,
)

NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Any list of tensors, scalars, empty ones and aliases among them."""
    entries: list[TensorEntry] = []
    for index in range(draw(st.integers(0, 25))):
        firsts = [i for i, entry in enumerate(entries) if entry.alias is None and entry.nbytes]
        if firsts and draw(st.integers(0, 5)) == 0:
            first = entries[draw(st.sampled_from(firsts))]
            entries.append(first.model_copy(update={"name": f"t{index}", "alias": entries.index(first)}))
        else:
            shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
            entries.append(TensorEntry(name=f"t{index}", dtype=draw(st.sampled_from(NAMES)), shape=shape))
    return Manifest(tensors=tuple(entries))


@settings(max_examples=200, deadline=None)
@given(manifest=manifests(), blocks=st.integers(1, 64), skipped=st.sets(st.integers(0, 24)))
def test_every_byte_lies_in_exactly_one_place(manifest: Manifest, blocks: int, skipped: set[int]) -> None:
    bucket_bytes = blocks * ALIGNMENT
    places = layout(manifest, bucket_bytes, frozenset(skipped))
    covered: dict[int, list[tuple[int, int]]] = {}
    homes: dict[int, set[int]] = {}
    for number, pieces in enumerate(places.buckets):
        assert pieces, "no bucket is empty"
        end = 0
        for piece in pieces:
            assert piece.bucket_offset % ALIGNMENT == 0
            assert piece.bucket_offset >= end, "pieces don't overlap and come in order"
            assert piece.nbytes > 0
            end = piece.bucket_offset + piece.nbytes
            covered.setdefault(piece.tensor, []).append((piece.tensor_offset, piece.nbytes))
            homes.setdefault(piece.tensor, set()).add(number)
        assert end <= bucket_bytes
        assert places.used_bytes(number) == end
    for index, entry in enumerate(manifest.tensors):
        if entry.alias is not None or not entry.nbytes or index in skipped:
            assert index not in covered
            continue
        done = 0
        for offset, nbytes in covered[index]:
            assert offset == done, "pieces of a tensor come in its own order, without gaps"
            done += nbytes
        assert done == entry.nbytes
        if entry.nbytes <= bucket_bytes:
            assert len(homes[index]) == 1, "only a tensor larger than a bucket is split"
    assert [p.tensor for pieces in places.buckets for p in pieces] == sorted(
        p.tensor for pieces in places.buckets for p in pieces
    )


@settings(max_examples=100, deadline=None)
@given(manifest=manifests())
def test_in_an_arena_nothing_overlaps_and_aliases_share(manifest: Manifest) -> None:
    arena = torch.zeros(manifest.arena_bytes, dtype=torch.uint8)
    views = arena_views(manifest, arena)
    assert manifest.arena_bytes % ALIGNMENT == 0
    end = 0
    for entry, offset in zip(manifest.tensors, manifest.arena_offsets, strict=True):
        assert views[entry.name].shape == entry.shape
        assert views[entry.name].dtype == entry.torch_dtype
        if entry.alias is not None:
            assert offset == manifest.arena_offsets[entry.alias]
            continue
        assert offset % ALIGNMENT == 0
        assert offset >= end
        end = offset + entry.nbytes
    assert end <= manifest.arena_bytes
    assert describe(views).nbytes == manifest.nbytes == sum(e.nbytes for e in manifest.tensors if e.alias is None)


@settings(max_examples=100, deadline=None)
@given(manifest=manifests(), blocks=st.integers(1, 64))
def test_both_sides_derive_the_same_from_what_was_sent(manifest: Manifest, blocks: int) -> None:
    received = Manifest.model_validate_json(manifest.model_dump_json())
    assert received.hash == manifest.hash
    assert received.arena_offsets == manifest.arena_offsets
    assert layout(received, blocks * ALIGNMENT) == layout(manifest, blocks * ALIGNMENT)
    assert differences(manifest, received) == []


def entries(*parts: tuple[str, str, tuple[int, ...]]) -> Manifest:
    return Manifest(tensors=tuple(TensorEntry(name=n, dtype=d, shape=s) for n, d, s in parts))


def test_the_hash_tells_names_dtypes_shapes_order_and_ties_apart() -> None:
    a, b = ("a", "float32", (2, 3)), ("b", "float32", (2, 3))
    variants = [
        entries(a, b),
        entries(b, a),
        entries(a),
        entries(a, ("c", "float32", (2, 3))),
        entries(a, ("b", "bfloat16", (2, 3))),
        entries(a, ("b", "float32", (3, 2))),
        entries(a, ("b", "float32", (2, 3, 1))),
        Manifest(tensors=(*entries(a).tensors, TensorEntry(name="b", dtype="float32", shape=(2, 3), alias=0))),
        entries(("a\nb", "float32", (2, 3)), b),
    ]
    assert len({manifest.hash for manifest in variants}) == len(variants)
    assert len(entries().hash) == 64


def test_an_odd_size_tensor_never_misaligns_the_next() -> None:
    manifest = entries(
        ("odd", "int8", (3,)), ("float", "float32", (5,)), ("one", "bool", ()), ("c", "complex128", (1,))
    )
    [pieces] = layout(manifest, 4096).buckets
    assert [piece.bucket_offset for piece in pieces] == [0, 256, 512, 768]


def test_a_tensor_that_just_fits_is_not_split_and_one_byte_more_is() -> None:
    assert len(layout(entries(("a", "uint8", (512,))), 512).buckets) == 1
    assert [len(b) for b in layout(entries(("a", "uint8", (513,))), 512).buckets] == [1, 1]
    # A small tensor after the tail of a split one shares its bucket.
    shared = layout(entries(("a", "uint8", (700,)), ("b", "uint8", (200,))), 512)
    assert [len(b) for b in shared.buckets] == [1, 2]


def test_nothing_to_send_makes_no_bucket() -> None:
    assert layout(entries(), 256).buckets == ()
    assert layout(entries(("a", "float32", (0, 7))), 256).buckets == ()
    assert entries().arena_bytes == ALIGNMENT


@pytest.mark.parametrize("bucket_bytes", [0, -256, 255, 300])
def test_a_bucket_that_is_no_multiple_of_the_alignment_is_refused(bucket_bytes: int) -> None:
    with pytest.raises(ValueError, match="not a positive multiple of 256"):
        layout(entries(), bucket_bytes)


def test_align_rounds_up() -> None:
    assert [align(n) for n in (0, 1, 255, 256, 257)] == [0, 256, 256, 256, 512]


def test_every_dtype_that_torch_moves_can_be_named() -> None:
    for name, dtype in zip(NAMES, DTYPES, strict=True):
        entry = describe({"x": torch.zeros(3, dtype=dtype)}).tensors[0]
        assert (entry.dtype, entry.torch_dtype, entry.nbytes) == (name, dtype, 3 * dtype.itemsize)


def test_tied_tensors_are_aliases_and_only_when_they_are_the_very_same() -> None:
    weight = torch.randn(4, 4)
    manifest = describe(
        {
            "a": weight,
            "tied": weight,
            "parameter": torch.nn.Parameter(weight),
            "part": weight[:2],
            "turned": weight.t(),
            "bits": weight.view(torch.int32),
            "copy": weight.clone(),
            "empty": torch.empty(0),
            "empty too": torch.empty(0),
        }
    )
    assert [entry.alias for entry in manifest.tensors] == [None, 0, 0, None, None, None, None, None, None]
    assert manifest.nbytes == 64 + 32 + 64 + 64 + 64


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^two tensors are named 'a'$"):
        describe([("a", torch.ones(1)), ("a", torch.ones(1))])
    with pytest.raises(ValidationError, match="two tensors are named 'a'"):
        entries(("a", "float32", ()), ("a", "float32", ()))


@pytest.mark.parametrize(
    ("tensor", "kind"), [(torch.ones(2, device="meta"), "meta"), (torch.eye(2).to_sparse(), "sparse")]
)
def test_a_tensor_without_bytes_is_named(tensor: torch.Tensor, kind: str) -> None:
    with pytest.raises(ValueError, match=f"tensor 'a' is {kind}"):
        describe({"a": tensor})


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float99"},
        {"dtype": "nn"},
        {"dtype": "load"},
        {"dtype": "__class__"},
        {"shape": (-1,)},
        {"shape": (1,) * 17},
        {"name": ""},
        {"name": "x" * 1025},
        {"alias": -1},
        {"more": 1},
    ],
)
def test_an_entry_from_the_wire_is_not_trusted(change: dict[str, object]) -> None:
    good = {"name": "a", "dtype": "float32", "shape": (1,)}
    TensorEntry.model_validate(good)
    with pytest.raises(ValidationError):
        TensorEntry.model_validate(good | change)


@pytest.mark.parametrize(
    "alias", [{"alias": 1}, {"alias": 2}, {"alias": 0, "shape": (3,)}, {"alias": 0, "dtype": "int32"}]
)
def test_an_alias_from_the_wire_points_back_at_its_equal(alias: dict[str, object]) -> None:
    first = {"name": "a", "dtype": "float32", "shape": (2,)}
    Manifest.model_validate({"tensors": [first, first | {"name": "b", "alias": 0}]})
    with pytest.raises(ValidationError, match="is an alias of"):
        Manifest.model_validate({"tensors": [first, first | {"name": "b"} | alias]})
    chain = [first, first | {"name": "b", "alias": 0}, first | {"name": "c", "alias": 1}]
    with pytest.raises(ValidationError, match="is an alias of"):
        Manifest.model_validate({"tensors": chain})


# --- differences ----------------------------------------------------------------------------------------------------


def named(*names: str) -> Manifest:
    return entries(*((name, "float32", (2,)) for name in names))


def test_each_kind_of_difference_is_a_sentence() -> None:
    sent = entries(
        ("same", "float32", (2,)), ("shape", "float32", (2, 3)), ("dtype", "bfloat16", (2,)), ("new", "int8", ())
    )
    mine = entries(
        ("dtype", "float32", (2,)), ("shape", "float32", (3, 2)), ("same", "float32", (2,)), ("old", "int8", ())
    )
    assert differences(sent, mine) == [
        "shape: the sender's shape is [2, 3], the receiver's [3, 2]",
        "dtype: the sender's dtype is bfloat16, the receiver's float32",
        "new: sent, but the receiver has no such tensor",
        "old: the receiver has it, but it is not sent",
    ]


def test_the_order_of_names_is_no_difference() -> None:
    assert differences(named("a", "b"), named("b", "a")) == []


@pytest.mark.parametrize("prefix", ["model.", "_orig_mod.", "module.", "actor.model."])
def test_a_prefix_on_either_side_is_told(prefix: str) -> None:
    plain = named("layer.0.weight", "layer.1.weight")
    longer = named(*(prefix + entry.name for entry in plain.tensors))
    assert differences(longer, plain)[-1] == f"likely cause: the sender's names have the prefix {prefix!r}"
    assert differences(plain, longer)[-1] == f"likely cause: the receiver's names have the prefix {prefix!r}"


def test_masters_in_another_dtype_are_told_where_converting_them_is_enough() -> None:
    mine = entries(("a", "bfloat16", (2,)), ("b", "bfloat16", (3,)), ("count", "int64", ()))
    masters = entries(("a", "float32", (2,)), ("b", "float32", (3,)), ("count", "int64", ()))
    assert "Sender(dtype=torch.bfloat16)" in differences(masters, mine)[-1]
    assert "Sender(dtype=torch.float32)" in differences(mine, masters)[-1]
    other = entries(("a", "float32", (2,)), ("b", "float32", (4,)), ("count", "int64", ()))
    assert differences(other, mine)[-1].startswith("b: the sender's shape")
    mixed = entries(("a", "bfloat16", (2,)), ("b", "float16", (3,)), ("count", "int64", ()))
    assert differences(masters, mixed)[-1].startswith("b: the sender's dtype")


def test_a_tied_head_that_is_not_sent_is_told() -> None:
    found = differences(named("embed.weight"), named("embed.weight", "lm_head.weight"))
    assert found[-1] == "likely cause: lm_head.weight is tied at the sender and not at the receiver: send it too"


def test_a_head_that_is_tied_at_the_receiver_needs_no_bytes_of_its_own() -> None:
    weight = torch.randn(3, 3)
    receiver = describe({"embed.weight": weight, "lm_head.weight": weight})
    for name in ("embed.weight", "lm_head.weight"):
        assert differences(entries((name, "float32", (3, 3))), receiver) == []


def test_both_names_may_be_sent_to_a_receiver_that_has_them_apart() -> None:
    weight = torch.randn(3, 3)
    sent = describe({"embed.weight": weight, "lm_head.weight": weight})
    assert differences(sent, entries(("embed.weight", "float32", (3, 3)), ("lm_head.weight", "float32", (3, 3)))) == []


def test_a_plain_mismatch_has_no_invented_cause() -> None:
    found = differences(named("a.weight"), named("b.weight"))
    assert len(found) == 2
    assert not any("likely cause" in sentence for sentence in found)


def test_the_first_are_listed_and_the_rest_counted() -> None:
    plain = named(*(f"layer.{i}" for i in range(30)))
    longer = named(*(f"model.layer.{i}" for i in range(30)))
    found = differences(longer, plain)
    assert len(found) == 61
    told = summarize(found)
    assert told.count(";") == MAX_LISTED + 1
    assert "; and 40 more; likely cause: the sender's names have the prefix 'model.'" in told
    assert summarize(found[:MAX_LISTED]).count(";") == MAX_LISTED - 1
    assert "more" not in summarize(found[:MAX_LISTED])
    assert summarize(["one"]) == "one"
