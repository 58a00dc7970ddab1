"""In each vLLM worker: the receiver of this rank, driven by the engine core's calls. No other thread moves weights.

`sync_in(worker, ...)` is what the engine core sends to every worker; `WeightSyncExtension` is the same as a
`worker_extension_cls`, for engines in which the plugin can't run.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from weightsync_api.agent_config import ENV_RANK, AgentConfig
from weightsync_api.reports import Report

from ..deadline import Deadline
from ..digest import tensor_digests
from ..errors import Closed, ConfigError, StepTimeout, TransportError, ViewsRetained, WeightSyncError
from ..http import AgentServer
from ..identity import load_config
from ..receiver import Receiver
from . import vllm_versions as vllm
from .doorbell import Doorbell
from .vllm_model import VllmModel
from .vllm_target import VllmTarget

log = logging.getLogger("weightsync.vllm")

AGAIN_SECONDS = 1.0
"""A step within which tensors were found moved comes again that soon, under the next number."""


class JoinRequest(BaseModel):
    """How an engine's workers find their sender. Travels as JSON, so it holds no secret: keys stay in files."""

    model_config = ConfigDict(extra="forbid")

    config: AgentConfig | None = Field(
        default=None, description="The WeightSync's configuration; none: the file that WEIGHTSYNC_CONFIG names."
    )
    first_rank: int | None = Field(
        default=None, ge=1, description="Rank of the engine's first worker; none: WEIGHTSYNC_RANK, or 1."
    )
    timeout: float = Field(default=0.0, ge=0, description="Seconds to wait for the sender now; 0: at the first step.")
    layerwise: bool = Field(default=False, description="Go through the engine's loaders even where a plan is possible.")
    doorbell: str = Field(default="", max_length=64, description="Where to ring when something comes; empty: nowhere.")


class StepRequest(BaseModel):
    """One step, as every worker takes it."""

    model_config = ConfigDict(extra="forbid")

    timeout: float = Field(default=60.0, gt=0, description="Seconds to wait for the sender to begin the step.")


class WorkerReport(BaseModel):
    """What a worker says of itself."""

    model_config = ConfigDict(extra="forbid")

    rank: int
    state: str
    message: str = ""
    step: int = 0
    whole: bool = Field(default=True, description="False: its weights are mixed; nothing may be generated from them.")
    in_place: bool = Field(default=False, description="Weights go straight into the parameters, by the plan.")
    proven: bool = False
    reason: str = Field(default="", description="Why weights go through the engine's loaders; empty: they don't.")
    seconds: float = Field(default=0.0, description="What the step took in this worker, proof included.")
    reserved_bytes: int = Field(default=0, description="The worker's reserved memory, of a GPU's allocator.")
    core: bool = Field(default=False, description="The engine core pauses, resets and resumes by itself.")
    error: str = Field(default="", description="Why the call failed in this worker; empty: it did not.")
    version: str = ""


class LookReport(WorkerReport):
    """What a worker says when it is asked whether a step has begun."""

    begun: bool = Field(default=False, description="A step waits to be taken.")
    left: bool = Field(default=False, description="Its sender said goodbye since the last look.")
    report: Report | None = Field(default=None, description="As its receiver reports itself; none: it has not joined.")
    errors: dict[str, int] = Field(default_factory=dict, description="Its receiver's errors by kind.")


class WorkerSync:
    """One worker's end.

    Args:
        model: the worker's module.
        vllm_config: its VllmConfig, for ranks and for the loaders.
        device: where its weights are.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, device: torch.device, index: int) -> None:
        vllm.warn_once()
        self._model = VllmModel(model, vllm_config)
        # vLLM's may have no index
        self._device = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
        self._index = index
        self._request: JoinRequest | None = None
        self._receiver: Receiver | None = None
        self._target: VllmTarget | None = None
        self._server: AgentServer | None = None
        self._doorbell: Doorbell | None = None
        self._seconds = 0.0
        self._mixed = False

    # --- joining ------------------------------------------------------------------------------------------------

    def join(self, request: JoinRequest) -> WorkerReport:
        """Makes the receiver, anew where there was one. Raises ConfigError, and what its sender refuses it for."""
        self.close()
        self._request = request
        self._target = VllmTarget(self._model, self._device, layerwise=request.layerwise)
        self._receiver = self._new_receiver()
        deadline = Deadline(request.timeout)
        while not deadline.passed and self._receiver.state.state == "Starting":
            self._receiver.poll(min(0.05, deadline.remaining))
        return self.report()

    def _new_receiver(self) -> Receiver:
        assert self._request is not None
        assert self._target is not None
        config = self._request.config or load_config()
        first = self._request.first_rank
        if first is None:
            text = os.environ.get(ENV_RANK, "1")
            if not text.isdigit() or text == "0":
                raise ConfigError(f"{ENV_RANK} is {text!r}, not the rank of an engine's first worker")
            first = int(text)
        rank = first + self._index
        if config.curve_dir and not Path(config.curve_dir).is_dir():
            raise ConfigError(f"the keys' directory {config.curve_dir} is not there in the process of rank {rank}")
        receiver = Receiver(self._target, config=config, rank=rank, device=self._device)
        if self._request.doorbell:
            self._doorbell = Doorbell(receiver.descriptors, self._request.doorbell)
        if config.http and self._request.config is None:
            self._server = AgentServer(receiver, _shifted(config.http, self._index), rank)
        return receiver

    def look(self) -> LookReport:
        """Goes on with joining, and says whether a step has begun. No weights move, and nothing is waited for but a
        sender that is joined. Rings the doorbell for what comes later."""
        receiver, begun, left = self._receiver, False, False
        if receiver is None:
            return LookReport.model_validate(self.report().model_dump())
        try:
            begun = receiver.look()
        except Closed as goodbye:
            log.info("rank %d: %s; it waits for the next sender", receiver.identity.rank, goodbye)
            left = True
        except WeightSyncError as refusal:  # which its state tells
            log.error("rank %d: %s", receiver.identity.rank, refusal)
        if self._doorbell is not None and not begun:
            self._doorbell.arm()
        return LookReport(
            **self.report().model_dump(), begun=begun, left=left, report=receiver.report(), errors=dict(receiver.errors)
        )

    # --- a step -------------------------------------------------------------------------------------------------

    def step(self, request: StepRequest) -> WorkerReport:
        """Takes the next step in, and proves the plan at its first.

        Raises StepTimeout where no step began: nothing has changed. After any other error `report().whole` says
        whether the weights are mixed; they are then until a later step.
        """
        receiver, target = self._joined()
        began = time.perf_counter()
        deadline = Deadline(request.timeout)
        step, broken = None, receiver.broken
        try:
            while step is None:
                before = receiver.broken
                try:
                    step = receiver.poll(AGAIN_SECONDS if before != broken else min(deadline.remaining, 1.0))
                except Closed as goodbye:
                    log.info("rank %d: %s; it waits for the next sender", receiver.identity.rank, goodbye)
                if receiver.broken != before:
                    # Now, as it may come again at once: what the loaders hold of it is not to be of the next one too.
                    target.abandon()
                    if receiver.broken_by is ViewsRetained:
                        target.copy_all()
                elif step is None and (before != broken or deadline.passed):
                    break
        finally:
            if step is None:
                target.abandon()
                self._mixed |= receiver.state.state == "Tainted"
        if step is None:
            raise self._failure(receiver, request.timeout)
        target.pad()
        self._mixed = True
        if target.planned and not target.proven:
            self._prove(target)
        self._mixed = False
        self._seconds = time.perf_counter() - began
        return self.report()

    def _joined(self) -> tuple[Receiver, VllmTarget]:
        if self._receiver is None or self._target is None:
            self.join(self._request or JoinRequest())  # it left, as where a proof failed
        assert self._receiver is not None
        assert self._target is not None
        return self._receiver, self._target

    def _failure(self, receiver: Receiver, timeout: float) -> WeightSyncError:
        state = receiver.state
        if self._mixed:
            return TransportError(f"rank {state.rank}: {state.message}; generation waits for the next whole step")
        return StepTimeout(
            f"rank {state.rank}: no step began within {timeout:g} s "
            f"({state.state.value}: {state.message or 'joined'}); the engine keeps its weights"
        )

    def _prove(self, target: VllmTarget) -> None:
        """Once a join: on the step's own weights."""
        began = time.perf_counter()
        try:
            problem = target.prove(self._digests)
        except BaseException:
            target.abandon()
            self.close()
            raise
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the reload's temporary layers
        if not problem:
            log.info("the plan is proven by the engine's own reload, in %.2f s", time.perf_counter() - began)
            return
        log.warning("the plan is refused: %s; weights go through the engine's loaders from now on", problem)
        target.refuse(problem)
        self._rejoin()

    def _rejoin(self) -> None:
        """A new connection is a new Hello: the sender offers anew, and the target binds anew."""
        assert self._request is not None
        self._close_receiver()
        self._receiver = self._new_receiver()
        deadline = Deadline(5)
        while not deadline.passed and self._receiver.state.state == "Starting":
            self._receiver.poll(0.05)

    def _digests(self, tensors: Sequence[torch.Tensor]) -> bytes:
        if self._device.type == "cuda":
            from ..cuda.digest import DeviceDigest

            return DeviceDigest.of_tensors(tensors, self._device).bytes()
        return tensor_digests(tensors)

    # --- state and end ------------------------------------------------------------------------------------------

    def report(self) -> WorkerReport:
        receiver, target = self._receiver, self._target
        if receiver is None or target is None:
            return WorkerReport(
                rank=0,
                state="Starting",
                message="it was not told to join",
                whole=not self._mixed,
                version=vllm.version(),
            )
        state = receiver.state
        return WorkerReport(
            rank=state.rank,
            state=state.state.value,
            message=state.message,
            step=state.step,
            whole=not self._mixed,
            in_place=target.planned,
            proven=target.proven,
            reason=target.reason,
            seconds=self._seconds,
            reserved_bytes=torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0,
            version=vllm.version(),
        )

    def _close_receiver(self) -> None:
        if self._doorbell is not None:
            self._doorbell.close()
            self._doorbell = None
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def close(self) -> None:
        """Idempotent. The engine keeps its weights."""
        self._close_receiver()
        self._target = None


def _shifted(address: str, offset: int) -> str:
    """Each worker serves at a port of its own."""
    host, _, port = address.rpartition(":")
    return address if address.startswith("unix:") or not port.isdigit() else f"{host}:{int(port) + offset}"


def index_of(vllm_config: Any, rank: int) -> int:
    """A worker's place among all of the engine's, replicas of data parallelism included."""
    parallel = vllm_config.parallel_config
    replica = getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", 0)) or 0
    return int(replica) * int(parallel.world_size) + int(rank)


def sync_of(worker: Any) -> WorkerSync:
    """This worker's end, made at the first call. `worker`: vLLM's worker or the wrapper around it."""
    worker = getattr(worker, "worker", worker)
    backend = getattr(worker, "weight_transfer_engine", None)
    found = getattr(backend, "weightsync", None) or worker.__dict__.get("_weightsync")
    if isinstance(found, WorkerSync):
        return found
    sync = WorkerSync(
        worker.model_runner.get_model(), worker.vllm_config, worker.device, index_of(worker.vllm_config, worker.rank)
    )
    worker.__dict__["_weightsync"] = sync
    return sync


JOIN, STEP, STATE, CLOSE = "weightsync_join", "weightsync_step", "weightsync_state", "weightsync_close"
LOOK = "weightsync_look"
METHODS = (JOIN, LOOK, STEP, STATE, CLOSE)


def sync_in(worker: Any, method: str, request: str) -> dict[str, Any]:
    """Carries one call out in a worker. `request`: the method's request as JSON. Gives a WorkerReport as JSON has it.

    Never raises, but says in the report what failed, for `checked` where all answers are: vLLM stops reading them at
    the first worker that raised, and takes those of the others for the answers to later calls (multiproc_executor.py).
    """
    try:
        return _carried_out(worker, method, request).model_dump(mode="json")
    except Exception as error:
        text = str(error)
        if not isinstance(error, WeightSyncError):
            log.exception("%s failed", method)
            text = f"{type(error).__name__}: {text}"
        return WorkerReport(rank=0, state="", error=text or type(error).__name__).model_dump(mode="json")


def checked(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The reports of all workers. Raises TransportError with what the first one said that failed."""
    if why := next((report["error"] for report in reports if report["error"]), ""):
        raise TransportError(why)
    return reports


def _carried_out(worker: Any, method: str, request: str) -> WorkerReport:
    sync = sync_of(worker)
    try:
        if method == JOIN:
            return sync.join(JoinRequest.model_validate_json(request))
        if method == LOOK:
            return sync.look()
        if method == STEP:
            report = sync.step(StepRequest.model_validate_json(request))
            vllm.forget_adapters(getattr(worker, "worker", worker))
            return report
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ConfigError(f"{method}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if method == CLOSE:
        sync.close()
    return sync.report()


class WeightSyncExtension:
    """`worker_extension_cls="weightsync_agent.engines.vllm_worker.WeightSyncExtension"`.

    For engines whose plugins are switched off (VLLM_PLUGINS): the client then pauses and resets by calls of its own.
    """

    def weightsync_join(self, request: str) -> dict[str, Any]:
        return sync_in(self, JOIN, request)

    def weightsync_look(self, request: str) -> dict[str, Any]:
        return sync_in(self, LOOK, request)

    def weightsync_step(self, request: str) -> dict[str, Any]:
        return sync_in(self, STEP, request)

    def weightsync_state(self, request: str) -> dict[str, Any]:
        return sync_in(self, STATE, request)

    def weightsync_close(self, request: str) -> dict[str, Any]:
        return sync_in(self, CLOSE, request)
