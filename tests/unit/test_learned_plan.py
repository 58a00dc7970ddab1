"""A plan is learned from loaders that fuse, shard, pad and tie, and what it can't follow it names."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from weightsync_agent.engines.learned_plan import LearnedPlan, learn, runs_of
from weightsync_agent.manifest import Manifest, TensorEntry, describe

HIDDEN, QUERIES, VALUES, VOCABULARY, PADDED = 8, 12, 4, 10, 16


class Engine:
    """Loads as inference engines do: q, k and v in one parameter, a padded embedding, a shard of an output layer."""

    def __init__(self, device: str = "meta") -> None:
        self.tensors = {
            "embed": torch.full((PADDED, HIDDEN), 9.0, device=device),
            "qkv": torch.full((QUERIES + 2 * VALUES, HIDDEN), 9.0, device=device),
            "out": torch.full((HIDDEN, QUERIES // 2), 9.0, device=device),
            "norm": torch.full((HIDDEN,), 9.0, device=device),
        }
        self.cast = False

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            self.load(name, tensor)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "head" and "head" not in self.tensors:
            return  # tied
        if name == "embed":
            rows = self.tensors["embed"]
            rows[: tensor.shape[0]].data.copy_(tensor)
            rows[tensor.shape[0] :].data.fill_(0)
        elif name in ("q", "k", "v"):
            start, size = {"q": (0, QUERIES), "k": (QUERIES, VALUES), "v": (QUERIES + VALUES, VALUES)}[name]
            into = self.tensors["qkv"].data.narrow(0, start, size)
            assert into.shape == tensor.shape
            into.copy_(tensor)
        elif name == "out":
            self.tensors["out"].data.copy_(tensor.narrow(1, QUERIES // 2, QUERIES // 2))
        elif self.cast:
            self.tensors[name].data.copy_(tensor * 2)
        else:
            self.tensors[name].data.copy_(tensor)


def checkpoint() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {
        "embed": torch.randn(VOCABULARY, HIDDEN),
        "q": torch.randn(QUERIES, HIDDEN),
        "k": torch.randn(VALUES, HIDDEN),
        "v": torch.randn(VALUES, HIDDEN),
        "out": torch.randn(HIDDEN, QUERIES),
        "norm": torch.randn(HIDDEN),
    }
    found["head"] = found["embed"]
    return found


def learned(engine: Engine, weights: dict[str, torch.Tensor] | Manifest) -> LearnedPlan:
    manifest = weights if isinstance(weights, Manifest) else describe(weights)
    return learn(manifest, engine.load_weights, engine.tensors, list(engine.tensors))


def test_a_run_of_the_plan_leaves_the_same_bytes_as_the_loaders() -> None:
    weights = checkpoint()
    plan = learned(Engine(), weights)
    assert (plan.mismatches, plan.obstacles) == ([], {})
    loaded, planned = Engine("cpu"), Engine("cpu")
    loaded.load_weights(weights.items())
    for placement in plan.placements:
        placement.view(planned.tensors[placement.destination]).copy_(placement.of(weights[placement.source]))
    for fill in plan.fills:
        fill.view(planned.tensors[fill.destination]).fill_(fill.value)
    for name, tensor in loaded.tensors.items():
        assert torch.equal(tensor, planned.tensors[name]), name


def test_nothing_in_the_engine_changes_while_it_is_learned() -> None:
    engine = Engine("cpu")
    learned(engine, checkpoint())
    assert all(bool((tensor == 9.0).all()) for tensor in engine.tensors.values())


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("norm", torch.zeros(HIDDEN + 1), "norm: the sender's [9] does not fit [8]"),
        ("k", torch.zeros(VALUES, HIDDEN + 1), "k float32 [4, 9]: the engine's loader refuses it (AssertionError"),
        ("norm", torch.zeros(HIDDEN, dtype=torch.float64), "norm: the sender's dtype is float64, the engine's float32"),
        ("norm", torch.zeros(HIDDEN, dtype=torch.int64), "norm: the sender's dtype is int64, the engine's float32"),
        ("q", None, "qkv: the engine has it, but 96 of its 160 elements are in no tensor that is sent"),
        ("norm", None, "norm: the engine has it, but 8 of its 8 elements are in no tensor that is sent"),
        ("nothing", torch.zeros(3), "nothing float32 [3]: the engine's loader refuses it (KeyError"),
    ],
)
def test_each_misfit_is_said(name: str, tensor: torch.Tensor | None, said: str) -> None:
    weights = checkpoint()
    weights.pop(name, None)
    if tensor is not None:
        weights[name] = tensor
    plan = learned(Engine(), weights)
    assert any(sentence.startswith(said) for sentence in plan.mismatches), plan.mismatches


def test_what_an_engine_widens_goes_through_its_loaders() -> None:
    weights = checkpoint()
    weights["norm"] = weights["norm"].bfloat16()
    plan = learned(Engine(), weights)
    assert plan.mismatches == []
    assert plan.obstacles == {"norm": "norm is bfloat16 and is widened to float32"}


def test_all_misfits_are_said_at_once() -> None:
    weights = checkpoint()
    weights["norm"] = torch.zeros(3)
    weights["k"] = torch.zeros(5, 5)
    weights["nothing"] = torch.zeros(3)
    plan = learned(Engine(), weights)
    told = " ".join(plan.mismatches)
    assert all(word in told for word in ("norm: the sender's [3]", "k float32 [5, 5]", "nothing float32 [3]"))


def test_a_head_that_the_engine_ties_and_the_sender_does_not_is_said() -> None:
    weights = checkpoint()
    weights["head"] = torch.zeros(VOCABULARY, HIDDEN)
    names = {**weights, "lm_head.weight": weights["head"]}
    del names["head"]

    class Tied(Engine):
        def load(self, name: str, tensor: torch.Tensor) -> None:
            if name != "lm_head.weight":
                super().load(name, tensor)

    (sentence,) = learned(Tied(), names).mismatches
    assert sentence.startswith("lm_head.weight: sent, but the engine takes nothing of it")
    assert "ties its head" in sentence


def test_arithmetic_in_a_loader_is_an_obstacle_with_its_parameter() -> None:
    engine = Engine()
    engine.cast = True
    plan = learned(engine, checkpoint())
    assert plan.mismatches == []
    assert plan.obstacles == {"norm": "its loader fills it from what it makes of norm"}


def test_a_loader_that_does_nothing_is_no_plan() -> None:
    engine = Engine()
    plan = learn(describe(checkpoint()), lambda named: list(named), engine.tensors, [])
    assert plan.placements == []
    assert plan.mismatches


def test_elements_written_twice_are_an_obstacle() -> None:
    class Twice(Engine):
        def load(self, name: str, tensor: torch.Tensor) -> None:
            super().load(name, tensor)
            if name == "k":
                self.tensors["qkv"].data.narrow(0, QUERIES + VALUES, VALUES).copy_(tensor)

    assert learned(Twice(), checkpoint()).obstacles == {"qkv": "its loader writes some elements twice"}


def test_tensors_without_elements_are_no_misfit() -> None:
    weights = checkpoint()
    entries = (*describe(weights).tensors, TensorEntry(name="empty", dtype="float32", shape=(0, 4)))

    class Ignores(Engine):
        def load(self, name: str, tensor: torch.Tensor) -> None:
            if name != "empty":
                super().load(name, tensor)

    assert learned(Ignores(), Manifest(tensors=entries)).mismatches == []


@pytest.mark.parametrize(
    ("shape", "strides", "starts", "length"),
    [
        ((3, 4), (4, 1), [5], 12),
        ((3, 2), (4, 1), [5, 9, 13], 2),
        ((2, 3), (1, 2), [5, 7, 9, 6, 8, 10], 1),
        ((1, 4), (99, 1), [5], 4),
        ((), (), [5], 1),
    ],
)
def test_runs_are_those_of_the_view(
    shape: tuple[int, ...], strides: tuple[int, ...], starts: list[int], length: int
) -> None:
    found, size = runs_of(5, shape, strides)
    assert (found.tolist(), size) == (starts, length)
    memory = torch.arange(64)
    view = memory.as_strided(shape, strides, 5).reshape(-1)
    assert view.tolist() == [start + i for start in starts for i in range(length)]
