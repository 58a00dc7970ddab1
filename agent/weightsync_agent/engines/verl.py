"""verl's bucketed weight transfer, either end: ours feeds verl's receiver, or is fed by verl's sender.

Tested with verl 0.9.1 (workers/rollout/vllm_rollout/bucketed_weight_transfer.py): the sender binds a REQ socket, the
receiver connects a REP one, at `ipc:///tmp/rl-colocate-zmq-{job}-replica-{r}-rank-{local_rank}.sock`; every message is
answered by an empty one, the last of them once the receiver has let go of the buffer. Host memory by name
(`use_shm=True`), or CUDA IPC.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from weightsync_api.reports import StepReport

from ..deadline import Deadline
from ..errors import ManifestMismatch, StepTimeout, TransportError
from ..manifest import ALIGNMENT
from .bucket_messages import (
    FileHandle,
    Placed,
    read_verl_bucket,
    read_verl_start,
    write_handle,
    write_verl_bucket,
    write_verl_end,
    write_verl_start,
)
from .bucket_receiver import BucketReceiver, Received
from .bucket_sender import BucketSender
from .lent_memory import Borrowed, borrow
from .lockstep import Lockstep
from .object_wire import WireRefused

TESTED_VERSION = "0.9.1"


class VerlSender(BucketSender):
    """Feeds one `BucketedWeightReceiver`: of host memory where the weights are on the CPU (`use_shm=True` there), of
    CUDA memory where they are on a GPU.

    `receiver`: verl's `zmq_handle`, ipc://PATH.
    """

    peer = "verl's receiver"
    prefix = "verl_weights"

    def step(self) -> StepReport:
        """Brings the weights as they are now to verl's receiver; in place there when it returns.

        Raises JoinTimeout (no receiver came), StepFailed (it died, fell silent or answered otherwise; its `report`
        says which), ConfigError, Closed.
        """
        return self._run(self.receiver)

    def _converse(self, channel: Lockstep, deadline: Deadline, join: Deadline) -> None:
        self._lend()
        handle = self._handle
        start = write_verl_start(handle) if isinstance(handle, FileHandle) else write_handle(handle)
        channel.send(start, join, "before the first bucket")
        self._pack(0)
        self._expect_empty(channel.receive(join, "before the first bucket"), "opening the buffer")
        self._lent.opened()
        last = self._source.buckets - 1
        for bucket in range(last + 1):
            what = f"bucket {bucket} of {last + 1}"
            self._lent.settle()
            place, placed = self._source.start(bucket), self._source.placed(bucket)
            channel.send(write_verl_bucket(placed, place, bucket == last), deadline, what)
            if bucket < last:
                self._pack(bucket + 1)  # into the other half, while verl loads this one
            self._expect_empty(channel.receive(deadline, what), what)

    def _break_off(self, channel: Lockstep, deadline: Deadline) -> None:
        # verl's receiver waits for the next bucket without end; a message that is none makes it raise.
        if not channel.may_send:
            channel.receive(deadline, "breaking off")
        channel.send(write_verl_end(), deadline, "breaking off")


class VerlReceiver(BucketReceiver):
    """Fed by one `BucketedWeightSender`.

    verl's sender waits for every answer without end, and can't be told of a failure. So where a bucket does not fit or
    does not load, the rest of the step is taken in and dropped, the sender ends its step as ever, and `receive` raises
    here, where verl's rollout hears it.
    """

    peer = "verl's sender"

    def _take_step(self, channel: Lockstep, join: Deadline) -> Received:
        start = channel.receive(join, "before the first bucket")
        deadline, began = Deadline(self._step_timeout), time.perf_counter()
        buffer = borrow(read_verl_start(start), self._target.device, self.peer)
        try:
            channel.send(b"", deadline, "opening the buffer")
            failure, buckets, nbytes = self._take_buckets(channel, buffer, deadline)
        finally:
            buffer.close()
        # The last answer only now: verl gives the buffer back the moment that it comes.
        channel.send(b"", deadline, "the end of the step")
        if failure is None:
            self._target.finish(self.peer)
        else:
            raise failure
        duration = round((time.perf_counter() - began) * 1e6)
        return Received(self._step + 1, self._target.tensors, buckets, nbytes, duration)

    def _take_buckets(
        self, channel: Lockstep, buffer: Borrowed, deadline: Deadline
    ) -> tuple[Exception | None, int, int]:
        failure: Exception | None = None
        buckets = 0
        while True:
            what = f"bucket {buckets}" + (f" (after {type(failure).__name__}: {failure})" if failure else "")
            try:
                placed, start, is_last = read_verl_bucket(channel.receive(deadline, what))
            except (TransportError, StepTimeout) as error:
                if failure is not None and not isinstance(error, WireRefused):
                    raise failure from error
                raise
            if failure is None:
                try:
                    self._take_bucket(placed, start, buffer, what)
                except Exception as error:  # load_weights may raise anything
                    failure = error.with_traceback(None)  # its frames would hold views of the buffer
            buckets += 1
            if is_last:
                return failure, buckets, self._target.nbytes
            channel.send(b"", deadline, what)

    def _take_bucket(self, placed: Sequence[Placed], start: int, buffer: Borrowed, what: str) -> None:
        if (gap := _gap(placed, start)) is not None:
            raise ManifestMismatch(
                f"{what}: bytes {gap[0]} to {gap[1]} were packed and belong to no tensor: {self.peer} was given one "
                "name twice, and the later tensor took the place of the earlier in silence"
            )
        self._target.check(placed, buffer.nbytes, self.peer)
        self._target.take(placed, buffer, what, self.peer)


def _gap(placed: Sequence[Placed], start: int) -> tuple[int, int] | None:
    """Bytes from `start` on that no tensor of the bucket has, beyond what aligning explains.

    verl packs tensor behind tensor, each at a multiple of its own element's size; other senders of this wire at a
    multiple of ALIGNMENT at most. A name that comes twice has one place in verl's dict, and the bytes of two.
    """
    end = start
    for one in sorted((p for p in placed if p.handle is None and p.entry.nbytes), key=lambda p: p.offset):
        size = one.entry.torch_dtype.itemsize
        fits_size = one.offset - end < size and one.offset % size == 0
        fits_ours = one.offset - end < ALIGNMENT and one.offset % ALIGNMENT == 0
        if one.offset > end and not fits_size and not fits_ours:
            return end, one.offset
        end = max(end, one.offset + one.entry.nbytes)
    return None
