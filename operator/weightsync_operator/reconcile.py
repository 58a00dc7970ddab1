"""One level-triggered pass: observe, plan, apply, report, status. The same for the local machine and for a cluster.

Nothing here depends on what woke it: a pass looks at what is and does what is missing. Reports come in beside the
passes, by a long poll (`follow`), and are folded into what the next pass reads.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from weightsync_api.reports import Report, StepReport
from weightsync_api.v1alpha1 import Condition, WeightSync, WeightSyncStatus
from weightsync_api.v1alpha1.status import MAX_HISTORY

from .plan import Key, plan
from .platform import Platform, ReportRefusedError
from .reserved import ReservedHistory
from .status import is_about, next_status

log = logging.getLogger("weightsync.reconcile")

POLL_SECONDS = 60.0
"""Length of one long poll for a report. A thousand senders with nothing to report are asked some 17 times a second."""
MIN_POLL_SECONDS = 0.1
RETRY_SECONDS = 0.25
MAX_RETRY_SECONDS = 5.0


@dataclass(frozen=True)
class Pass:
    """What a pass came to."""

    resource: WeightSync | None
    """None: the WeightSync is gone, and what belonged to it is deleted; or, with a status, it can't be read."""
    status: WeightSyncStatus | None
    written: bool
    """Whether the status was stored: only when it differs, and not more often than the platform's limit."""
    again_after: float | None
    """Seconds after which a status that was held back is due; None: nothing waits."""


@dataclass
class _Memory:
    """What is known of one WeightSync beyond its status: it can be lost without harm, and is after a restart."""

    packed: bytes = b""
    """The newest report in JSON, compressed: its models would be thirty times as large. Empty: there was none."""
    after: int = 0
    """Last step that was reported."""
    news: int = 0
    """How often something new was reported, refusals included."""
    reserved: ReservedHistory = field(default_factory=lambda: ReservedHistory(1))
    written_at: datetime | None = None
    refused: str = ""
    """Why the sender's last answer is no report of this WeightSync; empty: it was one, or there was none."""

    @property
    def report(self) -> Report | None:
        """The newest report; its steps are those that no written status has yet. A new copy each time."""
        return Report.model_validate_json(zlib.decompress(self.packed)) if self.packed else None

    @report.setter
    def report(self, report: Report) -> None:
        self.packed = zlib.compress(report.model_dump_json(by_alias=True).encode(), 1)

    def refuse(self, why: str) -> None:
        self.news += why != self.refused
        self.refused = why


class Reconciler:
    """Brings WeightSyncs to what their specs say, on one platform.

    Args:
        platform: carries out the plans.
        status_interval: seconds between two writes of one resource's status, unless a condition changed.
        on_steps: told of new steps as soon as they are reported.
        now: the clock.
    """

    def __init__(
        self,
        platform: Platform,
        *,
        status_interval: float = 0,
        on_steps: Callable[[Key, Sequence[StepReport]], None] | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._platform = platform
        self._interval = timedelta(seconds=status_interval)
        self._on_steps = on_steps
        self._now = now
        self._memories: dict[Key, _Memory] = {}

    async def reconcile(self, key: Key) -> Pass:
        """One pass. Raises what the platform raises: the caller backs off and comes again."""
        observed = await self._platform.observe(key)
        ws = observed.resource
        if ws is None and observed.unreadable is not None:
            return Pass(None, observed.unreadable, False, None)
        if ws is None:
            await self._platform.delete(key)
            self._memories.pop(key, None)
            return Pass(None, None, False, None)
        planned = plan(ws, self._platform.defaults(ws))
        if not observed.problems:
            await self._platform.apply(planned)
        memory = self._memory(key, ws)
        before = ws.status or WeightSyncStatus()
        now, report = self._now(), memory.report
        status = next_status(ws, planned, observed, report, now, before, memory.reserved, memory.refused)
        if status == before:
            return Pass(ws, status, False, None)
        due = memory.written_at + self._interval if memory.written_at else now
        if now < due and _states(status.conditions) == _states(before.conditions):
            return Pass(ws, status, False, (due - now).total_seconds())
        await self._platform.write_status(ws, status)
        memory.written_at = self._now()
        latest = memory.report
        if latest is not None and report is not None and report.steps:
            # What came in while the status was written is still to be written.
            written = {(step.step, step.started_at) for step in report.steps}
            rest = [step for step in latest.steps if (step.step, step.started_at) not in written]
            memory.report = latest.model_copy(update={"steps": rest})
        return Pass(ws, status, True, None)

    async def prime(self, key: Key) -> None:
        """Before the first pass of a process: takes in what the sender has to report.

        Without it, the first pass after a restart would take back a status that only a report can support.
        """
        ws = await self._platform.resource(key)
        if ws is not None and ws.status is not None and ws.status.last_step is not None and not ws.spec.suspend:
            await self.poll(key, ws, 0)

    async def poll(self, key: Key, ws: WeightSync, wait: float = POLL_SECONDS) -> bool:
        """One long poll of the sender's report. False: nobody answered."""
        memory = self._memory(key, ws)
        try:
            report = await self._platform.report(key, memory.after, wait)
        except ReportRefusedError as error:
            memory.refuse(str(error))
            return False
        if report is None:
            return False
        if not is_about(report, ws):
            memory.refuse(
                f"it reports for WeightSync {report.namespace[:63]}/{report.name[:63]} "
                f"(UID {report.uid[:36] or 'unknown'}), not for this one (UID {ws.metadata.uid or 'unknown'})"
            )
            return False
        memory.refuse("")
        known = memory.report
        if known is not None and report.session != known.session and memory.after:
            # A new sender counts on from its receivers' step, or from 1 where they are new too: ask for all it has.
            memory.after = 0
            report = await self._platform.report(key, 0, 0) or report
        memory.reserved.record(report)
        new = [step for step in report.steps if step.step > memory.after]
        unwritten = known.steps if known else []
        before = memory.packed
        memory.report = report.model_copy(update={"steps": [*unwritten, *new][-MAX_HISTORY:]})
        memory.news += memory.packed != before
        if new:
            memory.after = new[-1].step
            if self._on_steps is not None:
                self._on_steps(key, new)
        return True

    async def follow(
        self,
        key: Key,
        ws: WeightSync,
        wake: Callable[[], None],
        poll: float = POLL_SECONDS,
        max_retry: float = MAX_RETRY_SECONDS,
    ) -> None:
        """Polls for ever, and wakes the passes whenever something new was reported. Ends when the sender finished."""
        ws = ws.model_copy(update={"status": None})
        delay = RETRY_SECONDS
        while True:
            # Nothing of a report, nor its WeightSync's status, is held while the next one is waited for.
            news, asked_at = self._memory(key, ws).news, time.monotonic()
            answered = await self.poll(key, ws, poll)
            told = self._memory(key, ws).news != news
            if told:
                wake()
            if answered:
                delay = RETRY_SECONDS
                if not told and time.monotonic() - asked_at < MIN_POLL_SECONDS:
                    await asyncio.sleep(MIN_POLL_SECONDS)  # it answers at once with nothing new: no long poll
                if self._has_finished(key):
                    return
            else:
                # Jitter: a thousand senders that restart together are not asked together.
                await asyncio.sleep(delay * random.uniform(0.5, 1))
                delay = min(delay * 2, max_retry)

    def _has_finished(self, key: Key) -> bool:
        report = self.latest(key)
        return report is not None and report.finished

    def latest(self, key: Key) -> Report | None:
        """The newest report of this WeightSync; its steps are those that no written status has yet."""
        return self._memories[key].report if key in self._memories else None

    def reserved(self, key: Key) -> ReservedHistory | None:
        """The memory of all steps that were reported."""
        return self._memories[key].reserved if key in self._memories else None

    def _memory(self, key: Key, ws: WeightSync) -> _Memory:
        memory = self._memories.setdefault(key, _Memory(reserved=ReservedHistory(ws.spec.memory.window)))
        if memory.reserved.window != ws.spec.memory.window:
            memory.reserved = ReservedHistory(ws.spec.memory.window)
        return memory


def _states(conditions: Sequence[Condition]) -> list[tuple[str, str, str]]:
    """What makes a change that is written at once: a figure in a message is none."""
    return [(c.type, c.status, c.reason) for c in conditions]
