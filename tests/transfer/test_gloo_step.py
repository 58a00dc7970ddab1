"""Whole steps over gloo, with the real state machines on both sides: the collective is made anew when it has to be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import samples
from step_promises import *  # noqa: F403 - the tests of all places
from step_promises import GLOO, Place, steps_until_all_take_part
from weightsync_agent.errors import StepFailed
from weightsync_agent.send_channel import StepChannel
from weightsync_agent.sender import Sender
from weightsync_api.agent_config import AgentConfig


@pytest.fixture
def place() -> Place:
    return GLOO


@pytest.mark.parametrize("mode", ["Direct", "Auto"])
def test_the_other_modes_go_by_gloo_too(
    mode: str, make_config: Callable[..., AgentConfig], start: Callable[..., Any]
) -> None:
    config = make_config(transport="NCCL", mode=mode)
    receiver = start(config, 1)
    weights = samples.mixed(0)
    with Sender(weights, config=config) as sender:
        want = samples.change(weights, 1)
        assert sender.step().complete
        assert receiver.until("step", 1)["fingerprint"] == want
        assert sender.report().route == "Gloo/TCP"


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
        want = samples.change(weights, 5)
        steps_until_all_take_part(sender, 2)
        line = late.until("step")
        assert line["fingerprint"] == want
        assert first.until("step", line["step"])["fingerprint"] == want


def test_a_receiver_that_fails_with_all_of_the_data_breaks_off_no_other(
    make_config: Callable[..., AgentConfig], start: Callable[..., Any], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = run_dir / "failed"
    fail = StepChannel.fail

    def told(channel: StepChannel, *what: Any, **more: Any) -> None:
        fail(channel, *what, **more)
        failed.touch()

    monkeypatch.setattr(StepChannel, "fail", told)
    # One bucket: of several the sender would send the other one no more than it can send to both.
    config = make_config(transport="NCCL", receivers=2, bucket_bytes=4 << 20)
    # It gets its first byte of step 2 when the sender knows already that the other one has failed.
    late = start(config, 1, fault_steps=[2], starts_after=str(failed))
    broken = start(config, 2, fault_steps=[2], raise_at_commit=True)
    weights = samples.mixed(0)
    with Sender(weights, config=config) as sender:
        assert sender.step().complete
        want = samples.change(weights, 1)
        with pytest.raises(StepFailed, match=r"reached 1 of 2 receivers; rank 2.*it can't be taken in"):
            sender.step()
        assert late.until("step", 2)["fingerprint"] == want
        assert "can't be taken in" in broken.until("tainted")["tainted"]
        want = samples.change(weights, 2)
        assert sender.step().complete
        assert late.until("step", 3)["fingerprint"] == broken.until("step", 3)["fingerprint"] == want
