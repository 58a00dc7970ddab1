"""A step is over for the trainer once its engine goes on, and the engine's answer is read later.

The engine core's step and the trainer's end are real, and so is the shared memory; vLLM's client is a stand-in that
answers when it is told to.
"""

from __future__ import annotations

import sys
import types
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError
from weightsync_agent.engines.resumed_word import ResumedWord, WordWriter
from weightsync_agent.engines.shared_file import FOLDER, SharedFile
from weightsync_agent.engines.vllm import VllmEngine, step_all
from weightsync_agent.engines.vllm_core import CoreStep, CoreStepRequest
from weightsync_agent.engines.vllm_worker import STEP, WorkerReport
from weightsync_agent.errors import TransportError
from weightsync_api.agent_config import AgentConfig
from weightsync_api.reports import StepReport


class Core:
    """What of vLLM's engine core a step needs. `fails`: what its worker says of the next step."""

    def __init__(self) -> None:
        self.step, self.fails, self.paused = 0, "", False

    def is_scheduler_paused(self) -> bool:
        return self.paused

    def pause_scheduler(self, mode: str, clear_cache: bool) -> None:
        self.paused = True

    def resume_scheduler(self) -> None:
        self.paused = False

    def collective_rpc(self, _function: Any, _timeout: float | None, args: tuple[str, str]) -> list[dict[str, Any]]:
        if args[0] == STEP:
            self.step += 1
        error = self.fails if args[0] == STEP else ""
        return [WorkerReport(rank=1, state="Synced", step=self.step, error=error).model_dump(mode="json")]


class Client:
    """vLLM's client of one engine core: carries a call out at once, and answers at `answer`."""

    is_dp = False

    def __init__(self, core: Core) -> None:
        self.core, self.core_engines = core, [b"0"]
        self.utility_results: dict[int, Future[Any]] = {}
        self.unsent: tuple[Future[Any], Any] | None = None

    def _send_input(self, _kind: object, call: tuple[int, int, str, tuple[Any, ...]]) -> None:
        future = self.utility_results.pop(call[1])
        found: Any
        try:
            found = CoreStep(self.core, Core.collective_rpc, None).run(call[3][2][0])
        except TransportError as error:
            found = error
        self.unsent = (future, found)

    def answer(self, error: Exception | None = None) -> None:
        assert self.unsent is not None
        (future, found), self.unsent = self.unsent, None
        failed = error or (found if isinstance(found, Exception) else None)
        if failed is not None:
            future.set_exception(failed)
        else:
            future.set_result(found)


class Llm:
    def __init__(self) -> None:
        self.core = Core()
        self.client = Client(self.core)
        self.llm_engine = types.SimpleNamespace(engine_core=self.client)

    def collective_rpc(self, _method: str, _timeout: float | None, _args: tuple[Any, ...]) -> list[Any]:
        return [WorkerReport(rank=1, state="Starting", core=True).model_dump(mode="json")]

    def reset_prefix_cache(self) -> None:
        raise AssertionError("the engine core does it")


class Trainer:
    """A sender whose receivers have all acknowledged."""

    def __init__(self, llm: Llm, *, answered: bool) -> None:
        self.config = AgentConfig.model_validate(
            {
                "namespace": "default", "name": "word", "device": "CPU", "transport": "IPC", "receivers": 1,
                "bind": "ipc:///nowhere", "connect": "ipc:///nowhere", "runtimeDir": "/nowhere",
            }
        )  # fmt: skip
        self.begun, self._llm, self._answered = 0, llm, answered

    def step(self, *, absent: Any) -> StepReport:
        del absent
        self.begun += 1
        if self._answered:
            self._llm.client.answer()
        return StepReport(
            step=self.begun, started_at=datetime.now(UTC), duration_microseconds=1, bytes=0, complete=True
        )


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Llm:
    module: Any = types.ModuleType("vllm.v1.engine.core_client")
    module.SyncMPClient, module.EngineCoreRequestType = Client, types.SimpleNamespace(UTILITY=b"3")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Llm()


def files() -> set[str]:
    return {path.name for path in FOLDER.glob("weightsync_resumed_*")}


def test_a_step_is_over_before_its_answer_and_reports_are_those_of_the_step(llm: Llm) -> None:
    before = files()
    trainer: Any = Trainer(llm, answered=False)
    with VllmEngine(llm) as engine:
        for number in (1, 2):
            assert step_all(trainer, [engine]).step == number  # nothing has been answered
            assert not llm.core.paused
            llm.client.answer()
            assert [report.step for report in engine.reports] == [number]
        assert files() <= before, "the name is there no longer than until the engine has the memory"


def test_a_step_that_fails_in_the_engine_does_not_count_as_resumed(llm: Llm) -> None:
    trainer: Any = Trainer(llm, answered=True)
    with VllmEngine(llm) as engine:
        step_all(trainer, [engine])
        llm.core.fails = "no memory is left"
        with pytest.raises(TransportError, match="no memory is left"):
            step_all(trainer, [engine])
        assert [report.step for report in engine.reports] == [1]
        llm.core.fails = ""
        step_all(trainer, [engine])
        assert [report.step for report in engine.reports] == [3]


@pytest.mark.parametrize("when", ["read", "next step"])
def test_an_answer_that_fails_after_the_engine_went_on_is_raised_once(llm: Llm, when: str) -> None:
    trainer: Any = Trainer(llm, answered=False)
    with VllmEngine(llm) as engine:
        step_all(trainer, [engine])
        llm.client.answer(RuntimeError("the engine has died"))
        with pytest.raises(TransportError, match="the engine has died"):
            assert engine.reports if when == "read" else step_all(trainer, [engine])
        step_all(trainer, [engine])
        llm.client.answer()
        assert engine.reports[0].step == 2


def test_a_word_says_its_step_alone() -> None:
    word, writer = ResumedWord(), WordWriter()
    writer.write(word.name, 4)
    assert not word.says(3)
    assert not word.awaited(5, lambda: True)
    assert word.awaited(4, lambda: False)
    word.clear()
    assert not word.says(0)
    assert not word.says(4)


def test_an_engine_core_writes_into_no_other_file() -> None:
    other = SharedFile.create(8, "weightsync_other")
    try:
        for name in (other.name, "../etc/passwd", "weightsync_resumed_"):
            with pytest.raises(ValidationError):
                CoreStepRequest(resumed=name)
    finally:
        other.close()


def test_an_engine_core_without_the_file_goes_on() -> None:
    WordWriter().write("weightsync_resumed_" + "0" * 32, 1)
