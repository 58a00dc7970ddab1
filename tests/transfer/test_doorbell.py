"""A process beside an engine hears of whatever comes for the engine's receiver, and need not ask."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from weightsync_agent.engines.doorbell import Bell, Doorbell
from weightsync_agent.errors import Closed
from weightsync_agent.receiver import Receiver
from weightsync_agent.sender import Sender
from weightsync_api.agent_config import AgentConfig

WAIT_SECONDS = 90.0
"""Only ends a wait for a ring that never comes."""


@pytest.mark.parametrize("transport", ["IPC", "NCCL"])
def test_it_rings_for_joining_for_every_step_and_for_the_next_sender(
    make_config: Callable[..., AgentConfig], transport: str
) -> None:
    config = make_config(transport=transport)
    weights, held = {"w": torch.zeros(1000)}, {"w": torch.zeros(1000)}
    with Bell() as bell, Receiver(held, config=config, rank=1) as receiver, ThreadPoolExecutor(1) as trainer:
        doorbell = Doorbell(receiver.descriptors, bell.name)

        def heard(of: Callable[[], bool]) -> None:
            """Looks when it rings, and never else."""
            while not of():
                doorbell.arm()
                assert bell.wait(WAIT_SECONDS)

        def said_goodbye() -> bool:
            try:
                return receiver.look()
            except Closed:
                return True

        try:
            for _ in range(2):
                with Sender(weights, config=config) as sender:
                    for value in range(1, 4):
                        weights["w"].fill_(value)
                        step = trainer.submit(sender.step)
                        heard(receiver.look)
                        assert not receiver.ready or held["w"][0] != value, "looking moves no weights"
                        assert receiver.wait(WAIT_SECONDS) is not None
                        assert step.result(WAIT_SECONDS).complete
                        assert torch.equal(held["w"], weights["w"])
                heard(said_goodbye)
        finally:
            doorbell.close()


def test_a_bell_that_nobody_hears_any_more_hinders_nobody(make_config: Callable[..., AgentConfig]) -> None:
    config = make_config()
    with Bell() as gone, Receiver({"w": torch.zeros(3)}, config=config, rank=1) as receiver:
        doorbell = Doorbell(receiver.descriptors, gone.name)
        gone.close()
        doorbell.arm()
        with Sender({"w": torch.ones(3)}, config=config) as sender, ThreadPoolExecutor(1) as trainer:
            step = trainer.submit(sender.step)
            assert receiver.wait(WAIT_SECONDS) == 1
            assert step.result(WAIT_SECONDS).complete
        doorbell.close()
        doorbell.close()
