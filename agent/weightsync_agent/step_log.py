"""What the sender tells of itself: the last steps and the agents, ready for anybody who asks, whatever a step does."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from weightsync_api.agent_config import AgentConfig
from weightsync_api.reports import AgentReport, Report, StepReport

KEPT_STEPS = 64


@dataclass(frozen=True)
class Snapshot:
    """The sender at one moment. Cheap to make: a step publishes one, and a `Report` is only built for who asks."""

    transport: str = ""
    mode: str = ""
    route: str = ""
    self_tested: bool = False
    finished: bool = False
    agents: Sequence[AgentReport] = ()
    steps: tuple[StepReport, ...] = field(default=())


class StepLog:
    """Keeps the last KEPT_STEPS steps. `publish` is called under the sender's lock, the rest from any thread."""

    def __init__(self, config: AgentConfig, session: str) -> None:
        self._config = config
        self._session = session
        self._steps: deque[StepReport] = deque(maxlen=KEPT_STEPS)
        self._snapshot = Snapshot()
        self._published = threading.Condition()

    @property
    def last(self) -> StepReport | None:
        return self._steps[-1] if self._steps else None

    @property
    def last_complete(self) -> int:
        """Number of the last step that every present receiver acknowledged; 0: none."""
        return next((step.step for step in reversed(self._steps) if step.complete), 0)

    def add(self, step: StepReport) -> None:
        self._steps.append(step)

    def publish(
        self,
        agents: Sequence[AgentReport],
        *,
        transport: str,
        mode: str,
        route: str,
        self_tested: bool,
        finished: bool,
    ) -> None:
        """Makes this what `report` gives, and wakes those who wait for a step."""
        with self._published:
            self._snapshot = Snapshot(transport, mode, route, self_tested, finished, agents, tuple(self._steps))
            self._published.notify_all()

    def report(self, after: int = -1) -> Report:
        """The kept steps above `after`, and the agents as they are now. Never waits for a step."""
        snapshot = self._snapshot
        return Report(
            namespace=self._config.namespace,
            name=self._config.name,
            uid=self._config.uid,
            session=self._session,
            transport=snapshot.transport,
            mode=snapshot.mode,
            route=snapshot.route,
            self_tested=snapshot.self_tested,
            agents=list(snapshot.agents),
            steps=[step for step in snapshot.steps if step.step > after],
            finished=snapshot.finished,
        )

    def wait(self, after: int, timeout: float) -> Report:
        """A report with a step above `after`, or whatever there is after `timeout` seconds, or at the end."""

        def told() -> bool:
            steps = self._snapshot.steps
            return self._snapshot.finished or bool(steps and steps[-1].step > after)

        with self._published:
            self._published.wait_for(told, timeout)
        return self.report(after)
