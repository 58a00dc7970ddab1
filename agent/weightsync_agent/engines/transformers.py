"""An engine of transformers: a live model that a Receiver writes into between two requests, behind an HTTP endpoint.

    python -m weightsync_agent.engines.transformers --model DIR

runs as a receiver of `weightsync run` or of the operator. It serves as soon as it holds a whole step, and no request
sees a mixture: one thread generates and takes steps in, one after the other. A step that breaks off leaves the engine
not ready, and requests get 503 with the reason, until a later step is whole.
"""

from __future__ import annotations

import logging
import queue
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from weightsync_api.reports import AgentState

from .. import parent, runtime
from ..errors import Closed
from ..main import guarded
from ..receiver import Receiver
from ..stop import Stopped, stop_on_signals
from .completion_server import CompletionServer, Health
from .completions import Completion, CompletionRequest, Refusal
from .generation import Generator
from .transformers_model import ModelTarget, live_model

log = logging.getLogger("weightsync.engine")

TICK_SECONDS = 0.01
"""Longest that an idle engine lets a request wait, while it listens for a step."""

MAX_QUEUED = 256
STUCK_SECONDS = 600.0
"""An engine whose thread has not come round for this long is not alive: no request takes as long."""


@dataclass
class _Job:
    request: CompletionRequest
    prompts: list[list[int]]
    done: Future[Completion]


class TransformersEngine:
    """Serves completions of a live model and keeps its weights at the sender's last step.

    `run` drives it, in the thread that calls it. Everything else is for other threads.
    """

    def __init__(self, generator: Generator, receiver: Receiver) -> None:
        self._generator = generator
        self._receiver = receiver
        self._jobs: queue.Queue[_Job] = queue.Queue(MAX_QUEUED)
        self._round = time.monotonic()
        self._health = self._look()
        self.left = False
        """Its sender has said goodbye."""

    # --- other threads ------------------------------------------------------------------------------------------

    def submit(self, request: CompletionRequest) -> Future[Completion]:
        """Queues a request. Raises Refusal where it is bad, the engine is not ready, or too many wait."""
        prompts = self._generator.check(request)
        if not self._health.ready:
            raise _unready(self._health)
        job = _Job(request, prompts, Future())
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise Refusal(429, "overloaded", f"{MAX_QUEUED} requests wait already: ask again later") from None
        return job.done

    def health(self) -> Health:
        """As it was between the last two requests or steps."""
        alive = time.monotonic() - self._round < STUCK_SECONDS
        return self._health.model_copy(update={"alive": alive, "queued": self._jobs.qsize()})

    # --- the engine's thread ------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Generates and takes steps in until `until()`, checked between two of them.

        Raises ManifestMismatch, Refused and SelfTestFailed where this engine can't join its sender.
        """
        while not until():
            self._round = time.monotonic()
            self._take_step(TICK_SECONDS if self._jobs.empty() else 0)
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                continue
            self._serve(job)

    def _take_step(self, timeout: float) -> None:
        try:
            step = self._receiver.poll(timeout)
        except Closed as goodbye:
            log.info("%s; the engine serves step %d and waits for the next sender", goodbye, self._receiver.step)
            step, self.left = None, True
        before, self._health = self._health, self._look()
        if step is not None:
            log.info("rank %d serves step %d", self._receiver.identity.rank, step)
        elif before.ready and not self._health.ready:
            log.warning("rank %d serves nothing until the next whole step: %s", self._receiver.identity.rank,
                        self._health.reason)  # fmt: skip

    def _look(self) -> Health:
        state = self._receiver.state
        ready = state.state == AgentState.SYNCED  # it stays so when the sender leaves: the last step is whole still
        return Health(
            ready=ready,
            step=state.step,
            state=state.state.value,
            reason="" if ready else state.message or "it holds no whole step yet",
            model=self._generator.name,
        )

    def _serve(self, job: _Job) -> None:
        if not job.done.set_running_or_notify_cancel():
            return  # who asked is gone
        if not self._health.ready:
            job.done.set_exception(_unready(self._health))
            return
        try:
            job.done.set_result(self._generator.complete(job.request, job.prompts, self._health.step))
        except Exception as error:  # whatever a model or a tokenizer raises: the next request may be a better one
            if not isinstance(error, Refusal):
                log.exception("a request failed")
            job.done.set_exception(error)


def _unready(health: Health) -> Refusal:
    return Refusal(503, "not_ready", f"the engine holds no whole step: {health.reason}")


def _tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, or None: prompts are token ids then."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    return AutoTokenizer.from_pretrained(folder)


def serve(folder: Path, dtype: str, device: str, host: str, port: int, name: str, max_tokens: int) -> int:
    """Runs the engine until `Stopped` is raised. Raises ConfigError, and what `TransformersEngine.run` raises."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = live_model(folder, getattr(torch, dtype), where)
    generator = Generator(model, _tokenizer(folder), name or folder.name, max_tokens)
    with Receiver.from_env(target=ModelTarget(model), device=where) as receiver:
        engine = TransformersEngine(generator, receiver)
        server = CompletionServer(engine, host, port)
        log.info("rank %d: %s at http://%s, ready once it holds a step", receiver.identity.rank, generator.name,
                 server.address)  # fmt: skip
        try:
            # A pod waits for the next sender; a local run is over when its sender is.
            engine.run(until=lambda: engine.left and parent.bound())
        finally:
            server.close()
    return 0


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option(
    "--model",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="Folder with config.json and tokenizer. Weights in it are not read: they come from the sender.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    help="The weights' data type; the sender's must be the same.",
)
@click.option("--device", default="", help="Such as cuda:0 or cpu; empty: the GPU that there is.")
@click.option("--host", default="0.0.0.0", help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="Port to listen at; 0: a free one.")
@click.option("--name", default="", help="The model's name in requests; empty: the folder's.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=1024,
    help="Most new tokens of a request. A step waits for the request that runs.",
)
def main(
    folder: Path, dtype: str, device: str, host: str, port: int, name: str, max_tokens: int
) -> None:  # fmt: skip
    """Serves a transformers model whose weights follow a WeightSync, as one of its receivers."""

    def run() -> int:
        stop_on_signals()
        try:
            return serve(folder, dtype, device, host, port, name, max_tokens)
        except Stopped:
            runtime.detach(linger=False)
            raise

    sys.exit(guarded(run))


if __name__ == "__main__":
    main()
