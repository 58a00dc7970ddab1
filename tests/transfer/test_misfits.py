"""Who can't join is not waited for: the first step goes on, or fails, as soon as nobody else can come.

The join timeout is an hour in all of them but one: a step that waits it out ends with the test's own time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import samples
import torch
from peers_by_hand import WAIT, eventually, raw
from weightsync_agent import protocol
from weightsync_agent.engines.vllm import AsyncVllmEngine, VllmEngine, step_all
from weightsync_agent.engines.vllm_worker import JOIN, STEP, JoinRequest, WorkerReport
from weightsync_agent.errors import JoinTimeout, TransportError
from weightsync_agent.receiver import Receiver
from weightsync_agent.sender import Sender
from weightsync_api.agent_config import AgentConfig
from weightsync_api.reports import AgentReport, AgentState

HOUR = 3600.0


@pytest.fixture
def patient(make_config: Callable[..., AgentConfig]) -> Callable[..., AgentConfig]:
    return lambda **changes: make_config(**({"join_timeout_seconds": HOUR} | changes))


def told(sender: Sender, rank: int) -> AgentReport | None:
    return next((agent for agent in sender.report().agents if agent.rank == rank), None)


def is_in(sender: Sender, rank: int, state: AgentState) -> bool:
    agent = told(sender, rank)
    return agent is not None and agent.state == state


def test_a_step_fails_at_once_with_each_one_s_differences_and_goes_on_once_one_fits(patient, start) -> None:
    config = patient(receivers=3)
    misfits = [
        start(config, 1, target="dict", blank={"layer.weight": [5, 3], "layer.bias": [4]}),
        start(config, 2, target="dict", blank={"weight": [4, 3], "bias": [4]}),
        start(config, 3, target="dict", blank={"layer.weight": [4, 3], "layer.bias": [4]}),
    ]
    weights = {"layer.weight": torch.ones(4, 3), "layer.bias": torch.ones(4, dtype=torch.float16)}
    with Sender(weights, config=config) as sender:
        with pytest.raises(JoinTimeout) as raised:
            sender.step()
        text = str(raised.value)
        for said in (
            "rank 1: layer.weight: the sender's shape is [4, 3], the receiver's [5, 3]",
            "rank 2: ",
            "the sender's names have the prefix 'layer.'",
            "rank 3: layer.bias: the sender's dtype is float16, the receiver's float32",
        ):
            assert said in text
        assert "within" not in text, "it did not wait"
        for misfit in misfits:
            assert misfit.until("error")["error"] == "ManifestMismatch"
            # What the status is made of has the same reason, also once the process is gone.
            agent = told(sender, misfit.rank)
            assert agent is not None
            assert agent.state == AgentState.REFUSED
            assert agent.message in text
        with pytest.raises(JoinTimeout, match=r"rank 3: layer\.bias"):
            sender.step()
        start(config, 2, target="loader", blank={"layer.weight": [4, 3], "layer.bias": [4]})
        eventually(lambda: is_in(sender, 2, AgentState.JOINED), "the one that fits joined")
        report = sender.step()
        assert (report.complete, [part.rank for part in report.receivers]) == (True, [2])


def test_a_step_goes_on_at_once_with_those_that_fit(patient, start) -> None:
    config = patient(receivers=2)
    fits, differs = start(config, 1), start(config, 2, names={"scalar": "module.scalar"})
    weights = samples.mixed(3)
    with Sender(weights, config=config) as sender:
        report = sender.step()
        assert (report.complete, [part.rank for part in report.receivers]) == (True, [1])
        assert fits.until("step", 1)["fingerprint"] == samples.fingerprint(weights)
        assert differs.until("error")["error"] == "ManifestMismatch"
        agent = told(sender, 2)
        assert agent is not None
        assert (agent.state, "module.scalar" in agent.message) == (AgentState.REFUSED, True)


def test_another_version_is_refused_for_good_and_reported(patient) -> None:
    config = patient()
    with Sender(samples.mixed(0), config=config) as sender, raw(config) as peer:
        peer.hello(protocol=99)
        assert "run the same weightsync version" in peer.until(protocol.Refuse).reason
        with pytest.raises(JoinTimeout, match="rank 1: the sender speaks protocol 1, the receiver 99"):
            sender.step()
        agent = told(sender, 1)
        assert agent is not None
        assert (agent.state, "the receiver 99" in agent.message) == (AgentState.REFUSED, True)


def test_a_failed_self_test_is_refused_for_good(patient) -> None:
    config = patient()
    with Sender(samples.mixed(0), config=config) as sender, raw(config) as peer:
        peer.hello()
        number = peer.until(protocol.Welcome).offer_number
        peer.send(protocol.Joined(route="SharedMemory", self_test="0" * 16, offer_number=number))
        reason = peer.until(protocol.Refuse).reason
        with pytest.raises(JoinTimeout, match="rank 1: ") as raised:
            sender.step()
        assert reason in str(raised.value)


def test_one_that_will_say_hello_again_is_waited_for(patient, joined) -> None:
    config = patient()
    looks: list[None] = []

    def looking() -> dict[int, str]:
        looks.append(None)
        return {}

    with Sender(samples.mixed(0), config=config) as sender, ThreadPoolExecutor(1) as pool:
        with raw(config) as peer:
            peer.hello()
            number = peer.until(protocol.Welcome).offer_number
            peer.send(protocol.Differs(differences="joining failed", offer_number=number, retry=True))
            eventually(lambda: is_in(sender, 1, AgentState.REFUSED), "the failure is told")
        step = pool.submit(sender.step, absent=looking)
        eventually(lambda: len(looks) > 4 or step.done(), "the step waits")
        joined(config, 1)
        assert step.result(WAIT).complete


def test_one_that_is_turned_away_at_the_door_is_named_where_nobody_came(make_config) -> None:
    config = make_config(join_timeout_seconds=1)
    with Sender(samples.mixed(0), config=config) as sender, raw(config) as peer:
        peer.hello(name="other")
        peer.until(protocol.Refuse)
        said = r"within 1 s; rank 1: it never said hello; turned away: rank 1 of pod .* not of default/other"
        with pytest.raises(JoinTimeout, match=said):
            sender.step()  # the right one may still come, so it waits


class OneWorker:
    """An engine of one worker, in this process: real receivers, behind the two calls by which a trainer drives it."""

    def __init__(self, fails: str = "") -> None:
        self.receiver: Receiver | None = None
        self._fails = fails

    def collective_rpc(self, method: str, timeout: float | None, args: tuple[Any, ...]) -> list[Any]:
        del timeout
        if method == JOIN:
            request = JoinRequest.model_validate_json(args[0])
            assert request.config is not None
            assert request.first_rank is not None
            if not self._fails:
                self.receiver = Receiver(samples.blank(), config=request.config, rank=request.first_rank)
            return [WorkerReport(rank=request.first_rank, state="Starting", core=True).model_dump()]
        if method == STEP:
            if self.receiver is None:
                raise RuntimeError(self._fails)
            assert self.receiver.wait(WAIT) == 1
            return [WorkerReport(rank=self.receiver.identity.rank, state="Synced", step=1).model_dump()]
        if self.receiver is not None:
            self.receiver.close()
        return []


class AsyncOneWorker:
    def __init__(self, engine: OneWorker) -> None:
        self._engine = engine

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None,  # noqa: ASYNC109 - vLLM's own name
        args: tuple[Any, ...],
    ) -> list[Any]:
        return self._engine.collective_rpc(method, timeout, args)


def test_an_engine_whose_call_fails_is_the_reason_at_once(patient) -> None:
    config = patient()
    said = "rank 1: the engine: .*no memory is left"
    with Sender(samples.mixed(0), config=config) as sender:
        with (
            VllmEngine(OneWorker("no memory is left"), config=config) as engine,
            pytest.raises(JoinTimeout, match=said),
        ):
            engine.step(sender)
        failing = AsyncVllmEngine(AsyncOneWorker(OneWorker("no memory is left")), config=config)
        with pytest.raises(JoinTimeout, match=said):
            asyncio.run(failing.step(sender))


def test_an_engine_whose_call_fails_does_not_keep_the_others_from_their_step(patient) -> None:
    config = patient(receivers=2)
    with (
        Sender(samples.mixed(0), config=config) as sender,
        VllmEngine(OneWorker("no memory is left"), config=config, first_rank=1) as fails,
        VllmEngine(OneWorker(), config=config, first_rank=2) as works,
    ):
        with pytest.raises(TransportError, match="no memory is left"):
            step_all(sender, [fails, works])
        assert [(part.rank, part.state) for part in sender.report().steps[0].receivers] == [(2, AgentState.SYNCED)]
