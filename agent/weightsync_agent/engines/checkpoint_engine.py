"""checkpoint-engine's worker protocol, either end: feeds `update_weights_from_ipc`, or is fed by a ParameterServer.

Tested with checkpoint-engine 0.4.2 (worker.py, ps.py): the server binds a REQ socket at
`ipc://@checkpoint-engine-{device uuid}-{counter}.sock`, the worker connects a REP one. A handle of the buffer, buckets
that alternate between its two halves, then None (release) and None (post hook); every answer is empty, or the text of
an error. The server answers an error by an exception as its next message.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping

import torch
from weightsync_api.reports import StepReport

from ..deadline import Deadline
from ..errors import StepTimeout, TransportError, WeightSyncError
from ..manifest import Manifest
from ..targets import LoadWeights, Target
from .bucket_messages import read_handle, read_payload, write_bucket, write_error, write_handle, write_none
from .bucket_receiver import BucketReceiver, Received
from .bucket_sender import BucketSender
from .lent_memory import Borrowed, borrow
from .lockstep import Lockstep
from .object_wire import PeerError, WireRefused

TESTED_VERSION = "0.4.2"

log = logging.getLogger(__name__)


class CheckpointEngineSender(BucketSender):
    """Feeds one worker's `update_weights_from_ipc`.

    `receiver`: the worker's device UUID, its key in the handles that it is given, such as GPU-<uuid>.

    Unlike checkpoint-engine's own server it looks at the answer to the last bucket too: a worker that fails there
    fails the step.
    """

    peer = "checkpoint-engine's worker"
    prefix = "checkpoint_engine"

    def step(self, request: Callable[[dict[str, str]], object]) -> StepReport:
        """Brings the weights as they are now to the worker; loaded there, post hook included, when it returns.

        `request`: has the engine call `update_weights_from_ipc` with these handles ({device uuid: socket}); it runs in
        a thread of its own, since engines answer when the update is done. What it raises fails the step.

        Raises JoinTimeout (no worker came), StepFailed, ConfigError, Closed.
        """
        socket = f"ipc://@checkpoint-engine-{self.receiver}-{secrets.token_hex(8)}.sock"
        self._request = _Request(request, {self.receiver: socket})
        return self._run(socket)

    def _converse(self, channel: Lockstep, deadline: Deadline, join: Deadline) -> None:
        self._lend()
        self._request.start()
        channel.check = self._request.check
        self._pack(0)
        channel.send(write_handle(self._handle), join, "before the first bucket")
        answer = channel.receive(join, "before the first bucket")
        if answer != b"":
            channel.send(b"", deadline, "opening the buffer")  # it waits for any word, and raises
            self._expect_empty(answer, "opening the buffer")
        self._lent.opened()
        last = self._source.buckets - 1
        for bucket in range(last + 1):
            what = f"bucket {bucket} of {last + 1}"
            self._lent.settle()
            channel.send(write_bucket(self._source.placed(bucket)), deadline, what)
            if bucket < last:
                self._pack(bucket + 1)  # into the other half, while the worker loads this one
            self._expect_empty(channel.receive(deadline, what), what)
        self._ask_for_none(channel, deadline, "releasing the buffer")
        self._ask_for_none(channel, deadline, "its post hook, after every tensor was loaded")
        self._over = True
        self._request.finish(deadline)

    def _ask_for_none(self, channel: Lockstep, deadline: Deadline, what: str) -> None:
        channel.send(write_none(), deadline, what)
        self._expect_empty(channel.receive(deadline, what), what)

    def _break_off(self, channel: Lockstep, deadline: Deadline) -> None:
        if not channel.may_send:
            channel.receive(deadline, "breaking off")
        channel.send(write_error("the sender broke this step off"), deadline, "breaking off")


class _Request:
    """The call that has the engine start its worker, in a thread of its own."""

    def __init__(self, request: Callable[[dict[str, str]], object], handles: dict[str, str]) -> None:
        self._call, self._handles = request, handles
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="weightsync-request", daemon=True)

    def start(self) -> None:
        """Once, whichever worker comes then."""
        if self._thread.ident is None:
            self._thread.start()

    def _run(self) -> None:
        try:
            self._call(self._handles)
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        """Raises TransportError with what the request raised: then no worker will come."""
        if self._error is not None:
            raise TransportError(f"the request to the engine failed: {type(self._error).__name__}: {self._error}")

    def finish(self, deadline: Deadline) -> None:
        """Raises StepTimeout, or TransportError with what the request raised."""
        self._thread.join(deadline.remaining)
        if self._thread.is_alive():
            raise StepTimeout(
                "the worker has every tensor, but the request to the engine did not return within "
                f"{deadline.seconds:.3g} s"
            )
        self.check()


class CheckpointEngineReceiver(BucketReceiver):
    """Fed by one ParameterServer, in the place of a worker's `update_weights_from_ipc`.

    Takes buckets at any offset: where the server's second half is not aligned (a PS_MAX_BUCKET_SIZE_GB that is no
    multiple of 256 bytes), the real worker can't load it, and this one does.
    """

    peer = "checkpoint-engine's server"

    def __init__(
        self,
        address: str,
        target: torch.nn.Module | Mapping[str, torch.Tensor] | LoadWeights | Target,
        *,
        post_hook: Callable[[], object] | None = None,
        allow_object_wire: bool = False,
        expect: Manifest | None = None,
        device: torch.device | None = None,
        atomic: bool = False,
        join_timeout_seconds: float = 120.0,
        step_timeout_seconds: float = 300.0,
    ) -> None:
        """`post_hook`: what the engine does once all is loaded. The rest: see BucketReceiver."""
        super().__init__(
            address,
            target,
            allow_object_wire=allow_object_wire,
            expect=expect,
            device=device,
            atomic=atomic,
            join_timeout_seconds=join_timeout_seconds,
            step_timeout_seconds=step_timeout_seconds,
        )
        self._post_hook = post_hook

    def _take_step(self, channel: Lockstep, join: Deadline) -> Received:
        first = channel.receive(join, "before the first bucket")
        deadline, began = Deadline(self._step_timeout), time.perf_counter()
        try:
            buffer = borrow(read_handle(first, self.peer), self._target.device, self.peer)
        except Exception as error:
            # The server takes this for its first bucket's answer, and answers with an exception.
            channel.send(_text(error), deadline, "opening the buffer")
            with contextlib.suppress(WeightSyncError):
                channel.receive(deadline.earlier(self._join_timeout), "opening the buffer")
            raise
        try:
            channel.send(b"", deadline, "opening the buffer")
            failure, buckets = self._take_buckets(channel, buffer, deadline)
        finally:
            buffer.close()
        channel.send(_text(failure), deadline, "releasing the buffer")
        # Still loading for the server, whatever came: it ends its step after one more answer, and looks at neither.
        try:
            end = read_payload(channel.receive(deadline, "waiting for the end"), self.peer)
            if failure is None and end is None and self._post_hook is not None:
                self._post_hook()
        except Exception as error:
            failure = failure or error.with_traceback(None)
        channel.send(_text(failure), deadline, "the end of the step")
        if failure is not None:
            raise failure
        duration = round((time.perf_counter() - began) * 1e6)
        return Received(self._step + 1, self._target.tensors, buckets, self._target.nbytes, duration)

    def _take_buckets(self, channel: Lockstep, buffer: Borrowed, deadline: Deadline) -> tuple[Exception | None, int]:
        failure: Exception | None = None
        buckets = 0
        while True:
            what = f"bucket {buckets}"
            message = channel.receive(deadline, what)
            try:
                payload = read_payload(message, self.peer)
            except WireRefused as refused:
                failure = failure or refused
                channel.send(_text(failure), deadline, what)
                continue
            if isinstance(payload, PeerError):
                raise failure or TransportError(f"{self.peer} gave the step up: {payload.text}")
            if payload is None:
                if failure is None:
                    failure = self._finish()
                return failure, buckets
            if failure is not None:
                # It does not look at the answer to its last bucket: what was wrong there is told again, to nobody.
                log.error("%s went on after an error: %s", self.peer, failure)
            else:
                try:
                    self._target.check(payload, buffer.nbytes, self.peer)
                    self._target.take(payload, buffer, what, self.peer)
                except Exception as error:  # load_weights may raise anything
                    failure = error.with_traceback(None)  # its frames would hold views of the buffer
            buckets += 1
            channel.send(_text(failure), deadline, what)

    def _finish(self) -> Exception | None:
        try:
            self._target.finish(self.peer)
        except Exception as error:
            return error
        return None


def _text(error: Exception | None) -> bytes:
    """The answer: empty, or why it failed."""
    return b"" if error is None else f"{type(error).__name__}: {error}"[:65536].encode()
