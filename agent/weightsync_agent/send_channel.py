"""One step, as the sender drives it: who is still in it, what each receiver has drained and acknowledged.

Every wait ends at the step's deadline; a receiver that answers Error or whose connection is gone leaves the step
at once, so that the others need not wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from weightsync_api.reports import AgentState, MemorySample, ReceiverStep

from .deadline import Deadline
from .errors import StepTimeout, TransportError
from .peers import Peer
from .protocol import Ack, Drained, Error, FromReceiver, Message, Ping, Regrouped

CHECK_SECONDS = 0.1
"""How often a silent receiver's connection is tried within a step."""


class StepChannel:
    """The SendChannel of transport/base.py."""

    def __init__(
        self,
        step: int,
        members: Sequence[Peer],
        deadline: Deadline,
        post: Callable[[Peer, Message], bool],
        poll: Callable[[float], None],
    ) -> None:
        self.step = step
        self.verify = False
        self.deadline = deadline
        self.members = {peer.rank: peer for peer in members}
        self.acks: dict[int, ReceiverStep] = {}
        self.failed: dict[int, ReceiverStep] = {}
        self.absent: list[Peer] = []
        self.memory: MemorySample | None = None
        """The sender's own, where it was read within the step."""
        self.committed_at = 0.0
        """time.perf_counter() when the last of the step's data was out."""
        self.when_started: Callable[[], None] = lambda: None
        """What `started` does."""
        self._post = post
        self._poll = poll
        self._drained = dict.fromkeys(self.members, -1)
        self._regrouped: dict[int, int] = {}
        self._missing = False
        """A receiver left before it had all of the data."""
        self._checked_at = time.monotonic()

    @property
    def ranks(self) -> list[int]:
        return [rank for rank in self.members if rank not in self.failed]

    def begin(self, message: Message) -> None:
        """Opens the step. Who is gone by now was never in it: it died between two steps, and nothing failed."""
        for rank in self.ranks:
            if not self._post(self.members[rank], message):
                self.absent.append(self.members.pop(rank))
        if not self.members:
            raise TransportError(f"step {self.step}: every receiver was gone when it began")

    def started(self) -> None:
        self.when_started()

    def post(self, message: Message, rank: int | None = None) -> None:
        for target in self.ranks if rank is None else [rank]:
            if not self._post(self.members[target], message):
                self.lose(target)

    def pump(self, until_drained: int | None = None) -> None:
        if until_drained is None:
            self._poll(0)
            return
        self.wait(
            lambda: all(self._drained[rank] >= until_drained for rank in self.ranks),
            self.deadline,
            lambda: [rank for rank in self.ranks if self._drained[rank] < until_drained],
            f"bucket {until_drained} drained",
        )

    def alive(self) -> bool:
        self._poll(0)
        self._check_connections()
        return not self._missing

    def wait_regrouped(self, epoch: int, deadline: Deadline) -> None:
        """Raises StepTimeout unless every member is in the new group by the deadline."""
        self.wait(
            lambda: all(self._regrouped.get(rank) == epoch for rank in self.ranks),
            deadline,
            lambda: [rank for rank in self.ranks if self._regrouped.get(rank) != epoch],
            "in the new group",
        )

    def wait_acks(self, deadline: Deadline) -> None:
        """Raises StepTimeout unless every receiver in the step has acknowledged or left it by the deadline."""
        self.wait(
            lambda: all(rank in self.acks for rank in self.ranks),
            deadline,
            lambda: [rank for rank in self.ranks if rank not in self.acks],
            "acknowledged",
        )

    def wait(self, done: Callable[[], bool], deadline: Deadline, missing: Callable[[], list[int]], what: str) -> None:
        while not done():
            if deadline.passed:
                late = sorted(missing())
                raise StepTimeout(
                    f"step {self.step}: not {what} within {deadline.seconds:.3g} s by rank "
                    + ", ".join(map(str, late[:20]))
                    + (f" and {len(late) - 20} more" if len(late) > 20 else "")
                )
            self._poll(min(CHECK_SECONDS, deadline.remaining))
            self._check_connections()
        if not self.ranks:
            raise TransportError(f"step {self.step}: every receiver left it")

    def take(self, peer: Peer, message: FromReceiver, load_microseconds: int = 0) -> bool:
        """A message from a receiver in the step; False when it is none of this step's.

        `load_microseconds`: what an Ack that was made ahead could not say yet.
        """
        rank = peer.rank
        if self.members.get(rank) is not peer:
            return False
        if isinstance(message, Regrouped):
            self._regrouped[rank] = message.epoch
            return True
        if not isinstance(message, Ack | Drained | Error) or message.step != self.step:
            return False
        if isinstance(message, Drained):
            self._drained[rank] = max(self._drained[rank], message.bucket)
        elif isinstance(message, Ack):
            if rank in self.acks or rank in self.failed:
                return True
            latency = round((time.perf_counter() - self.committed_at) * 1e6) if self.committed_at else 0
            self.acks[rank] = ReceiverStep(
                rank=rank,
                state=AgentState.SYNCED,
                ack_microseconds=latency,
                load_microseconds=load_microseconds or message.load_microseconds,
                memory=message.memory,
                verified=message.verified,
            )
        else:
            where = f", bucket {message.bucket}" if message.bucket is not None else ""
            self.fail(rank, AgentState.TAINTED, f"step {self.step}{where}: {message.cause}", received=message.received)
        return True

    def lose(self, rank: int) -> None:
        """Its process or its connection is gone."""
        self.fail(
            rank, AgentState.LOST, f"step {self.step}: its connection is gone: the process ended or the node is off"
        )

    def fail(self, rank: int, state: AgentState, cause: str, *, received: bool = False) -> None:
        """Takes a receiver out of the step; its weights may be mixed now. `received`: it had all of the data."""
        if rank in self.failed or rank in self.acks:
            return
        self._missing |= not received
        peer = self.members[rank]
        peer.state, peer.message = state, cause
        self.failed[rank] = peer.receiver_step()

    def _check_connections(self) -> None:
        now = time.monotonic()
        if now - self._checked_at < CHECK_SECONDS:
            return
        self._checked_at = now
        for rank in self.ranks:
            if rank not in self.acks and not self._post(self.members[rank], Ping()):
                self.lose(rank)
