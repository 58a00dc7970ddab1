"""Reserved memory of each agent over steps: the evidence behind the condition MemoryStable.

A report keeps the last 64 steps and the status ten, a window may have 1,000: so what is kept here is a number a step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from weightsync_api.reports import AgentState, Report, StepReport

WARM_UP_STEPS = 2
"""Steps after an agent joined that are no evidence: what it allocates once, it allocates in them."""


@dataclass(frozen=True)
class Growth:
    """How an agent's reserved memory changed, in bytes, from step `first` to step `last`."""

    rank: int
    nbytes: int
    first: int
    last: int


@dataclass
class _Series:
    samples: deque[tuple[int, int]]
    warm_up: int = WARM_UP_STEPS
    base: tuple[int, int] | None = None
    pid: int = 0

    def restart(self) -> None:
        self.samples.clear()
        self.warm_up = WARM_UP_STEPS
        self.base = None

    def add(self, step: int, reserved: int) -> None:
        if self.warm_up:
            self.warm_up -= 1
            return
        self.samples.append((step, reserved))
        self.base = self.base or (step, reserved)


@dataclass
class ReservedHistory:
    """Takes in reports as they come; steps that it has seen are passed over."""

    window: int
    _session: str = ""
    _last: int = 0
    _series: dict[int, _Series] = field(default_factory=dict)

    def record(self, report: Report) -> None:
        """Adds the report's new steps. A new session or process begins anew, warm-up included."""
        if report.session != self._session:
            self._session, self._last = report.session, 0
            self._series.clear()
        for agent in report.agents:
            series = self._of(agent.rank)
            if agent.pid and series.pid not in (0, agent.pid):
                series.restart()
            series.pid = agent.pid or series.pid
        for step in report.steps:
            if step.step > self._last:
                self._last = step.step
                self._record(step)

    def growth(self) -> list[Growth]:
        """Of every agent with two samples or more: its last one against its first within the window, by rank."""
        found = []
        for rank, series in sorted(self._series.items()):
            if not series.samples:
                continue
            last, reserved = series.samples[-1]
            first, before = next(sample for sample in series.samples if sample[0] >= last - self.window)
            if last > first:
                found.append(Growth(rank, reserved - before, first, last))
        return found

    def total_growth(self) -> Growth | None:
        """The largest growth of an agent since its warm-up, however long ago that was."""
        found = [
            Growth(rank, series.samples[-1][1] - series.base[1], series.base[0], series.samples[-1][0])
            for rank, series in self._series.items()
            if series.base and series.samples and series.samples[-1][0] > series.base[0]
        ]
        return max(found, key=lambda growth: growth.nbytes, default=None)

    def _of(self, rank: int) -> _Series:
        if rank not in self._series:
            self._series[rank] = _Series(deque(maxlen=self.window + 1))
        return self._series[rank]

    def _record(self, step: StepReport) -> None:
        if step.memory.reserved_after:
            self._of(0).add(step.step, step.memory.reserved_after)
        rows = {row.rank: row for row in step.receivers}
        for rank in [rank for rank in self._series if rank and rank not in rows]:
            self._series[rank].restart()  # it left the group: what comes back begins anew
        for rank, row in rows.items():
            if row.state == AgentState.SYNCED:
                self._of(rank).add(step.step, row.memory.reserved_after)
            elif row.state != AgentState.TAINTED:
                self._of(rank).restart()
