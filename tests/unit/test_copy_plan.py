"""Copy plans move every byte of every kind of tensor, merge what continues, and touch nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_tensors import DTYPES, random_tensor
from weightsync_agent.copy_plan import (
    Bounces,
    CopyPlan,
    byte_view,
    direct_pairs,
    pack_plans,
    separate_aliases,
    unpack_pairs,
    unpack_plans,
)
from weightsync_agent.manifest import describe, layout


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(byte_view(tensor.detach().resolve_conj().resolve_neg().contiguous()).numpy())


def through_buckets(
    sources: dict[str, torch.Tensor], targets: dict[str, torch.Tensor], bucket_bytes: int, slots: int = 2
) -> None:
    """A step of Packed mode: bucket after bucket through few slots, twice, with new values the second time."""
    manifest = describe(sources)
    places = layout(manifest, bucket_bytes)
    staging = [torch.full((bucket_bytes,), 0xAA, dtype=torch.uint8) for _ in range(slots)]
    bound = [targets[name] for name in sources]
    pack = pack_plans(list(sources.values()), places, staging)
    unpack = unpack_plans(bound, places, staging, separate_aliases(manifest, bound))
    for again in range(2):
        if again:
            for tensor in {id(t): t for t in sources.values()}.values():
                with torch.no_grad():
                    tensor.copy_(random_tensor(tensor.dtype, tuple(tensor.shape), 99))
        for one, other in zip(pack, unpack, strict=True):
            one.run()
            other.run()
        for name, tensor in sources.items():
            assert bits(targets[name]) == bits(tensor), name


def everything() -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for number, dtype in enumerate(DTYPES):
        name = str(dtype).removeprefix("torch.")
        tensors[f"{name}.odd"] = random_tensor(dtype, (7, 3), number)
        tensors[f"{name}.scalar"] = random_tensor(dtype, (), number)
        tensors[f"{name}.empty"] = random_tensor(dtype, (0, 4), number)
        tensors[f"{name}.transposed"] = random_tensor(dtype, (30, 50), number).t()
        tensors[f"{name}.step"] = random_tensor(dtype, (64,), number)[::3]
        tensors[f"{name}.column"] = random_tensor(dtype, (40, 9), number)[:, 4]
        tensors[f"{name}.large"] = random_tensor(dtype, (70, 30), number)
    tensors["tied"] = tensors["bfloat16.large"]
    tensors["conjugated"] = random_tensor(torch.complex64, (5, 40), 3).conj()
    tensors["negated"] = random_tensor(torch.complex64, (300,), 3).conj().imag
    return tensors


@pytest.mark.parametrize("bucket_bytes", [256, 1024, 4096, 1 << 20])
def test_every_kind_of_tensor_comes_through_buckets_bit_for_bit(bucket_bytes: int) -> None:
    sources = everything()
    fresh = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in sources.items()}
    through_buckets(sources, fresh, bucket_bytes)


@pytest.mark.parametrize("bucket_bytes", [256, 1024, 1 << 20])
def test_every_kind_of_destination_takes_its_bytes(bucket_bytes: int) -> None:
    sources = {name: t.resolve_conj().resolve_neg().contiguous() for name, t in everything().items()}
    targets = everything()
    for tensor in targets.values():
        tensor.zero_()
    targets["tied"] = torch.zeros_like(targets["tied"])  # apart at the receiver
    sources["tied"] = sources["bfloat16.large"]
    through_buckets(sources, targets, bucket_bytes)


@settings(max_examples=50, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=12),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=12, max_size=12),
    strided=st.lists(st.booleans(), min_size=24, max_size=24),
    blocks=st.integers(1, 8),
    slots=st.integers(1, 3),
)
def test_any_list_of_tensors_comes_through_any_buckets(
    shapes: list[list[int]], dtypes: list[torch.dtype], strided: list[bool], blocks: int, slots: int
) -> None:
    sources, targets = {}, {}
    for number, shape in enumerate(shapes):
        tensor = random_tensor(dtypes[number], tuple(shape), number)
        sources[f"t{number}"] = tensor.mT.contiguous().mT if strided[number] and len(shape) > 1 else tensor
        target = torch.zeros(shape, dtype=dtypes[number])
        targets[f"t{number}"] = target.mT.contiguous().mT if strided[12 + number] and len(shape) > 1 else target
    through_buckets(sources, targets, 256 * blocks, slots)


def test_bytes_beside_the_destinations_stay() -> None:
    arena = torch.full((4096,), 7, dtype=torch.uint8)
    targets = {"a": arena[256:266], "b": arena[512:515], "c": arena[768:771]}
    sources = {name: random_tensor(torch.uint8, tuple(t.shape), 1) for name, t in targets.items()}
    manifest = describe(sources)
    CopyPlan(direct_pairs(manifest, list(sources.values()), list(targets.values()))).run()
    covered = torch.zeros(4096, dtype=torch.bool)
    for start, end in ((256, 266), (512, 515), (768, 771)):
        covered[start:end] = True
    assert (arena[~covered] == 7).all()
    assert bits(targets["b"]) == bits(sources["b"])


def test_an_arena_into_an_arena_is_one_copy() -> None:
    shapes = {"a": (3, 5), "b": (), "c": (0,), "d": (1000,), "e": (7,)}
    tensors = {name: random_tensor(torch.bfloat16, shape, 1) for name, shape in shapes.items()}
    manifest = describe(tensors)
    ends = [torch.zeros(manifest.arena_bytes, dtype=torch.uint8) for _ in range(2)]
    views = [
        [
            arena[offset : offset + entry.nbytes].view(entry.torch_dtype).view(entry.shape)
            for offset, entry in zip(manifest.arena_offsets, manifest.tensors, strict=True)
        ]
        for arena in ends
    ]
    for view, tensor in zip(views[0], tensors.values(), strict=True):
        view.copy_(tensor)
    pairs = direct_pairs(manifest, *views)
    assert len(CopyPlan(pairs)) == 4
    plan = CopyPlan(pairs, over_padding=True)
    assert len(plan) == 1
    plan.run()
    for view, tensor in zip(views[1], tensors.values(), strict=True):
        assert bits(view) == bits(tensor)


def test_neighbours_at_one_end_only_are_not_merged() -> None:
    arena = torch.arange(64, dtype=torch.uint8)
    apart = [torch.zeros(32, dtype=torch.uint8) for _ in range(2)]
    plan = CopyPlan([(arena[:32], apart[0]), (arena[32:], apart[1])])
    plan.run()
    assert len(plan) == 2
    assert torch.equal(torch.cat(apart), arena)
    # The order differs at the ends: continuous memory, and yet no continuation.
    other = torch.zeros(64, dtype=torch.uint8)
    CopyPlan([(arena[:32], other[32:]), (arena[32:], other[:32])], over_padding=True).run()
    assert torch.equal(other, torch.cat([arena[32:], arena[:32]]))


def test_tied_weights_are_copied_once_and_apart_ones_twice() -> None:
    weight, bias = torch.randn(8, 8), torch.randn(8)
    sources = {"embed": weight, "bias": bias, "head": weight, "again": weight}
    manifest = describe(sources)
    tied = torch.zeros(8, 8)
    plan = CopyPlan(direct_pairs(manifest, list(sources.values()), [tied, torch.zeros(8), tied, tied]))
    assert len(plan) == 2
    one, other = torch.zeros(8, 8), torch.zeros(8, 8)
    apart = [one, torch.zeros(8), other, other]
    assert separate_aliases(manifest, apart) == {0: [2]}
    CopyPlan(direct_pairs(manifest, list(sources.values()), apart)).run()
    assert torch.equal(one, weight)
    assert torch.equal(other, weight)


def test_parameters_are_overwritten_without_gradients_and_autograd_notices() -> None:
    model = torch.nn.Linear(4, 4)
    loss = model(torch.randn(2, 4, requires_grad=True)).sum()
    source = torch.randn(4, 4)
    CopyPlan([(source, model.weight)]).run()
    assert torch.equal(model.weight, source)
    assert model.weight.grad_fn is None
    assert model.weight.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model(torch.randn(2, 4)).sum().backward()  # and the next pass is whole


def test_a_view_of_bytes_is_only_given_where_there_is_one() -> None:
    assert byte_view(torch.tensor(1.5)).shape == (4,)
    assert byte_view(torch.empty(3, 0)).shape == (0,)
    assert byte_view(torch.nn.Parameter(torch.ones(2))).requires_grad is False
    with pytest.raises(ValueError, match="not contiguous"):
        byte_view(torch.ones(3, 4).t())
    with pytest.raises(ValueError, match="conjugated"):
        byte_view(torch.ones(3, dtype=torch.complex64).conj())


@pytest.mark.parametrize(
    ("source", "destination", "sentence"),
    [
        (torch.ones(3), torch.ones(4), r"\[3\] into torch.float32 \[4\]"),
        (torch.ones(3), torch.ones(3, dtype=torch.float64), "float32 .* into torch.float64"),
        (torch.ones(3, 3), torch.ones(3).expand(3, 3), "expanded"),
        (torch.ones(3), torch.ones(3, device="meta"), "from cpu to meta"),
    ],
)
def test_a_pair_that_cannot_be_copied_is_refused_when_the_plan_is_made(
    source: torch.Tensor, destination: torch.Tensor, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        CopyPlan([(source, destination)])


def test_a_plan_of_nothing_runs() -> None:
    plan = CopyPlan([(torch.empty(0), torch.empty(0))])
    plan.run()
    assert (len(plan), plan.nbytes) == (0, 0)


def test_a_split_strided_destination_is_written_when_its_last_piece_is_there() -> None:
    target = torch.zeros(40, 20).t()
    manifest = describe({"w": target})
    places = layout(manifest, 1024)
    slot = torch.full((1024,), 1, dtype=torch.uint8)
    bounces = Bounces()
    plans = [CopyPlan(unpack_pairs([target], pieces, slot, bounces)) for pieces in places.buckets]
    assert bounces.nbytes == 40 * 20 * 4
    for plan in plans[:-1]:
        plan.run()
    assert not target.any()
    plans[-1].run()
    assert (target != 0).all()


def test_weights_of_an_engine_made_in_inference_mode_are_overwritten() -> None:
    with torch.inference_mode():
        engine = {"a": torch.zeros(4, 5), "b": torch.zeros(5, 4).t()}
    sources = {"a": torch.randn(4, 5), "b": torch.randn(4, 5)}
    through_buckets(sources, engine, 256)
