"""One step, as the receiver follows it."""

from __future__ import annotations

from collections.abc import Callable

from .deadline import Deadline
from .errors import Closed, StepTimeout
from .protocol import Abort, Begin, Bucket, Commit, Drained, FromSender, Message

CHECK_SECONDS = 0.1


class ReceiverStepChannel:
    """The ReceiveChannel of transport/base.py.

    Args:
        take: waits up to so many seconds for one message; None when none came. Raises Closed when the sender is gone.
        started: called once, by `started`.
    """

    def __init__(
        self,
        begin: Begin,
        post: Callable[[Message], object],
        take: Callable[[float], FromSender | None],
        started: Callable[[], None],
    ) -> None:
        self.step = begin.step
        self.verify = begin.verify
        self.flag_base = begin.flag_base
        self.deadline = Deadline(begin.timeout_seconds)
        self.bucket: int | None = None
        """The bucket at work, for errors."""
        self.received = False
        """The step's data is all here."""
        self._post = post
        self._take = take
        self._started: Callable[[], None] | None = started
        self._slots: dict[int, int] = {}
        self._commit: Commit | None = Commit(step=begin.step, digests=begin.digests) if begin.whole else None

    def started(self) -> None:
        """Runs what has to run once a step and may overlap its copies. Again: nothing."""
        started, self._started = self._started, None
        if started is not None:
            started()

    def wait_bucket(self, bucket: int) -> int:
        self.bucket = bucket
        while bucket not in self._slots:
            self._wait_message(f"bucket {bucket}")
        return self._slots.pop(bucket)

    def wait_commit(self) -> Commit:
        """Raises StepTimeout, or Closed at an Abort."""
        self.bucket = None
        while self._commit is None:
            self._wait_message("the commit")
        return self._commit

    def drained(self, bucket: int) -> None:
        self._post(Drained(step=self.step, bucket=bucket))

    def check(self) -> None:
        while (message := self._take(0)) is not None:
            self._accept(message)

    def _wait_message(self, what: str) -> None:
        if self.deadline.passed:
            raise StepTimeout(f"step {self.step}: {what} did not come within {self.deadline.seconds:.3g} s")
        message = self._take(min(CHECK_SECONDS, self.deadline.remaining))
        if message is not None:
            self._accept(message)

    def _accept(self, message: FromSender) -> None:
        if isinstance(message, Abort) and message.step == self.step:
            raise Closed(f"step {self.step} was broken off by the sender: {message.cause}")
        if isinstance(message, Bucket) and message.step == self.step:
            self._slots[message.bucket] = message.slot
        elif isinstance(message, Commit) and message.step == self.step:
            self._commit = message
