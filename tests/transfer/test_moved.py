"""A trainer's framework moves its tensors; each step is whole, and of the values that they have by then."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import samples
import torch
from moved_promises import *  # noqa: F403 - the tests of all places
from moved_promises import other_memory
from peers_by_hand import eventually
from step_promises import CPU_PLACES, GLOO, Place, wait_for
from weightsync_agent import addresses, protocol, sender
from weightsync_agent.addresses import MANY_TENSORS
from weightsync_agent.errors import ConfigError, StepFailed
from weightsync_agent.host_memory import HostMemory
from weightsync_agent.manifest import arena_views
from weightsync_agent.sender import Sender
from weightsync_agent.transport.base import SendPlan
from weightsync_agent.transport.shared_memory import SharedMemorySender
from weightsync_api.agent_config import AgentConfig

MakeConfig = Callable[..., AgentConfig]
MODES = pytest.mark.parametrize("mode", ["Direct", "Packed"])


LATE = replace(CPU_PLACES[0], name="Direct-found-within-the-step")


@pytest.fixture(params=[*CPU_PLACES, LATE, GLOO], ids=lambda place: place.name)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    if request.param is LATE:
        monkeypatch.setattr(addresses, "MANY_TENSORS", 1)
    found: Place = request.param
    return found


def many(value: float) -> dict[str, torch.Tensor]:
    return {f"t{n}": torch.full((5,), float(value)) for n in range(MANY_TENSORS)}


def test_a_step_within_which_it_is_found_is_broken_off_and_comes_again_whole(
    make_config: MakeConfig, joined: Callable[..., Any]
) -> None:
    config, target, weights = make_config(mode="Direct"), many(0), many(1)
    receiver = joined(config, target=target)
    with Sender(weights, config=config, adopt=True) as sender:
        assert sender._carrier.checks_late
        assert sender.step().verified
        weights["t7"].data = torch.full((5,), 2.0)
        weights["t8"] = torch.full((5,), 3.0)
        report = sender.step()
        assert report.complete
        assert not sender.errors
        # The step before it was the old bytes: no receiver ever called it whole.
        eventually(lambda: receiver.whole == [1, 3], "it holds the step")
        assert samples.fingerprint(target) == samples.fingerprint(weights)
        assert [float(target[name][0]) for name in ("t6", "t7", "t8")] == [1, 2, 3]
        eventually(lambda: [step.step for step in sender.report().steps] == [1, 3], "the report has no broken step")
        weights["t7"].add_(1)
        report = sender.step()
        eventually(lambda: receiver.whole == [1, 3, report.step], "and the next, in one go")
        assert samples.fingerprint(target) == samples.fingerprint(weights)


def test_a_tensor_that_moves_on_and_on_within_a_step_ends_it_at_its_deadline(
    make_config: MakeConfig, joined: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, weights = make_config(mode="Direct"), many(1)
    receiver = joined(config, target=many(0))
    with Sender(weights, config=config, adopt=True) as sender:
        assert sender.step().complete
        begin = sender._carrier._begin

        def moving(*args: Any) -> protocol.Begin:
            weights["t7"].data = weights["t7"].data.clone()  # as another thread of the trainer's may
            return begin(*args)

        monkeypatch.setattr(sender._carrier, "_begin", moving)
        wait_for(sender, config.model_copy(update={"step_timeout_seconds": 3}))
        # The deadline is the receiver's too: either may be the first to see that it has passed.
        with pytest.raises(StepFailed, match=r"rank 1.*(moved again and again for 3 s|the commit did not come within)"):
            sender.step()
        assert receiver.whole == [1]
        monkeypatch.undo()
        wait_for(sender, config)
        report = sender.step()
        eventually(lambda: receiver.whole == [1, report.step], "whole again")


@MODES
def test_a_module_that_was_given_other_parameters_is_sent_with_those(
    mode: str, make_config: MakeConfig, joined: Callable[..., Any]
) -> None:
    def net(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 300))

    config, model = make_config(mode=mode), net(0)
    target = net(1).state_dict()
    receiver = joined(config, target=target)

    def arrived(step: int) -> None:
        eventually(lambda: receiver.receiver.step == step, "it holds the step")
        assert samples.fingerprint(target) == samples.fingerprint(model.state_dict())

    with Sender(model, config=config, adopt=mode == "Direct") as sender:
        arrived(sender.step().step)
        model.load_state_dict({k: v.clone() for k, v in net(2).state_dict().items()}, assign=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        arrived(sender.step().step)
        # The new parameters are trained, also those that were brought into the arena.
        model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
        arrived(sender.step().step)
        assert all(parameter.grad is not None for parameter in model.parameters())
        model[1].running_mean = torch.full((9,), 4.0)
        model[2] = torch.nn.Linear(9, 300)
        arrived(sender.step().step)
        model.double().float()
        arrived(sender.step().step)


@MODES
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.double(), r"large \(from torch.float32 \[300, 257\] .* to torch.float64"),
        (lambda t: t[:299].clone(), r"large \(from .*\[300, 257\] .* to .*\[299, 257\]"),
        (lambda t: t.to("meta"), r"large \(from .* on cpu to .* on meta\)"),
    ],
    ids=["dtype", "shape", "device"],
)
def test_a_tensor_of_another_kind_is_an_error_with_its_name(
    change: Callable[[torch.Tensor], torch.Tensor], said: str, mode: str, make_config: MakeConfig,
    joined: Callable[..., Any],
) -> None:  # fmt: skip
    config = make_config(mode=mode)
    receiver = joined(config)
    weights = samples.mixed(0)
    with Sender(weights, config=config, adopt=mode == "Direct") as sender:
        assert sender.step().complete
        kept = weights["large"]
        weights["large"] = change(kept)
        with pytest.raises(ConfigError, match=said + ".*nothing was sent.*in place"):
            sender.step()
        weights["large"] = kept
        assert sender.step().step == 2
        eventually(lambda: receiver.whole == [1, 2], "nothing was sent in between")


def test_what_moved_is_said_once(
    make_config: MakeConfig, joined: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(mode="Direct")
    joined(config)
    weights = samples.mixed(0)
    with Sender(weights, config=config, adopt=True) as sender, caplog.at_level(logging.WARNING):
        for _ in range(3):
            other_memory(weights)
            assert sender.step().complete
    said = [record.getMessage() for record in caplog.records if "moved" in record.getMessage()]
    assert len(said) == 1
    assert "brought back into the arena" in said[0]
    assert "scalar, large, large_strided" in said[0]


class Mapping(SharedMemorySender):
    """Maps the trainer's own memory to its receivers, as a GPU's does by torch's handles: what moves is mapped anew."""

    def __init__(self, plan: SendPlan) -> None:
        super().__init__(plan)
        self.own = plan.arena
        self.plan = replace(plan, arena=None)

    def offer(self, identity: protocol.Identity) -> protocol.Offer:
        shown, self.plan = self.plan, replace(self.plan, arena=self.own)
        try:
            return super().offer(identity)
        finally:
            self.plan = shown

    def replan(self) -> bool:
        return self.plan.mode == "Direct"


@pytest.mark.parametrize("tensors", ["few", "many"])
def test_receivers_that_map_the_trainers_own_memory_join_again_within_the_step(
    tensors: str, make_config: MakeConfig, start: Callable[..., Any], joined: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    made: list[Mapping] = []

    def mapping(_: object, plan: SendPlan) -> SharedMemorySender:
        made.append(Mapping(plan))
        return made[-1]

    monkeypatch.setattr(sender, "sender_transport", mapping)
    config = make_config(mode="Direct", receivers=2)
    weights, target = (samples.mixed(0), samples.blank()) if tensors == "few" else (many(0), many(9))
    others = [joined(config, 1, target=target)]
    if tensors == "few":
        others.append(start(config, 2))
    else:
        others.append(joined(config, 2, target=many(9)))
    with Sender(weights, config=config, adopt=True) as trainer, HostMemory.create(1 << 22, "elsewhere") as elsewhere:
        trainer._addresses._arena = None
        assert trainer.step().complete
        before = made[0]._exports[1].control
        views = arena_views(trainer.manifest, elsewhere.tensor())
        for name, tensor in weights.items():
            views[name].copy_(tensor)
            tensor.data = views[name]
        made[0].own = elsewhere
        weights["t7" if tensors == "many" else "large"].add_(1)
        want = samples.fingerprint(weights)
        report = trainer.step()
        assert [(part.rank, part.state) for part in report.receivers] == [(1, "Synced"), (2, "Synced")]
        assert report.verified
        assert made[0]._exports[1].control is not before
        eventually(lambda: others[0].receiver.step == report.step, "it holds the step")
        assert samples.fingerprint(target) == want
        if tensors == "few":
            assert others[1].until("step", report.step)["fingerprint"] == want
