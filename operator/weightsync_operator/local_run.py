"""`weightsync run`: carries manifests out on this machine, until their senders end, or somebody ends them."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from weightsync_api.reports import StepReport
from weightsync_api.v1alpha1 import ConditionType, StepStatus, WeightSync, WeightSyncStatus

from .conditions import describe_growth
from .local import LocalHooks, LocalPlatform
from .local_command import TemplateError
from .local_gpus import NotEnoughGpusError, device_for, visible_gpus
from .local_process import AgentProcess
from .local_screen import Screen
from .plan import Key
from .reconcile import Reconciler
from .state_dir import StateDir, StateError
from .status import condition, step_status
from .text import age, rate, timestamp

EXIT_DONE, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_TIMEOUT, EXIT_INTERRUPTED, EXIT_TERMINATED = 0, 1, 2, 124, 130, 143

SENDER_CRASHES, SENDER_CRASHES_SECONDS = 3, 60.0
"""Crashes of the sender within so many seconds, or in a row without a step, that end the run."""
RECEIVER_CRASHES = 5
"""Crashes in a row of a receiver that never held a step that end the run: the same will happen again."""
FINISH_SECONDS = 30.0
"""How long users' receivers may go on by themselves after the sender has ended."""
POLL_SECONDS = 2.0
RESYNC_SECONDS = 1.0
QUOTED_LINES = 10


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    code: int
    message: str = ""
    process: AgentProcess | None = None
    """Whose last lines tell more."""


@dataclass(frozen=True)
class RunOptions:
    timeout: float | None = None
    """Seconds after which the run is ended with code 124; None: never."""
    verbose: bool = False
    """Shows every line of every agent."""


class Stop:
    """Why all runs are to end. Set by signals and by the deadline."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.wakes: list[asyncio.Event] = []

    def request(self, outcome: Outcome) -> None:
        self.outcome = self.outcome or outcome
        for wake in self.wakes:
            wake.set()


class LocalRun:
    """One WeightSync, from its first process to its last.

    Made, it holds the name and has checked what this machine can't do; `run` or `abandon` gives the name back.

    Raises StateError, TemplateError, NotEnoughGpusError.
    """

    def __init__(
        self,
        ws: WeightSync,
        folder: Path,
        gpus: list[str],
        screen: Screen,
        options: RunOptions,
        stop: Stop,
        prefix: str,
    ) -> None:
        self.key = Key(ws.metadata.namespace, ws.metadata.name)
        self._screen, self._options, self._stop, self._prefix = screen, options, stop, prefix
        self._wake = asyncio.Event()
        stop.wakes.append(self._wake)
        self._began = time.monotonic()
        self._steps: list[StepStatus] = []
        self._counted = self._verified = 0
        device, notice = device_for(ws, gpus)
        if notice:
            screen.notice(notice)
        created = {"generation": 1, "creationTimestamp": timestamp(datetime.now(UTC))}
        metadata = ws.metadata.model_copy(update=created)
        self._ws = ws.model_copy(update={"metadata": metadata, "status": WeightSyncStatus()})
        self._state = StateDir.acquire(self.key)
        hooks = LocalHooks(self._wake.set, self._line, self._crashed, self._status)
        try:
            self.platform = LocalPlatform(self._ws, folder, self._state, gpus, device, hooks)
        except BaseException:
            self._state.release()
            raise
        self._reconciler = Reconciler(self.platform, on_steps=self._took)
        for notice in self.platform.notices:
            screen.notice(notice)

    async def run(self) -> Outcome:
        """Until it ends, fails or is stopped. No process is left then, and no file but the logs of a failed run."""
        outcome = Outcome(EXIT_FAILED, "the runner failed")
        follow = asyncio.create_task(
            self._reconciler.follow(self.key, self._ws, self._wake.set, POLL_SECONDS, max_retry=0.5)
        )
        try:
            outcome = await self._until_outcome(follow)
            if outcome.code == EXIT_DONE:
                outcome = await self._finish()
        finally:
            # Reports are read to the last: a sender that is asked to end waits until its last one is taken.
            await self.platform.stop()
            follow.cancel()
            await asyncio.wait([follow])
            await self.platform.close()
            self._state.release(keep_logs=outcome.code == EXIT_FAILED)
        return outcome

    def abandon(self) -> None:
        """Gives the name back where nothing was started."""
        self._state.release()

    # --- passes -------------------------------------------------------------------------------------------------

    async def _until_outcome(self, follow: asyncio.Task[None]) -> Outcome:
        while True:
            self._wake.clear()
            if follow.done() and not follow.cancelled() and (error := follow.exception()) is not None:
                raise error
            if (outcome := self._judge()) is not None:
                return outcome
            try:
                await self._reconciler.reconcile(self.key)
            except OSError as error:
                return Outcome(EXIT_BAD_INPUT, f"{self.key}: a process can't be started: {error}")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), RESYNC_SECONDS)

    def _judge(self) -> Outcome | None:
        """What ends the run; None: nothing yet."""
        if self._stop.outcome is not None:
            return self._stop.outcome
        sender = self.platform.sender
        if sender is not None and sender.exit is not None:
            if sender.exit.code == 0:
                return Outcome(EXIT_DONE)
            if self._is_bad_input(sender):
                return self._bad_input(sender)
            report = self._reconciler.latest(self.key)
            finished = report is not None and report.finished
            in_a_row = len(sender.crashes) if not self._counted else 0
            if finished or max(sender.crashes_within(SENDER_CRASHES_SECONDS), in_a_row) >= SENDER_CRASHES:
                times = "" if finished else f", {len(sender.crashes)} times now"
                return Outcome(EXIT_FAILED, f"{self.key}: the sender failed: {sender.exit.text}{times}", sender)
        for receiver in self.platform.receivers:
            if receiver.exit is None or receiver.exit.code == 0 or self._held_a_step(receiver):
                continue
            if self._is_bad_input(receiver):
                return self._bad_input(receiver)
            if len(receiver.crashes) >= RECEIVER_CRASHES:
                text = f"{self.key}: {receiver.name} failed {len(receiver.crashes)} times before its first step"
                return Outcome(EXIT_FAILED, f"{text}: {receiver.exit.text}", receiver)
        return None

    def _is_bad_input(self, process: AgentProcess) -> bool:
        """The agent's own word, before anything was sent: what the manifest names can't be used."""
        code = process.exit.code if process.exit else 0
        return code == EXIT_BAD_INPUT and not self._counted and not process.command.user

    def _bad_input(self, process: AgentProcess) -> Outcome:
        return Outcome(EXIT_BAD_INPUT, f"{self.key}: {process.name}: {next(reversed(process.log.tail), 'bad input')}")

    def _held_a_step(self, receiver: AgentProcess) -> bool:
        status = self.platform.status
        return any(agent.rank == receiver.agent.rank and agent.step for agent in status.agents) if status else False

    async def _finish(self) -> Outcome:
        """The sender has ended well: users' receivers may still have something to say and to prove."""
        self.platform.freeze()
        deadline = time.monotonic() + FINISH_SECONDS
        told = False
        while waiting := [p for p in self.platform.receivers if p.running and p.command.user]:
            if self._stop.outcome is not None:
                return self._stop.outcome
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if not told and left < FINISH_SECONDS - 3:
                told = True
                names = ", ".join(process.name for process in waiting)
                self._screen.notice(f"{self.key}: the sender has finished; {names} may go on for {left:.0f} s")
            self._wake.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), min(RESYNC_SECONDS, left))
        await self._reconciler.reconcile(self.key)
        for process in self.platform.receivers:
            if process.command.user and process.exit is not None and process.exit.code != 0:
                text = f"{self.key}: {process.name} failed after the last step: {process.exit.text}"
                return Outcome(EXIT_FAILED, text, process)
        status = self.platform.status
        last = status.last_step if status else None
        if not self._counted or last is None:
            return Outcome(EXIT_FAILED, f"{self.key}: the sender ended without a step", self.platform.sender)
        if not last.complete:
            why = condition(status, ConditionType.READY) if status else None
            text = f"{self.key}: step {last.step}, the last one, did not reach every receiver"
            return Outcome(EXIT_FAILED, f"{text}: {why.message}" if why else text)
        return Outcome(EXIT_DONE)

    # --- what is shown ------------------------------------------------------------------------------------------

    def tell(self, outcome: Outcome) -> None:
        """The last words: why it ended, the lines that tell more, the summary."""
        if outcome.message:
            self._screen.notice(outcome.message)
        if outcome.process is not None:
            log = outcome.process.log
            quoted = list(log.tail)[-QUOTED_LINES:]
            for text in ([] if log.cause in quoted else [log.cause]) + quoted:
                self._screen.line(self._prefix + outcome.process.name, text)
        if outcome.code == EXIT_FAILED and self._state.logs.is_dir():
            self._screen.notice(f"logs: {self._state.logs}")
        if outcome.code != EXIT_BAD_INPUT:
            self._screen.summary(self._summary(outcome))

    def _summary(self, outcome: Outcome) -> str:
        status = self.platform.status
        words = {EXIT_DONE: "done", EXIT_TIMEOUT: "timed out", EXIT_FAILED: "failed"}
        parts = [f"{self._counted} step{'' if self._counted == 1 else 's'}"]
        if status is not None:
            # Of the last step, not of now: at the end everything is being stopped.
            acked = status.last_step.receivers if status.last_step else 0
            wanted = self._ws.spec.receivers.replicas * self._ws.spec.receivers.gpus_per_pod
            parts.append(f"receivers {acked}/{wanted}")
        parts.append(f"verified {self._verified} of {self._counted}")
        history = self._reconciler.reserved(self.key)
        parts.append(f"reserved growth {describe_growth(history) if history else 'not measured'}")
        if self._steps:
            last = self._steps[-1]
            parts.append(f"last step {rate(last.bytes, last.duration_microseconds)}")
        parts.append(age(timedelta(seconds=time.monotonic() - self._began)))
        return f"{self.key.name} {words.get(outcome.code, 'stopped')}: {', '.join(parts)}"

    def _line(self, process: AgentProcess, stream: int, text: str) -> None:
        if self._options.verbose or (process.command.user and stream == 1):
            self._screen.line(self._prefix + process.name, text)

    def _crashed(self, process: AgentProcess) -> None:
        if self._stop.outcome is None and process.exit is not None and not self._is_bad_input(process):
            why = f"{process.exit.text}{f': {process.log.cause}' if process.log.cause else ''}"
            again = f"it starts again in {process.pause:.0f} s"
            self._screen.notice(f"{self._prefix}{process.name}: {why}; {again}")

    def _status(self, ws: WeightSync) -> None:
        self._screen.status(ws)

    def _took(self, key: Key, steps: Sequence[StepReport]) -> None:
        new = [step_status(step) for step in steps]
        self._counted += len(new)
        self._verified += sum(step.verified for step in new)
        self._steps = new[-1:]
        self._screen.steps(key, new)


async def run_documents(resources: Sequence[WeightSync], folder: Path, screen: Screen, options: RunOptions) -> int:
    """Runs every resource, side by side. Gives the exit code: of the worst one where they differ."""
    stop = Stop()
    several = len(resources) > 1
    gpus = visible_gpus()
    runs: list[LocalRun] = []
    for ws in resources:
        prefix = f"{ws.metadata.name}/" if several else ""
        try:
            run = LocalRun(ws, folder, gpus, screen, options, stop, prefix)
        except (StateError, TemplateError, NotEnoughGpusError) as error:
            screen.notice(f"{prefix}{error}" if several else str(error))
            for other in runs:
                other.abandon()
            return EXIT_BAD_INPUT
        gpus = gpus[run.platform.needs_gpus :]
        runs.append(run)
    loop = asyncio.get_running_loop()
    for number, code in (
        (signal.SIGINT, EXIT_INTERRUPTED),
        (signal.SIGTERM, EXIT_TERMINATED),
        (signal.SIGHUP, 128 + signal.SIGHUP),
    ):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup, or in the background of a script
            loop.add_signal_handler(number, stop.request, Outcome(code))
    if options.timeout is not None:
        text = f"--timeout {options.timeout:g} s is over"
        loop.call_later(options.timeout, stop.request, Outcome(EXIT_TIMEOUT, text))
    screen.open()
    try:
        outcomes = await asyncio.gather(*(run.run() for run in runs), return_exceptions=True)
    finally:
        screen.close()
    code = EXIT_DONE
    for run, outcome in zip(runs, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            raise outcome
        run.tell(outcome)
        code = max(code, outcome.code)
    return code


__all__ = ["EXIT_BAD_INPUT", "LocalRun", "RunOptions", "run_documents"]
