"""Parameters move into one arena: same objects, same values, same ties; or nothing moves at all."""

from __future__ import annotations

import pytest
import torch
from weightsync_agent.adopt import adopt, bring_back
from weightsync_agent.errors import ConfigError
from weightsync_agent.host_memory import HostMemory
from weightsync_agent.manifest import Manifest, describe
from weightsync_agent.targets import named_tensors


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm1d(5)
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.tensor(2.5, dtype=torch.float64))
        self.empty = torch.nn.Parameter(torch.zeros(0, 4))


def arena_of(manifest: Manifest) -> torch.Tensor:
    return torch.full((manifest.arena_bytes,), 0xAA, dtype=torch.uint8)


def test_values_objects_and_ties_stay_and_the_arena_holds_them_at_the_manifests_offsets() -> None:
    model = Tied()
    named = named_tensors(model)
    before = {name: tensor.detach().clone() for name, tensor in named.items()}
    objects = {name: id(tensor) for name, tensor in model.named_parameters(remove_duplicate=False)}
    manifest = describe(named)
    arena = arena_of(manifest)
    done = adopt(named, manifest, arena)
    assert done.tensors == len(named) - 1
    assert done.nbytes == manifest.nbytes
    assert done.made_contiguous == ("conv.weight",)
    after = named_tensors(model)
    assert {name: id(t) for name, t in model.named_parameters(remove_duplicate=False)} == objects
    for entry, offset in zip(manifest.tensors, manifest.arena_offsets, strict=True):
        tensor = after[entry.name]
        assert torch.equal(tensor, before[entry.name]), entry.name
        assert tensor.is_contiguous()
        if entry.nbytes:
            assert tensor.data_ptr() == arena.data_ptr() + offset
    assert model.head.weight is model.embed.weight
    assert describe(after) == manifest


def test_two_parameters_over_one_memory_stay_tied() -> None:
    first = torch.nn.Parameter(torch.randn(4, 4))
    second = torch.nn.Parameter(first.data)
    named: dict[str, torch.Tensor] = {"a": first, "b": second}
    manifest = describe(named)
    adopt(named, manifest, arena_of(manifest))
    with torch.no_grad():
        first.fill_(3)
    assert torch.equal(second, torch.full((4, 4), 3.0))


def test_training_goes_on_as_if_nothing_had_moved() -> None:
    torch.manual_seed(0)
    models = [torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    inputs = torch.randn(3, 6)

    def train() -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()

    train()
    named = named_tensors(models[1])
    manifest = describe(named)
    arena = arena_of(manifest)
    adopt(named, manifest, arena)
    train()
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    offset = manifest.arena_offsets[0]
    written = arena[offset : offset + manifest.tensors[0].nbytes].view(torch.float32)
    assert torch.equal(written, models[1].weight.detach().reshape(-1))


def test_an_arena_of_shared_memory_shows_another_mapping_the_weights() -> None:
    named: dict[str, torch.Tensor] = {"w": torch.nn.Parameter(torch.randn(5, 3))}
    manifest = describe(named)
    with HostMemory.create(manifest.arena_bytes) as memory:
        import os

        peer = HostMemory.map(os.dup(memory.fd), manifest.arena_bytes)
        adopt(named, manifest, memory.tensor())
        assert torch.equal(peer.tensor()[:60].view(torch.float32).view(5, 3), named["w"])
        peer.close()


def refused() -> list[tuple[dict[str, torch.Tensor], str]]:
    base = torch.randn(8, 8)
    return [
        ({"a": torch.ones(1).expand(4)}, "expanded"),
        ({"a": base[:5], "b": base[4:]}, "share memory in part"),
        ({"all": base, "first": base[:1], "last": base[7:]}, "share memory in part"),
        ({"a": torch.nn.parameter.UninitializedParameter()}, "can't be moved"),
    ]


@pytest.mark.parametrize(("named", "sentence"), refused(), ids=lambda value: value if isinstance(value, str) else "")
def test_what_cant_be_moved_is_refused_and_nothing_moves(named: dict[str, torch.Tensor], sentence: str) -> None:
    good = torch.randn(3)
    both = {"good": good, **named}
    pointer = good.data_ptr()
    entries = {name: t for name, t in both.items() if not isinstance(t, torch.nn.parameter.UninitializedParameter)}
    manifest = describe(entries)
    if len(entries) < len(both):
        manifest = Manifest(tensors=(*manifest.tensors, manifest.tensors[0].model_copy(update={"name": "a"})))
    with pytest.raises(ConfigError, match=sentence):
        adopt(both, manifest, arena_of(manifest))
    assert good.data_ptr() == pointer


def test_an_arena_that_is_too_small_is_refused() -> None:
    named = {"w": torch.ones(100)}
    with pytest.raises(ConfigError, match="an arena for these weights"):
        adopt(named, describe(named), torch.zeros(256, dtype=torch.uint8))


def test_parameters_that_left_the_arena_come_back_with_the_values_that_they_have_by_then() -> None:
    model = Tied()
    named = named_tensors(model)
    manifest = describe(named)
    arena = arena_of(manifest)
    adopt(named, manifest, arena)
    model.norm.weight.square().sum().backward()
    grad, objects = model.norm.weight.grad, {name: id(tensor) for name, tensor in named.items()}
    model.norm.bias.requires_grad_(False)
    before = arena.clone()
    # Two in each other's place, a tied one, a strided one, one without bytes; and all others where they were.
    model.norm.weight.data, model.norm.bias.data = model.norm.bias.data, model.norm.weight.data
    model.embed.weight.data = torch.randn(11, 8)
    model.conv.weight.data = torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last)
    model.empty.data = torch.zeros(0, 4)
    want = {name: tensor.detach().clone() for name, tensor in named.items()}
    left = ("norm.weight", "norm.bias", "embed.weight", "head.weight", "conv.weight", "empty")
    tensors = [named[entry.name] for entry in manifest.tensors]
    bring_back(tensors, manifest, arena, [i for i, entry in enumerate(manifest.tensors) if entry.name in left])
    after = named_tensors(model)
    assert {name: id(tensor) for name, tensor in after.items()} == objects
    for entry, offset in zip(manifest.tensors, manifest.arena_offsets, strict=True):
        assert torch.equal(after[entry.name], want[entry.name]), entry.name
        if entry.nbytes:
            assert after[entry.name].data_ptr() == arena.data_ptr() + offset
        if entry.name not in left:
            stays = slice(offset, offset + entry.nbytes)
            assert torch.equal(arena[stays], before[stays])
    assert describe(after) == manifest
    assert model.norm.weight.grad is grad
    assert (model.norm.weight.requires_grad, model.norm.bias.requires_grad) == (True, False)
