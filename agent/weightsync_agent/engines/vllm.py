"""vLLM from the trainer's side: `VllmEngine(llm)` for an `LLM`, `AsyncVllmEngine` for an `AsyncLLM`, or a server's URL.

    with Sender(model, config=config, adopt=True) as sender:
        engine = VllmEngine("http://127.0.0.1:8000", config=config)
        report = engine.step(sender)

`step` drives both ends: the engine's workers wait for the step while the sender sends it, within one call of the
engine, which pauses, resets the prefix cache and resumes around it. Nothing of vLLM is imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field
from weightsync_api.agent_config import AgentConfig
from weightsync_api.reports import StepReport

from ..errors import ConfigError, TransportError
from ..sender import Sender
from . import vllm_versions as vllm
from .resumed_word import ResumedWord
from .vllm_core import CoreStepRequest, Pause
from .vllm_http import HttpEngine
from .vllm_worker import CLOSE, JOIN, LOOK, STATE, STEP, JoinRequest, LookReport, StepRequest, WorkerReport, checked

log = logging.getLogger("weightsync.vllm")

ANSWER_SECONDS = 120.0
"""How long an engine may take beyond a step: draining, the proof at the first step, its own reload."""


class StepOptions(BaseModel):
    """How an engine takes a step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pause: Pause = Field(default="keep", description="What becomes of running requests: keep, abort, wait or none.")
    reset_prefix_cache: bool = Field(default=True, description="Forget keys and values of the old weights.")
    timeout: float = Field(default=60.0, gt=0, description="Seconds to wait for the sender to begin a step.")

    @classmethod
    def of(cls, config: AgentConfig) -> Self:
        """As spec.receivers.engine says."""
        return cls.model_validate(
            {"pause": config.engine.pause.value.lower(), "reset_prefix_cache": config.engine.reset_prefix_cache}
        )


class Engine(Protocol):
    """What of `vllm.LLM` is used."""

    def collective_rpc(self, method: str, timeout: float | None, args: tuple[Any, ...]) -> list[Any]: ...


class AsyncEngine(Protocol):
    """What of vLLM's `AsyncLLM` is used."""

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None,  # noqa: ASYNC109 - vLLM's own name
        args: tuple[Any, ...],
    ) -> list[Any]: ...


class VllmEngine:
    """One vLLM engine, as the trainer drives it.

    Args:
        engine: a `vllm.LLM`, an `HttpEngine`, or the URL of a server.
        config: what its workers join with; None: the file that WEIGHTSYNC_CONFIG names in their own processes.
        first_rank: the rank of its first worker; a tensor-parallel engine takes one rank a worker from here on.
        options: pause and cache; None: as spec.receivers.engine of the sender's WeightSync says.
        layerwise: go through the engine's loaders even where a plan is possible.
        doorbell: the name of a Bell that its workers ring when something comes for them (see doorbell.py).
    """

    def __init__(
        self,
        engine: Engine | str,
        *,
        config: AgentConfig | None = None,
        first_rank: int | None = 1,
        options: StepOptions | None = None,
        layerwise: bool = False,
        doorbell: str = "",
    ) -> None:
        self._engine: Any = HttpEngine(engine) if isinstance(engine, str) else engine
        self.options = options
        self._join = JoinRequest(config=config, first_rank=first_rank, layerwise=layerwise, doorbell=doorbell)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weightsync-vllm")
        self._taken: Future[list[WorkerReport]] | None = None
        self._joined = False
        self._core = True
        self._words = True
        self._word: ResumedWord | None = None
        self._worded: Future[list[WorkerReport]] | None = None
        self._unread: Future[list[WorkerReport]] | None = None
        self._reports: list[WorkerReport] = []
        self.ranks: tuple[int, ...] = ()
        """Of its workers, once they were made receivers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def reports(self) -> list[WorkerReport]:
        """What each worker said after the last step that it took. Raises TransportError as `settle` does."""
        self.settle()
        return self._reports

    def settle(self) -> None:
        """Reads the answer to the last step, which its engine may go on before: at the next step at the latest.

        Raises TransportError, once, where there is none or it tells of an error: the engine ended just then, say.
        """
        unread, self._unread = self._unread, None
        if unread is None:
            return
        try:
            self._reports = unread.result(ANSWER_SECONDS)
        except TimeoutError:
            raise TransportError(
                f"the engine went on with the last step and gave no answer within {ANSWER_SECONDS:g} s: is it alive?"
            ) from None

    def conclude(self, call: Future[list[WorkerReport]], step: int, seconds: float) -> None:
        """Waits until the engine goes on with `step`, which its sender completed; `call`: what `begin` gave.

        Raises TransportError for what the engine could not do, and TimeoutError after `seconds`.
        """
        word = self._word if call is self._worded else None
        if word is not None and word.awaited(step, call.done):
            self._unread = call
            return
        self._reports = call.result(seconds)
        if word is not None and not word.says(step):
            word.close()  # an engine core that can't open it, as in another container
            self._words = False
            self._word = None

    def join(self) -> list[WorkerReport]:
        """Makes each worker's receiver. They reach the sender at the first step. Again: makes them anew.

        Raises ConfigError where the engine has not got this package, or TransportError.
        """
        reports = self._call(JOIN, self._join.model_dump_json(), 120.0)
        self._joined, self.ranks = True, tuple(report.rank for report in reports)
        self._core = all(report.core for report in reports)
        if not self._core and not (isinstance(self._engine, HttpEngine) or hasattr(self._engine, "reset_prefix_cache")):
            raise ConfigError("this engine can't reset its prefix cache: VLLM_PLUGINS has to name weightsync")
        return reports

    def step(self, sender: Sender) -> StepReport:
        """One step of the sender and of this engine; both are done when it returns. Raises what `Sender.step` does,
        and TransportError for what the engine could not do. The engine's next step heals both.
        An `LLM`'s answer may still be on its way then: `reports` waits for it, and so does the next step.
        """
        return step_all(sender, [self])

    def begin(self, config: AgentConfig | None = None, after: int | None = None) -> Future[list[WorkerReport]]:
        """Asks the engine to take the next step; its result is there once the engine goes on. For `step_all`.

        `config`: the sender's, for options that were not given. `after`: the number of the last step that it began.
        A call that still waits, as its step failed at the sender, may take a later one itself: this gives its result.
        """
        self.settle()
        if not self._joined:
            self.join()
        earlier = None if self._taken is None or self._taken.done() else self._taken
        options, seconds = self._options(config)
        sent = self._send(options) if earlier is None and self._core else None
        self._taken = sent or self._pool.submit(self._take_after, earlier, after, options, seconds)
        return self._taken

    def _send(self, options: StepOptions) -> Future[list[WorkerReport]] | None:
        """From the caller's thread, which the sender keeps busy from now on: another one would wait for its turn to
        send for as long as the engine then takes. None: this engine can't be asked so.
        """
        taken: Future[list[WorkerReport]] = Future()
        word = self._cleared_word()
        self._worded = None if word is None else taken
        try:
            request = _core_request(options, word.name if word else "")
            answer = vllm.send_call(self._engine, STEP, (request,))
        except Exception as error:  # other engines may have been asked: it is told as if this one had answered so
            taken.set_exception(TransportError(f"the engine was not reached with {STEP}: {_cause(error)}"))
            return taken
        if answer is None:
            return None

        def answered(answer: Future[Any]) -> None:
            try:
                taken.set_result(_reports(_answered(STEP, answer.result)))
            except Exception as error:
                taken.set_exception(error)

        answer.add_done_callback(answered)
        return taken

    def _cleared_word(self) -> ResumedWord | None:
        """Nobody writes into it now: no earlier call is on its way. None: where an answer has to do."""
        if self._word is None:
            if not self._words or not vllm.one_core(self._engine):
                return None
            try:
                self._word = ResumedWord()
            except TransportError as error:
                self._words = False
                log.info("steps are over once their answers are there: %s", error)
                return None
        self._word.clear()
        return self._word

    def _take_after(
        self,
        earlier: Future[list[WorkerReport]] | None,
        after: int | None,
        options: StepOptions,
        seconds: float | None,
    ) -> list[WorkerReport]:
        # Waits for the earlier call: an engine takes one at a time.
        if earlier is not None and after is not None and earlier.exception() is None:
            reports = earlier.result()
            if _beyond(reports, after):
                return reports
        return self._take(options, seconds)

    def look(self) -> list[LookReport]:
        """Whether a step has begun, and what else each worker says; goes on with joining. Raises TransportError."""
        return [LookReport.model_validate(report) for report in self._rpc(LOOK, "{}", None)]

    def take(self) -> list[WorkerReport]:
        """Takes the next step, in this thread: for whoever does not drive the sender. Raises TransportError."""
        self.settle()
        self._reports = self._take(*self._options(None))
        return self._reports

    def _options(self, config: AgentConfig | None) -> tuple[StepOptions, float | None]:
        """And how many seconds a server may take to answer, which is never less than the step may."""
        config = config or self._join.config
        options = self.options or (StepOptions.of(config) if config else StepOptions())
        if config is None or not isinstance(self._engine, HttpEngine):
            return options, None
        return options, options.timeout + config.step_timeout_seconds + ANSWER_SECONDS

    def _take(self, options: StepOptions, seconds: float | None) -> list[WorkerReport]:
        if self._core:
            return self._call(STEP, _core_request(options), seconds)
        return self._take_alone(options, seconds)

    def _take_alone(self, options: StepOptions, seconds: float | None) -> list[WorkerReport]:
        """Where the engine core was not taught: by calls of vLLM's own."""
        http_engine = self._engine if isinstance(self._engine, HttpEngine) else None
        if http_engine is not None and options.pause != "none":
            http_engine.pause(options.pause)
        reports = self._call(STEP, StepRequest(timeout=options.timeout).model_dump_json(), seconds)
        # Not after a failure: generating from mixed weights, or from layers that are not there, is worse than waiting.
        if options.reset_prefix_cache:
            self._engine.reset_prefix_cache()
        if http_engine is not None and options.pause != "none":
            http_engine.resume()
        return reports

    def state(self) -> list[WorkerReport]:
        """What each worker says of itself."""
        return self._call(STATE, "{}", 30.0)

    def _call(self, method: str, request: str, timeout: float | None) -> list[WorkerReport]:
        return _reports(self._rpc(method, request, timeout))

    def _rpc(self, method: str, request: str, timeout: float | None) -> list[Any]:
        return _answered(method, lambda: self._engine.collective_rpc(method, timeout, (request,)))

    def close(self, timeout: float = 10.0) -> None:
        """The workers leave their sender and keep their weights. Never raises for an engine that is gone."""
        try:
            self.settle()
        except TransportError as error:
            log.error("the last step's answer: %s", error)
        if self._word is not None:
            self._word.close()
            self._word = None
        if self._joined:
            self._joined = False
            with contextlib.suppress(ConfigError, TransportError):
                self._call(CLOSE, "{}", timeout)
        self._pool.shutdown(wait=False, cancel_futures=True)


def step_all(sender: Sender, engines: Sequence[VllmEngine]) -> StepReport:
    """One step for several engines at once. Raises what the sender raises, else the first engine's TransportError."""
    for engine in engines:
        engine.settle()  # before any is asked: what one of them failed with meanwhile is raised here
    taken = [engine.begin(sender.config, sender.begun) for engine in engines]

    def absent() -> dict[int, str]:
        return {rank: why for engine, call in zip(engines, taken, strict=True) if (why := _failure(call))
                for rank in engine.ranks}  # fmt: skip

    try:
        report = sender.step(absent=absent)
    except BaseException as error:
        for call in taken:
            # Why an engine failed tells more than that it did not acknowledge.
            if why := _failure(call):
                error.add_note(why)
        raise
    for engine, future in zip(engines, taken, strict=True):
        engine.conclude(future, report.step, sender.config.step_timeout_seconds + ANSWER_SECONDS)
    return report


class AsyncVllmEngine:
    """As VllmEngine, for vLLM's `AsyncLLM` in this event loop."""

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        config: AgentConfig | None = None,
        first_rank: int | None = 1,
        options: StepOptions | None = None,
        layerwise: bool = False,
    ) -> None:
        self._engine = engine
        self.options = options
        self._join = JoinRequest(config=config, first_rank=first_rank, layerwise=layerwise)
        self._taken: asyncio.Future[list[WorkerReport]] | None = None
        self._joined = False
        self._ranks: tuple[int, ...] = ()

    async def join(self) -> list[WorkerReport]:
        """As VllmEngine.join."""
        reports = await self._call(JOIN, self._join.model_dump_json())
        if not all(report.core for report in reports):
            raise ConfigError("the engine core was not taught a step: VLLM_PLUGINS has to name weightsync")
        self._joined, self._ranks = True, tuple(report.rank for report in reports)
        return reports

    async def step(self, sender: Sender) -> StepReport:
        """As VllmEngine.step; the sender works in a thread meanwhile."""
        if not self._joined:
            await self.join()
        request = _core_request(self.options or StepOptions.of(sender.config))
        earlier = None if self._taken is None or self._taken.done() else self._taken
        taken = self._taken = asyncio.ensure_future(self._take_after(earlier, sender.begun, request))

        def absent() -> dict[int, str]:
            return dict.fromkeys(self._ranks, why) if (why := _failure(taken)) else {}

        try:
            report = await asyncio.to_thread(sender.step, absent=absent)
        except BaseException as error:
            if why := _failure(taken):
                error.add_note(why)
            taken.add_done_callback(lambda future: future.cancelled() or future.exception())
            raise
        await taken
        return report

    async def _take_after(
        self, earlier: asyncio.Future[list[WorkerReport]] | None, after: int, request: str
    ) -> list[WorkerReport]:
        """As VllmEngine's."""
        if earlier is not None:
            await asyncio.wait([earlier])
            if not earlier.cancelled() and earlier.exception() is None and _beyond(earlier.result(), after):
                return earlier.result()
        return await self._call(STEP, request)

    async def state(self) -> list[WorkerReport]:
        return await self._call(STATE, "{}")

    async def close(self) -> None:
        """As VllmEngine.close."""
        self._joined = False
        await self._call(CLOSE, "{}")

    async def _call(self, method: str, request: str) -> list[WorkerReport]:
        try:
            found = checked(await self._engine.collective_rpc(method, None, (request,)))
        except Exception as error:
            raise TransportError(f"the engine answered {method} with: {_cause(error)}") from error
        return _reports(found)


def _core_request(options: StepOptions, resumed: str = "") -> str:
    return CoreStepRequest(
        timeout=options.timeout, pause=options.pause, reset_prefix_cache=options.reset_prefix_cache, resumed=resumed
    ).model_dump_json(exclude=None if resumed else {"resumed"})  # which an older engine does not know


def _answered(method: str, answer: Callable[[], list[Any]]) -> list[Any]:
    """What the workers said. Raises ConfigError, TransportError."""
    try:
        return checked(answer())
    except (ConfigError, TransportError):
        raise
    except Exception as error:
        raise TransportError(f"the engine answered {method} with: {_cause(error)}") from error


def _reports(found: Sequence[Any]) -> list[WorkerReport]:
    return [WorkerReport.model_validate(report) for report in found]


def _beyond(reports: Sequence[WorkerReport], step: int) -> bool:
    """Whether all workers hold a later step."""
    return min((report.step for report in reports), default=0) > step


def _failure(call: Future[Any] | asyncio.Future[Any]) -> str:
    """Why the call of an engine failed; empty: it has not, or not yet."""
    cause = call.exception() if call.done() and not call.cancelled() else None
    return "" if cause is None else f"the engine: {cause or type(cause).__name__}"


def _cause(error: Exception) -> str:
    text = str(error)
    if "has no attribute" in text and "weightsync" in text:
        return (
            f"{text}. Is weightsync installed in the engine's environment, and not left out by VLLM_PLUGINS? "
            "worker_extension_cls=weightsync_agent.engines.vllm_worker.WeightSyncExtension works without plugins"
        )
    return text or type(error).__name__
