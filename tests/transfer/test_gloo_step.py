"""Whole steps over gloo, with the real state machines on both sides: the collective is made anew when it has to be."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import samples
import torch
from weightsync_agent.errors import StepFailed
from weightsync_agent.sender import Sender
from weightsync_api.agent_config import AgentConfig


def change(weights: dict[str, torch.Tensor], seed: int) -> dict[str, str]:
    for name, tensor in samples.mixed(seed).items():
        weights[name].copy_(tensor)
    return samples.fingerprint(weights)


@pytest.mark.parametrize("mode", ["Direct", "Packed", "Auto"])
def test_every_receiver_holds_every_byte_after_each_step(
    mode: str, make_config: Callable[..., AgentConfig], start: Callable[..., Any]
) -> None:
    config = make_config(transport="NCCL", mode=mode, receivers=2)
    receivers = [start(config, 1), start(config, 2, target="loader")]
    weights = samples.mixed(0)
    with Sender(weights, config=config) as sender:
        for step in range(1, 4):
            want = change(weights, step)
            report = sender.step()
            assert report.complete
            assert report.verified == (step == 1)
            for receiver in receivers:
                assert receiver.until("step", step)["fingerprint"] == want
        assert sender.report().route == "Gloo/TCP"


@pytest.mark.parametrize("fault", [{"raise_in_load": True}, {"keep_views": True}])
def test_a_receiver_that_fails_costs_one_step(
    fault: dict[str, bool], make_config: Callable[..., AgentConfig], start: Callable[..., Any]
) -> None:
    config = make_config(transport="NCCL", receivers=2)
    good, bad = start(config, 1), start(config, 2, target="loader", fault_steps=[2], **fault)
    weights = samples.mixed(0)
    with Sender(weights, config=config) as sender:
        assert sender.step().complete
        with pytest.raises(StepFailed, match="rank 2") as failure:
            sender.step()
        cause = "the engine's loader is broken" if "raise_in_load" in fault else "outlived the load"
        assert cause in failure.value.report.receivers[1].error
        bad.until("tainted")
        want = change(weights, 3)
        assert sender.step().complete
        for receiver in (good, bad):
            assert receiver.until("step", 3)["fingerprint"] == want


def test_a_killed_receiver_costs_one_step_and_returns_whole(
    make_config: Callable[..., AgentConfig], start: Callable[..., Any]
) -> None:
    config = make_config(transport="NCCL", receivers=2)
    stays, dies = start(config, 1), start(config, 2, target="loader", fault_steps=[2], sleep_in_load=60)
    weights = samples.mixed(0)
    with Sender(weights, config=config) as sender:
        assert sender.step().complete
        dies.until("step", 1)
        killer = threading.Timer(1.0, dies.kill)
        killer.start()
        began = time.monotonic()
        with pytest.raises(StepFailed):
            sender.step()
        killer.join()
        assert time.monotonic() - began < 25  # long before the deadline of 60 s
        want = change(weights, 3)
        assert [part.rank for part in sender.step().receivers] == [1]
        assert stays.until("step", 3)["fingerprint"] == want
        again = start(config, 2)
        again.until("started")
        deadline = time.monotonic() + 20
        want = change(weights, 4)
        while len(sender.step().receivers) < 2:
            assert time.monotonic() < deadline, "the restarted receiver did not join"
            time.sleep(0.05)
        assert again.until("step")["fingerprint"] == want


def test_a_receiver_that_joins_later_gets_into_the_group(
    make_config: Callable[..., AgentConfig], start: Callable[..., Any]
) -> None:
    config = make_config(transport="NCCL", receivers=1)
    first = start(config, 1)
    weights = samples.mixed(0)
    with Sender(weights, config=config) as sender:
        assert sender.step().complete
        first.until("step", 1)
        late = start(config, 7)
        late.until("started")
        deadline = time.monotonic() + 20
        want = change(weights, 5)
        while len(sender.step().receivers) < 2:
            assert time.monotonic() < deadline, "the late receiver did not join"
            time.sleep(0.05)
        line = late.until("step")
        assert line["fingerprint"] == want
        assert first.until("step", line["step"])["fingerprint"] == want
