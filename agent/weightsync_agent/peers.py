"""The sender's book of receivers: who joined, in which state each is, and what its last step cost."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from weightsync_api.reports import AgentReport, AgentState, MemorySample, ReceiverStep

from .protocol import Identity

JOINED_STATES = (AgentState.JOINED, AgentState.SYNCED, AgentState.TAINTED)


@dataclass
class Peer:
    """One receiver, by rank. `address` is its ZeroMQ routing id, which changes when its process does."""

    address: bytes
    identity: Identity
    state: AgentState = AgentState.STARTING
    message: str = ""
    step: int = 0
    ack_microseconds: int = 0
    hello_at: float = field(default_factory=time.perf_counter)
    join_microseconds: int = 0
    memory: MemorySample = field(default_factory=MemorySample)
    retries: bool = False
    """Where it was refused: it says Hello again by itself."""
    offer_number: int = 0
    """Of the last Welcome; words about an earlier one come too late."""
    verified_once: bool = False
    """Some step's digests were compared since it joined."""

    @property
    def rank(self) -> int:
        return self.identity.rank

    @property
    def joined(self) -> bool:
        return self.state in JOINED_STATES

    @property
    def label(self) -> str:
        return f"rank {self.rank} ({self.identity.pod} on {self.identity.node})"

    def report(self) -> AgentReport:
        return AgentReport(
            rank=self.rank,
            pod=self.identity.pod,
            node=self.identity.node,
            pid=self.identity.pid,
            gpu=self.identity.gpu,
            state=self.state,
            message=self.message[:4096],
            step=self.step,
            ack_microseconds=self.ack_microseconds,
            join_microseconds=self.join_microseconds,
            memory=self.memory,
        )

    def receiver_step(self) -> ReceiverStep:
        """Its part of the step that just ended, for a receiver that did not acknowledge."""
        return ReceiverStep(rank=self.rank, state=self.state, memory=self.memory, error=self.message[:4096])
