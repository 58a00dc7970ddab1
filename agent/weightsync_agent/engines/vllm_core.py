"""In vLLM's engine core: pause, update, reset the prefix cache, resume and label, as one call.

The core's `collective_rpc` is taught the methods of vllm_worker.py: whoever can call it (`LLM`, `AsyncLLM`, the HTTP
route) drives a whole step in one round trip. A step that broke off leaves the scheduler paused until a whole one.
"""

from __future__ import annotations

import functools
import inspect
import logging
from concurrent.futures import Future
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import ConfigError
from . import vllm_versions as vllm
from .resumed_word import NAME_PATTERN, WordWriter
from .vllm_worker import METHODS, STATE, STEP, StepRequest, checked, sync_in

log = logging.getLogger("weightsync.vllm")

Pause = Literal["keep", "abort", "wait", "none"]


class CoreStepRequest(BaseModel):
    """One step of a whole engine."""

    model_config = ConfigDict(extra="forbid")

    timeout: float = Field(default=60.0, gt=0, description="Seconds to wait for the sender to begin the step.")
    pause: Pause = Field(
        default="keep",
        description="What becomes of running requests. keep: they go on afterwards, their keys and values computed "
        "anew with the new weights where the cache is reset. abort: they end as aborted. wait: they end before the "
        "step begins. none: they go on over keys and values of both weights.",
    )
    reset_prefix_cache: bool = Field(default=True, description="Forget keys and values of the old weights.")
    label: str = Field(default="", max_length=256, description="The weight version afterwards; empty: the step.")
    resumed: str = Field(
        default="",
        pattern=NAME_PATTERN,
        description="A file of the trainer's in /dev/shm, in which the step's number is written once the engine goes "
        "on with it; empty: none.",
    )


def install() -> None:
    """Teaches this process' engine core the methods. Idempotent. Raises ConfigError where a hook is missing."""
    core = vllm.core_class()
    original = core.collective_rpc
    if getattr(original, "_weightsync", False):
        return

    @functools.wraps(original)
    def collective_rpc(
        self: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not isinstance(method, str) or method not in METHODS:
            return original(self, method, timeout, args, kwargs)
        request = str((kwargs or {}).get("request", args[0] if args else "{}"))
        if method != STEP:
            reports = checked(original(self, sync_in, timeout, (method, request)))
            return [{**report, "core": True} for report in reports]
        return CoreStep(self, original, timeout).run(request)

    # vLLM looks it up at each call, which takes a third of the time here.
    collective_rpc.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    collective_rpc._weightsync = True  # type: ignore[attr-defined]
    core.collective_rpc = collective_rpc


class CoreStep:
    """One step in one engine core."""

    def __init__(self, core: Any, call: Any, timeout: float | None) -> None:
        self._core = core
        self._call = call
        self._timeout = timeout

    def run(self, text: str) -> Any:
        """The workers' reports, or a Future of them while requests drain. Raises ConfigError, and what workers do."""
        try:
            request = CoreStepRequest.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise ConfigError(f"{STEP}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        core = self._core
        # Paused by somebody else: stays paused afterwards. By a step that waits or broke off: resumed by a whole one.
        held = core.is_scheduler_paused() and not getattr(core, "_weightsync_paused", False)
        core._weightsync_call = self
        if request.pause == "none":
            return self._update(request, held)
        if held:
            if request.reset_prefix_cache:
                core._reset_caches() if hasattr(core, "_reset_caches") else core.reset_prefix_cache(True)
            return self._update(request, held)
        core._weightsync_paused = True
        waiting = core.pause_scheduler(mode=request.pause, clear_cache=request.reset_prefix_cache)
        if waiting is None:
            return self._update(request, held)
        done: Future[Any] = Future()

        def drained(future: Future[Any]) -> None:
            try:
                future.result()
                if core._weightsync_call is not self:
                    # Whoever made this call gave it up while requests ended, and asked again.
                    raise ConfigError("a later call takes the step that this one was for")
                done.set_result(self._update(request, held))
            except Exception as error:
                done.set_exception(error)

        waiting.add_done_callback(drained)
        return done

    def _update(self, request: CoreStepRequest, held: bool) -> list[dict[str, Any]]:
        core = self._core
        workers = StepRequest(timeout=request.timeout).model_dump_json()
        try:
            reports = checked(self._call(core, sync_in, self._timeout, (STEP, workers)))
        except Exception as error:
            self._after_failure(held, error)
            raise
        steps = {report["step"] for report in reports}
        vllm.set_label(core, request.label or str(max(steps, default=0)))
        if not held:
            self._resume()
        if request.resumed and len(steps) == 1:
            _writer(core).write(request.resumed, *steps)
        return [{**report, "core": True} for report in reports]

    def _after_failure(self, held: bool, error: Exception) -> None:
        """Generation goes on where every worker still holds whole weights, and waits otherwise."""
        core = self._core
        try:
            states = checked(self._call(core, sync_in, self._timeout, (STATE, "{}")))
            # One at the new step and one at the old are two policies.
            mixed = not all(report["whole"] for report in states) or len({report["step"] for report in states}) > 1
        except Exception:
            mixed = True
        if mixed:
            core._weightsync_paused = not held
            core.pause_scheduler(mode="keep", clear_cache=False)
            log.error("generation is paused until a whole step: the weights of this engine are mixed (%s)", error)
        elif not held:
            self._resume()

    def _resume(self) -> None:
        self._core._weightsync_paused = False
        self._core.resume_scheduler()


def _writer(core: Any) -> WordWriter:
    """This core's, made at the first step whose trainer looks at a word."""
    if not isinstance(found := getattr(core, "_weightsync_word", None), WordWriter):
        found = core._weightsync_word = WordWriter()
    return found
