"""Tensors that moved are found, whichever way they did, and without Python code for each tensor when none has."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch
from torch.nn.modules import module as torch_module
from weightsync_agent.addresses import Addresses, Moved
from weightsync_agent.adopt import adopt
from weightsync_agent.errors import ConfigError
from weightsync_agent.sources.computed import Computed
from weightsync_agent.sources.gatherer import Gatherer
from weightsync_agent.sources.module import Weights, gatherer_for


def net() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 10, bias=False))
    model[2].weight = model[0].weight
    return model


def watch(source: Weights, dtype: torch.dtype | None = None, names: tuple = ()) -> tuple[Gatherer, Addresses]:
    gatherer = gatherer_for(source, dtype, names)
    return gatherer, Addresses(gatherer)


def moved(gatherer: Gatherer, addresses: Addresses) -> list[str]:
    try:
        addresses.check("nothing was sent")
    except Moved as found:
        addresses.settle()
        addresses.check("nothing was sent")  # found once
        return [gatherer.names[index] for index in found.indices]
    return []


def test_a_parameter_with_other_memory_is_found_under_each_of_its_names() -> None:
    model = net()
    watched = watch(model)
    assert moved(*watched) == []
    with torch.no_grad():
        model[0].weight.add_(1)
    assert moved(*watched) == []
    model[0].weight.data = model[0].weight.data.clone()
    assert moved(*watched) == ["0.weight", "2.weight"]


def test_what_stands_in_a_modules_places_by_now_is_what_is_sent() -> None:
    model = net()
    gatherer, addresses = watch(model)
    fresh = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fresh["2.weight"] = fresh["0.weight"]
    model.load_state_dict(fresh, assign=True)
    assert moved(gatherer, addresses) == gatherer.names
    assert gatherer.tensors[0] is model[0].weight
    model[1] = torch.nn.BatchNorm1d(4)
    assert moved(gatherer, addresses) == [name for name in gatherer.names if name.startswith("1.")]
    model[1].running_var = torch.ones(4)
    assert moved(gatherer, addresses) == ["1.running_var"]
    assert gatherer.tensors[gatherer.names.index("1.running_var")] is model[1].running_var
    model[1].weight = torch.nn.Parameter(model[1].weight.data)  # another object, and the same memory
    assert moved(gatherer, addresses) == []
    model[1].weight.data = torch.ones(4)
    assert moved(gatherer, addresses) == ["1.weight"]


def test_what_stands_in_a_dicts_places_by_now_is_what_is_sent() -> None:
    tensors = {name: torch.zeros(3) for name in "abc"}
    gatherer, addresses = watch(tensors, names=(("^c$", ""),))
    assert gatherer.names == ["a", "b"]
    tensors["b"] = torch.ones(3)
    assert moved(gatherer, addresses) == ["b"]
    assert gatherer.tensors[1] is tensors["b"]
    tensors["c"] = torch.ones(3)
    tensors["d"] = torch.ones(3)
    assert moved(gatherer, addresses) == []
    first, second = tensors.pop("a"), tensors.pop("b")
    tensors["b"], tensors["a"] = first, second
    assert moved(gatherer, addresses) == ["a", "b"]
    assert gatherer.tensors == [second, first]


def test_tensors_that_an_iterator_gave_are_found_by_their_memory() -> None:
    tensors = {name: torch.zeros(3) for name in "ab"}

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors.items()

    watched = watch(pairs())
    tensors["a"].data = torch.ones(3)
    assert moved(*watched) == ["a"]


def test_masters_and_what_values_are_made_from_are_found_too() -> None:
    masters: dict[str, torch.Tensor | Computed] = {"a": torch.zeros(3), "b": torch.zeros(3)}
    gatherer, addresses = watch(masters, torch.bfloat16)
    assert not gatherer.computed
    masters["a"] = torch.ones(3)
    assert moved(gatherer, addresses) == ["a"]
    assert gatherer.gather([0])[0].tolist() == [1, 1, 1]

    base = torch.zeros(3)
    masters["b"] = Computed(base, lambda: base + 2)
    gatherer, addresses = watch(masters)
    assert gatherer.computed
    base.data = torch.ones(3)
    assert moved(gatherer, addresses) == ["b"]
    assert gatherer.gather([1])[0].tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.update(b=t["b"].double()), r"b \(from torch.float32 \[3\].* to torch.float64"),
        (lambda t: t.update(b=t["b"][:2].clone()), r"b \(from .*\[3\].* to .*\[2\]"),
        (lambda t: t.update(b=t["b"].to("meta")), r"b \(from .* on cpu to .* on meta\)"),
        (lambda t: t.update(b=torch.ones(3).to_sparse()), r"b \(from .*strided.* to .*sparse_coo"),
        (lambda t: t.update(b=t["a"]), r"b \(tied to a\) changed"),
        (lambda t: t.update(tied=torch.zeros(3)), r"tied \(untied from a\) changed"),
        (lambda t: t.pop("b"), r"the source has no b any more.*\(nothing was sent\)"),
        (lambda t: t.update(b=3), "'b' comes with a int"),
    ],
)
def test_what_is_no_longer_what_it_was_is_named_and_nothing_is_changed(
    change: Callable[[dict[str, object]], object], said: str
) -> None:
    tensors: dict[str, torch.Tensor] = {"a": torch.zeros(3), "b": torch.zeros(3)}
    tensors["tied"] = tensors["a"]
    gatherer, addresses = watch(tensors)
    before, held = dict(tensors), list(gatherer.tensors)
    change(tensors)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(ConfigError, match=said):
            addresses.check("nothing was sent")
    assert all(a is b for a, b in zip(gatherer.tensors, held, strict=True))
    tensors.clear()
    tensors.update(before)
    assert moved(gatherer, addresses) == []


def test_a_tensor_that_cannot_lie_in_the_arena_is_named_while_nothing_has_moved() -> None:
    tensors: dict[str, torch.Tensor] = {"a": torch.zeros(3), "b": torch.zeros(3)}
    gatherer = gatherer_for(tensors)
    arena = torch.zeros(gatherer.manifest.arena_bytes, dtype=torch.uint8)
    adopt(tensors, gatherer.manifest, arena)
    addresses = Addresses(gatherer, arena)
    whole = torch.zeros(5)
    tensors["a"], tensors["b"] = whole[:3], whole[2:]
    with pytest.raises(ConfigError, match="nothing was sent: a and b share memory in part"):
        addresses.check("nothing was sent")


@pytest.mark.parametrize("kind", ["dict", "module"])
def test_looking_at_many_tensors_runs_no_python_code_for_each(kind: str) -> None:
    def calls(count: int) -> int:
        tensors = {f"t{n}": torch.nn.Parameter(torch.zeros(1)) for n in range(count)}
        source = tensors if kind == "dict" else torch.nn.ParameterDict(tensors)
        _, addresses = watch(source)
        seen = 0

        def count_call(frame: FrameType, event: str, what: object) -> None:
            nonlocal seen
            seen += event in ("call", "c_call")

        sys.setprofile(count_call)
        try:
            addresses.check("")
            addresses.check_sizes("")
        finally:
            sys.setprofile(None)
        return seen

    assert calls(2) == calls(200)


def test_torch_calls_nobody_once_the_gatherer_is_gone() -> None:
    hooks = torch_module._global_parameter_registration_hooks
    before = set(hooks)
    gatherer, addresses = watch(net())
    (mine,) = set(hooks) - before
    addresses.let_go()
    gatherer.let_go()
    assert mine not in hooks
