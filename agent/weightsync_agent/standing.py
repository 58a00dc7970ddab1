"""What one agent is at the moment, as reports tell it."""

from __future__ import annotations

from dataclasses import dataclass, field

from weightsync_api.reports import AgentReport, AgentState, MemorySample
from weightsync_api.v1alpha1.status import MAX_MESSAGE

from .protocol import Identity


@dataclass
class Standing:
    """Who an agent is, in which state, and with which step. One thread changes it; any may read a report of it."""

    identity: Identity
    state: AgentState = AgentState.STARTING
    message: str = ""
    """Why, where the state needs a reason."""
    step: int = 0
    """The last step that it holds whole; 0: none yet."""
    memory: MemorySample = field(default_factory=MemorySample)
    """Bytes that were reserved before and after its last step."""
    ack_microseconds: int = 0
    join_microseconds: int = 0

    def report(self) -> AgentReport:
        return AgentReport(
            rank=self.identity.rank,
            pod=self.identity.pod,
            node=self.identity.node,
            pid=self.identity.pid,
            gpu=self.identity.gpu,
            state=self.state,
            message=self.message[:MAX_MESSAGE],
            step=self.step,
            ack_microseconds=self.ack_microseconds,
            join_microseconds=self.join_microseconds,
            memory=self.memory,
        )
