"""What the sender tells of itself: the last steps and the agents, ready for anybody who asks, whatever a step does."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weightsync_api.agent_config import AgentConfig
from weightsync_api.reports import MAX_STEPS, AgentReport, AgentState, MemorySample, Report, StepReport

from .peers import Peer
from .protocol import Identity
from .standing import Standing
from .transport.base import SenderTransport

PUBLISH_STEPS = 8
"""Steps that are so quick that as many pass between two looks of the service thread: readers must miss none of them."""


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
    """Keeps the last MAX_STEPS steps. `publish` is called under the sender's lock, the rest from any thread."""

    def __init__(self, config: AgentConfig, session: str, names: str = "") -> None:
        self._config = config
        self._session = session
        self._names = names
        self._steps: deque[StepReport] = deque(maxlen=MAX_STEPS)
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
            names=self._names,
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


def lacks_a_step(report: Report) -> bool:
    """Whether a receiver waits for weights that others may have: it came back, or a broken step tainted it."""
    return any(agent.state in (AgentState.JOINED, AgentState.TAINTED) for agent in report.agents if agent.rank)


class Publisher:
    """Puts what a leading sender is at the moment into its StepLog. Used under the sender's lock."""

    def __init__(
        self, steps: StepLog, identity: Identity, transport: SenderTransport, peers: Mapping[int, Peer]
    ) -> None:
        self.memory = MemorySample()
        """The sender's own, around its last step."""
        self.finished = False
        self._steps = steps
        self._identity = identity
        self._transport = transport
        self._peers = peers
        self._unpublished = 0
        """Steps that the log does not tell yet: the service thread publishes them, off the step's path."""

    @property
    def behind(self) -> bool:
        return self._unpublished > 0

    def add(self, step: StepReport) -> None:
        self._steps.add(step)
        self._unpublished += 1
        if self._unpublished >= PUBLISH_STEPS:
            self.publish()

    def catch_up(self) -> None:
        """Publishes what steps left for later."""
        if self.behind:
            self.publish()

    def publish(self) -> None:
        self._unpublished = 0
        last = self._steps.last
        me = Standing(
            self._identity,
            state=AgentState.SYNCED if last else AgentState.JOINED,
            message="its last step did not reach every receiver" if last and not last.complete else "",
            step=self._steps.last_complete,
            memory=self.memory,
        )
        peers = [self._peers[rank] for rank in sorted(self._peers)]
        self._steps.publish(
            [me.report(), *(peer.report() for peer in peers)],
            transport=self._transport.kind,
            mode=self._transport.plan.mode,
            route=self._transport.route,
            self_tested=bool(peers) and all(peer.joined for peer in peers),
            finished=self.finished,
        )
