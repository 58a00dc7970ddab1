"""What a step promises, over shared memory, on a GPU and over gloo: the same tests, run over every place.

A module of tests imports them all, and has a fixture `place`; `start` and `make_config` are the transfer tests'.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transfer import samples
from weightsync_agent.errors import JoinTimeout, StepFailed
from weightsync_agent.sender import Sender
from weightsync_api.agent_config import AgentConfig

__all__ = [
    "group",
    "test_every_receiver_holds_every_byte_after_each_step",
    "test_killed_receiver_is_dropped_and_returns_whole",
    "test_memory_stays_flat_over_many_steps",
    "test_receiver_killed_between_steps_strands_nothing",
    "test_receiver_that_fails_is_named_tainted_and_whole_one_step_later",
    "test_silent_receiver_costs_the_ack_timeout_and_is_whole_later",
]

WAIT = 120.0


@dataclass(frozen=True)
class Place:
    """Where the weights are, and which way they go."""

    name: str
    mode: str
    adopt: bool
    route: str
    device: str = "cpu"
    bucket_bytes: int = 16384
    transport: str = "IPC"
    together: bool = False
    """Whether it is a collective: no receiver maps memory of the sender's, and one that fails costs all the step."""
    push: bool = False
    loads: bool = True
    """Whether a `load_weights` can be given what lies there."""
    flat_after: int = 10
    """Steps after which reserved memory stays as it is, ..."""
    flat_bytes: int = 8 << 20
    """... but for so much: a process's own memory is not only the agent's."""
    steps: int = 60

    def weights(self, seed: int = 0) -> dict[str, torch.Tensor]:
        return samples.mixed(seed, self.device)

    def change(self, weights: dict[str, torch.Tensor], seed: int) -> dict[str, str]:
        """Trains, so to say: new bytes in place. Gives their fingerprint."""
        return samples.change(weights, seed)


CPU_PLACES = [
    Place("Direct", "Direct", adopt=True, route="SharedMemory"),
    Place("Packed", "Packed", adopt=False, route="SharedMemory"),
]
GLOO = Place("Gloo", "Packed", adopt=False, route="Gloo/TCP", transport="NCCL", together=True)
_GPU: dict[str, Any] = {"device": "cuda", "bucket_bytes": 65536, "flat_after": 5, "flat_bytes": 0, "steps": 300}
GPU_PLACES = [
    Place("Direct-adopted", "Direct", adopt=True, route="IPC/Descriptor", **_GPU),
    Place("Direct", "Direct", adopt=False, route="IPC/TorchHandle", loads=False, **_GPU),
    Place("Packed", "Packed", adopt=False, route="IPC/Descriptor", **_GPU),
    Place("Pushed", "Direct", adopt=False, route="IPC/Push", push=True, loads=False, **_GPU),
    Place("Pushed-adopted", "Direct", adopt=True, route="IPC/Push", push=True, loads=False, **_GPU),
    Place("Pushed-packed", "Packed", adopt=False, route="IPC/Push", push=True, loads=False, **_GPU),
]


class Group:
    """A WeightSync at a place: its configuration, and what is started of it."""

    def __init__(self, place: Place, make_config: Callable[..., AgentConfig], start: Callable[..., Any]) -> None:
        self.place = place
        self._make_config = make_config
        self._start = start
        self.config = self.configure()

    def configure(self, **changes: Any) -> AgentConfig:
        device = "CPU" if self.place.device == "cpu" else "CUDA"
        place = self.place
        values = {
            "device": device,
            "transport": place.transport,
            "mode": place.mode,
            "bucket_bytes": place.bucket_bytes,
            "push": place.push,
        }
        self.config = self._make_config(**(values | changes))
        return self.config

    def receiver(self, rank: int = 1, **options: Any) -> Any:
        if options.get("target") == "loader" and not self.place.loads:
            pytest.skip("load_weights in Direct mode needs an adopted arena, and says so")
        return self._start(self.config, rank, device=self.place.device, **options)

    def sender(self, weights: dict[str, torch.Tensor]) -> Sender:
        return Sender(weights, config=self.config, adopt=self.place.adopt)


@pytest.fixture
def group(place: Place, make_config: Callable[..., AgentConfig], start: Callable[..., Any]) -> Group:
    return Group(place, make_config, start)


@pytest.mark.parametrize("target", ["dict", "loader"])
def test_every_receiver_holds_every_byte_after_each_step(target, place, group) -> None:
    group.configure(receivers=2)
    receivers = [group.receiver(rank, target=target) for rank in (1, 2)]
    weights = place.weights()
    with group.sender(weights) as sender:
        for step in range(1, 5):
            want = place.change(weights, step)
            report = sender.step()
            assert report.complete
            assert report.verified == (step == 1)  # the first step is, then each hundredth
            assert [part.rank for part in report.receivers] == [1, 2]
            for receiver in receivers:
                line = receiver.until("step", step)
                assert line["fingerprint"] == want
                assert line["ready"]
        told = sender.report()
        assert (told.mode, told.route) == (place.mode, place.route)
        assert told.self_tested
        assert place.together or sender._transport.exported(1) > 0
    for receiver in receivers:
        receiver.until("closed")


@pytest.mark.parametrize("fault", [{"raise_in_load": True}, {"keep_views": True}], ids=lambda fault: next(iter(fault)))
def test_receiver_that_fails_is_named_tainted_and_whole_one_step_later(fault, place, group) -> None:
    group.configure(receivers=2)
    good = group.receiver(1)
    bad = group.receiver(2, target="loader", fault_steps=[2], **fault)
    weights = place.weights()
    with group.sender(weights) as sender:
        assert sender.step().complete
        bad.until("step", 1)
        place.change(weights, 2)
        with pytest.raises(StepFailed) as failure:
            sender.step()
        report = failure.value.report
        assert not report.complete
        spared = "Tainted" if place.together else "Synced"
        assert [(part.rank, part.state) for part in report.receivers] == [(1, spared), (2, "Tainted")]
        cause = "the engine's loader is broken" if "raise_in_load" in fault else "outlived the load"
        assert cause in report.receivers[1].error
        assert "rank 2" in str(failure.value)
        assert "step 2" in str(failure.value)
        tainted = bad.until("tainted")
        assert cause in tainted["tainted"]
        assert not tainted["ready"]
        want = place.change(weights, 3)
        assert sender.step().complete
        assert bad.until("step", 3)["fingerprint"] == want
        assert good.until("step", 3)["fingerprint"] == want


def is_out(sender: Sender) -> bool:
    """Whether all of the step at work was sent to everyone. In Direct mode receivers with cores to spare look where
    it is announced, and may begin before it was sent to the last of them: who dies by then was never in it.
    """
    channel = sender._router._channel
    return channel is not None and channel.committed_at > 0


def next_whole_step(sender: Sender) -> int:
    """The number of the first step that is whole again."""
    deadline = time.monotonic() + WAIT
    while True:
        try:
            return sender.step().step
        except (StepFailed, JoinTimeout):
            assert time.monotonic() < deadline, "no step was whole again"
            time.sleep(0.05)


def steps_until_all_take_part(sender: Sender, receivers: int) -> None:
    deadline = time.monotonic() + WAIT
    while len(sender.step().receivers) < receivers:
        assert time.monotonic() < deadline, "the last receiver did not join"
        time.sleep(0.05)


def returns_whole(group: Group, sender: Sender, weights: dict[str, torch.Tensor], rank: int) -> None:
    """Starts a receiver anew; steps until it takes part."""
    again = group.receiver(rank)
    again.until("started")
    want = group.place.change(weights, 4)
    steps_until_all_take_part(sender, 2)
    assert again.until("step")["fingerprint"] == want


def test_killed_receiver_is_dropped_and_returns_whole(place, group) -> None:
    group.configure(receivers=2)
    stays, dies = group.receiver(1), group.receiver(2, target="loader", fault_steps=[2], sleep_in_load=60)
    weights = place.weights()
    with group.sender(weights) as sender:
        assert sender.step().complete
        dies.until("step", 1)

        def kill_in_load() -> None:
            dies.until("loading", 2)
            while place.mode == "Direct" and not is_out(sender):
                time.sleep(0.001)
            dies.kill()

        killer = threading.Thread(target=kill_in_load)
        killer.start()
        # Not by a deadline, which would be told as such.
        with pytest.raises(StepFailed, match=r"rank 2.*(connection is gone|process has ended)") as failure:
            sender.step()
        killer.join()
        assert place.together or failure.value.report.receivers[1].state == "Lost"
        want = place.change(weights, 3)
        report = sender.step()
        assert report.complete
        assert [part.rank for part in report.receivers] == [1]
        assert stays.until("step", 3)["fingerprint"] == want
        returns_whole(group, sender, weights, 2)


def test_receiver_killed_between_steps_strands_nothing(place, group) -> None:
    group.configure(receivers=2)
    stays, dies = group.receiver(1), group.receiver(2)
    weights = place.weights()
    with group.sender(weights) as sender:
        assert sender.step().complete
        dies.until("step", 1)
        dies.kill()
        want = place.change(weights, 2)
        try:
            report = sender.step()
        except StepFailed:
            report = sender.step()
        assert [part.rank for part in report.receivers] == [1]
        assert stays.until("step", report.step)["fingerprint"] == want
        assert place.together or sender._transport.exported(2) == 0
        returns_whole(group, sender, weights, 2)


def wait_for(sender: Sender, config: AgentConfig) -> None:
    """The deadlines of its next steps: those of a step that a slow machine has to get through are long."""
    sender.config = sender._carrier._config = config


def test_silent_receiver_costs_the_ack_timeout_and_is_whole_later(place, group) -> None:
    receiver = group.receiver()
    weights = place.weights()
    with group.sender(weights) as sender:
        assert sender.step().complete
        receiver.until("step", 1)
        os.kill(receiver.process.pid, signal.SIGSTOP)  # alive, connected, and deaf
        patient = sender.config
        wait_for(sender, patient.model_copy(update={"ack_timeout_seconds": 1, "step_timeout_seconds": 3}))
        with pytest.raises(StepFailed, match=r"rank 1.* within .* s"):
            sender.step()
        wait_for(sender, patient)
        os.kill(receiver.process.pid, signal.SIGCONT)
        want = place.change(weights, 3)
        step = next_whole_step(sender)
        # Whatever it made of the step that was broken off, it never called that one whole.
        while (line := receiver.until("step"))["step"] != step:
            assert line["step"] != 2
        assert line["fingerprint"] == want


def test_memory_stays_flat_over_many_steps(place, group) -> None:
    receiver = group.receiver()
    weights = place.weights()
    with group.sender(weights) as sender:
        reports = [sender.step() for _ in range(place.steps)]
        receiver.until("step", place.steps)
    for of in (lambda r: r.memory, lambda r: r.receivers[0].memory):
        after = [of(report).reserved_after for report in reports[place.flat_after :]]
        assert after[0] > 0
        assert max(after) - after[0] <= place.flat_bytes
