"""Whole steps over gloo, with the real state machines on both sides: the collective is made anew when it has to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import samples
from step_promises import *  # noqa: F403 - the tests of all places
from step_promises import GLOO, Place, steps_until_all_take_part
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
