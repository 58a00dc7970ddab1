"""What our senders to verl and to checkpoint-engine have in common: one step, its report, and how it fails."""

from __future__ import annotations

import time
from abc import abstractmethod
from contextlib import suppress
from datetime import UTC, datetime
from typing import Self

import torch
from weightsync_api.reports import AgentState, ReceiverStep, StepReport
from weightsync_api.v1alpha1.status import MAX_MESSAGE

from ..deadline import Deadline
from ..errors import Closed, ConfigError, JoinTimeout, StepFailed, TransportError
from ..names import NameRules
from ..sources.module import Weights
from .bucket_source import BucketSource
from .lent_memory import RELEASE_SECONDS, lend
from .lockstep import LeftEarly, Lockstep
from .object_wire import require_allowed

BUCKET_BYTES = 512 << 20
"""Of the buffer, whose halves are filled and loaded by turns. As verl's default."""
MAX_ANSWER_BYTES = 4096
GRACE_SECONDS = 5.0
BREAK_OFF_SECONDS = 2.0


class BucketSender:
    """Feeds one peer, a step a call. Made once; nothing is shared with the peer between two steps."""

    peer = "the receiver"
    prefix = "weightsync"

    def __init__(
        self,
        source: Weights,
        receiver: str,
        *,
        allow_object_wire: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: torch.dtype | None = None,
        names: NameRules = (),
        each_rank: bool = False,
        join_timeout_seconds: float = 120.0,
        step_timeout_seconds: float = 300.0,
    ) -> None:
        """`source`, `dtype`, `names`, `each_rank`: as for Sender. `receiver`: whom to feed, named as the
        subclass says. `bucket_bytes`: of the buffer, which grows to twice the largest tensor where that is more.

        Raises ConfigError, naming the tensor, for weights that can't be sent, and where `allow_object_wire` is not set.
        """
        require_allowed(allow_object_wire, self.peer)
        self.receiver = receiver
        self._source = BucketSource(source, bucket_bytes, dtype, names, each_rank)
        self._join_timeout, self._step_timeout = join_timeout_seconds, step_timeout_seconds
        self._lent = lend(self._source.nbytes, self._source.device, self.prefix)
        self._closed = False
        self._over = False
        """The peer waits for nothing more."""
        self._step = 0
        self.manifest = self._source.manifest
        self.stranded_bytes = 0
        """CUDA memory that the peer of the last step never released."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _converse(self, channel: Lockstep, deadline: Deadline, join: Deadline) -> None:
        """The whole step, up to the peer's last answer; `join`: by when it must have answered once.

        Raises TransportError, StepTimeout, JoinTimeout.
        """

    @abstractmethod
    def _break_off(self, channel: Lockstep, deadline: Deadline) -> None:
        """Tells a peer that still waits that nothing more comes. May raise anything."""

    def _run(self, address: str) -> StepReport:
        if self._closed:
            raise Closed(f"this sender to {self.peer} is closed")
        gatherer = self._source.gatherer
        if not gatherer.leads:
            self._source.follow()
            return StepReport(step=0, started_at=datetime.now(UTC), duration_microseconds=0, bytes=0, complete=True)
        try:
            return self._lead(address)
        finally:
            gatherer.conclude()

    def _lead(self, address: str) -> StepReport:
        started_at, began = datetime.now(UTC), time.perf_counter()
        deadline = Deadline(self._step_timeout)
        self._source.look()  # before there is a socket: a receiver that waits goes on waiting
        self._step += 1
        try:
            state, failure = self._persist(address, deadline)
        except (JoinTimeout, ConfigError):
            self._step -= 1  # no byte was sent
            raise
        whole = failure is None
        report = StepReport(
            step=self._step,
            started_at=started_at,
            duration_microseconds=round((time.perf_counter() - began) * 1e6),
            bytes=self.manifest.nbytes if whole else 0,
            receivers=[ReceiverStep(rank=1, state=state, error=str(failure or "")[:MAX_MESSAGE])],
            complete=whole,
        )
        if failure is not None:
            raise StepFailed(f"step {self._step} to {self.peer} broke off: {failure}", report) from failure
        return report

    def _persist(self, address: str, deadline: Deadline) -> tuple[AgentState, Exception | None]:
        """One that came and left without a word may have been the last step's receiver, or was killed: another may
        come, within GRACE_SECONDS."""
        join, left = deadline.earlier(self._join_timeout), None
        while True:
            try:
                state, failure = self._attempt(address, deadline, join)
            except JoinTimeout:
                if left is None:
                    raise
                return AgentState.LOST, left
            if not isinstance(failure, LeftEarly) or join.passed:
                return state, failure
            if left is None:
                join = join.earlier(GRACE_SECONDS)
            left = failure

    def _attempt(self, address: str, deadline: Deadline, join: Deadline) -> tuple[AgentState, Exception | None]:
        channel = Lockstep(address, "asks", self.peer)
        state, failure = AgentState.TAINTED, None
        self._over = False
        try:
            self._converse(channel, deadline, join)
            state = AgentState.SYNCED
        except (JoinTimeout, ConfigError):
            raise
        except Exception as error:  # gathering may raise anything
            failure = error
        finally:
            if state != AgentState.SYNCED and not self._over and not channel.gone:
                with suppress(Exception):
                    self._break_off(channel, Deadline(BREAK_OFF_SECONDS))
            gone = channel.gone and state != AgentState.SYNCED
            channel.close()
            self._source.detach()
            self.stranded_bytes = self._lent.returned(Deadline(RELEASE_SECONDS), peer_gone=gone)
        return (AgentState.LOST if gone else state), failure

    def _lend(self) -> None:
        """Before the first message: the buffer is there and the first bucket in it."""
        self._handle = self._lent.lend()
        self._source.attach(self._lent.buffer)

    def _pack(self, bucket: int) -> None:
        self._source.pack(bucket)

    def _expect_empty(self, answer: bytes, what: str) -> None:
        if answer != b"":
            text = answer[-MAX_ANSWER_BYTES:].decode("utf-8", "replace").strip()
            raise TransportError(f"{self.peer} answered with an error, {what}: {text}")

    def close(self) -> None:
        """Gives the buffer back. Idempotent."""
        self._closed = True
        self._source.detach()
        self._lent.close()
