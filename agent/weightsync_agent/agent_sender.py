"""The agent's own sender: a synthetic or checkpoint source, sent at the spec's pace."""

from __future__ import annotations

import logging
import time

import psutil
import torch
from weightsync_api.agent_config import AgentConfig
from weightsync_api.quantity import format_bytes, format_delta
from weightsync_api.reports import StepReport
from weightsync_api.v1alpha1.spec import Device

from . import parent
from .deadline import Deadline
from .errors import ConfigError, JoinTimeout, SourceError, StepFailed
from .identity import load_config
from .runtime import attach
from .sender import Sender
from .sources import Source, open_source
from .step_log import lacks_a_step
from .stop import Stopped
from .transport import make_arena

log = logging.getLogger("weightsync.agent.sender")

LOOK_SECONDS = 1.0
"""How often a wait for new weights is left to see whether a receiver lacks the last ones."""
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0
"""After a failed step the same weights are sent again: soon, then less and less often."""


def run_sender() -> int:
    """Sends until the spec's count is reached, the source has finished, or `Stopped` is raised.

    A local run's sender then says goodbye and ends; a pod's goes on serving its last report, and brings receivers that
    come late up to date. Gives 0, or 1 where the last step did not reach every receiver. Raises ConfigError,
    SourceError.
    """
    config = load_config()
    if config.source is None or config.source.trainer is not None:
        raise ConfigError(
            "spec.sender.source is trainer, so the weights are the trainer's: give spec.sender.template a container "
            "whose command calls Sender.from_env(source=model)"
        )
    source = open_source(config.source)
    device = device_of(config)
    _check_memory(source, device)
    arena = make_arena(device, source.manifest.arena_bytes)
    sender = Sender(source.attach(arena.tensor()), config=config, arena=arena)
    try:
        attach(sender)
        log.info(
            "rank 0 sends %d tensors, %s, of WeightSync %s/%s",
            len(source.manifest.tensors), format_bytes(source.manifest.nbytes), config.namespace, config.name,
        )  # fmt: skip
        loop = SenderLoop(sender, source, config)
        complete = loop.run()
        if not parent.bound():
            sender.finish()
            loop.hold()
    except Stopped:
        sender.close("the sender was asked to end")
        raise
    except BaseException:
        sender.close("the sender failed")
        raise
    sender.close()
    return 0 if complete else 1


class SenderLoop:
    """Refreshes the source and steps, at the spec's pace."""

    def __init__(self, sender: Sender, source: Source, config: AgentConfig) -> None:
        self._sender = sender
        self._source = source
        self._interval = float(config.steps.interval_seconds)
        self._count = config.steps.count
        self._refreshes = 0
        self._failures = 0
        """In a row."""
        self._last: StepReport | None = None

    def run(self) -> bool:
        """Until the count is reached or the source has finished. Gives whether the last step reached every receiver."""
        due = time.monotonic()
        while True:
            time.sleep(max(0.0, due - time.monotonic()))
            if not self._failures and not self._fresh():
                return bool(self._last and self._last.complete)
            due = self._step()
            if self._count and self._last is not None and self._last.step >= self._count:
                return self._last.complete

    def hold(self) -> None:
        """No new weights come any more: sends the last ones again whenever a receiver lacks them. Never returns."""
        due = time.monotonic()
        while True:
            time.sleep(max(LOOK_SECONDS, due - time.monotonic()))
            if self._source.whole and lacks_a_step(self._sender.report()):
                due = self._step()

    def _fresh(self) -> bool:
        """Waits for something to send: new weights, or a receiver that lacks the last. False: never again."""
        while not self._source.finished:
            try:
                fresh = self._source.refresh(self._refreshes + 1, Deadline(LOOK_SECONDS))
            except SourceError as error:
                if self._last is None:
                    raise
                log.error("the new weights can't be read, the receivers keep the last: %s", error)
                time.sleep(LOOK_SECONDS)
                continue
            if fresh:
                self._refreshes += 1
                return True
            if self._source.whole and lacks_a_step(self._sender.report()):
                return True
        return False

    def _step(self) -> float:
        """One step. Gives when the next may begin, on the monotonic clock."""
        try:
            report = self._sender.step()
        except JoinTimeout as error:
            retry = self._failed()
            log.error("no step: %s; tried again in %g s", error, retry)
            return time.monotonic() + retry
        except StepFailed as error:
            self._last = error.report
            retry = self._failed()
            log.error("%s", error)
            return time.monotonic() + retry
        self._failures = 0
        self._last = report
        log.info("%s", step_line(report))
        return time.monotonic() - report.duration_microseconds / 1e6 + self._interval

    def _failed(self) -> float:
        """Counts a failure. Gives the seconds to wait before the same weights are sent again."""
        self._failures += 1
        return min(FIRST_RETRY_SECONDS * 2.0 ** (self._failures - 1), MAX_RETRY_SECONDS)


def step_line(report: StepReport) -> str:
    """One line that says what a step cost."""
    seconds, receivers = report.duration_microseconds / 1e6, len(report.receivers)
    slowest = max((part.ack_microseconds for part in report.receivers), default=0)
    return (
        f"step {report.step}: {report.bytes / 1e6:.1f} MB to {receivers} receivers in {seconds * 1e3:.1f} ms "
        f"({report.bytes / max(seconds, 1e-9) / 1e9:.1f} GB/s), slowest ACK {slowest / 1e3:.1f} ms, "
        f"reserved {format_delta(report.delta)}{', verified' if report.verified else ''}"
    )


def device_of(config: AgentConfig) -> torch.device:
    """The agent's device: the one GPU that it sees, or the CPU. Raises ConfigError where there is no GPU."""
    if config.device == Device.CPU:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "spec.device is CUDA, but this process sees no GPU: grant the pod one (spec.gpus), or write device: CPU"
        )
    return torch.device("cuda", torch.cuda.current_device())


def _check_memory(source: Source, device: torch.device) -> None:
    """Host memory is given out before it is there: the first write beyond it would kill the process."""
    if device.type != "cpu":
        return
    needed, free = source.manifest.arena_bytes, psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"the weights take {format_bytes(needed)} in the sender and again in each receiver, but only "
            f"{format_bytes(free)} of memory is available: choose a smaller model"
        )
