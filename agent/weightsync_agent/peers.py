"""The sender's book of receivers: who joined, in which state each is, and what its last step cost."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from weightsync_api.reports import AgentState, ReceiverStep
from weightsync_api.v1alpha1.status import MAX_MESSAGE

from .standing import Standing

JOINED_STATES = (AgentState.JOINED, AgentState.SYNCED, AgentState.TAINTED)


@dataclass(kw_only=True)
class Peer(Standing):
    """One receiver, by rank. `address` is its ZeroMQ routing id, which changes when its process does."""

    address: bytes
    hello_at: float = field(default_factory=time.perf_counter)
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

    def receiver_step(self) -> ReceiverStep:
        """Its part of the step that just ended, for a receiver that did not acknowledge."""
        return ReceiverStep(rank=self.rank, state=self.state, memory=self.memory, error=self.message[:MAX_MESSAGE])
