"""The receiver: joins its sender whenever that is there, and takes each step in: copy, synchronise, release, ACK.

It has no thread: the engine's own loop calls `poll` or `wait`, and between two calls nothing of its weights moves.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections import Counter, deque
from collections.abc import Mapping
from typing import Self

import torch
import zmq
from weightsync_api.agent_config import AgentConfig
from weightsync_api.reports import AgentReport, AgentState, MemorySample, Report
from zmq.utils.monitor import recv_monitor_message

from . import protocol, wire
from .collector import held_back
from .deadline import Deadline
from .digest import first_differences
from .errors import Closed, ManifestMismatch, Refused, SelfTestFailed, TransportError, VerifyFailed, WeightSyncError
from .identity import load_config, local_identity, rank_from_env
from .manifest import Manifest
from .memory import meter_for
from .receive_channel import ReceiverStepChannel
from .targets import LoadWeights, Target, TensorTarget, target_for
from .transport import receiver_transport
from .transport.base import ReceiverTransport

log = logging.getLogger("weightsync.receiver")

LOOK_SECONDS = 0.05
LOOKS = (os.cpu_count() or 1) >= 4
"""Whether a core can be spared for the first LOOK_SECONDS of each wait."""

SEEN_SECONDS = 1e-4
"""A sender that is looking takes an Ack in within 30 us."""

HELLO_SECONDS = 0.01
"""How soon a Hello that did not go out is tried again."""

JOIN_AGAIN_SECONDS = 2.0

Destination = torch.nn.Module | Mapping[str, torch.Tensor] | LoadWeights | Target


class Receiver:
    """Takes every step's weights into a module, a dict of tensors, or a `load_weights` callable.

    Args:
        target: where the weights go. A callable gets `list[(name, tensor)]`, a part of the step at a time, and must
            copy what it keeps: the tensors are staging memory.
        config: the AgentConfig of the WeightSync.
        rank: this receiver's rank, from 1.
        device: for a callable, the device its tensors come on; otherwise the target's own.
    """

    def __init__(
        self,
        target: Destination,
        *,
        config: AgentConfig,
        rank: int,
        pod: str = "",
        node: str = "",
        device: torch.device | None = None,
    ) -> None:
        self.config = config
        self.target = target_for(target)
        self.device = device or _device_of(self.target)
        self.identity = local_identity(rank, self.device, pod, node)
        self.errors: Counter[str] = Counter()
        """Errors by kind since the start, for metrics: protocol, transport, verify, load, refused."""
        self.session = ""
        self.route = ""
        self._state = AgentState.STARTING
        self._message = "it has not reached its sender yet"
        self._step = 0
        self._memory = MemorySample()
        self._manifest: Manifest | None = None
        self._transport: ReceiverTransport | None = None
        self._welcome: protocol.Welcome | None = None
        self._failure: WeightSyncError | None = None
        self._put_back: deque[protocol.FromSender] = deque()
        self._in_step = False
        self._owes_hello = False
        self._connected = False
        self._begun = 0
        """The last step that began with this sender, whole or not."""
        self._look_until = 0.0
        self._hello_after = 0.0
        if self.device.type == "cuda":
            from .cuda.warm import warm

            warm(self.device)
        self._meter = meter_for(self.device, lambda: self._transport.owned_bytes if self._transport else 0)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Every new connection is a sender that may be a new one: Hello goes first on each.
        self._socket, self._monitor = wire.connect_dealer(self._context, config.connect, config.curve_dir)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    @classmethod
    def from_env(cls, target: Destination, *, device: torch.device | None = None) -> Self:
        """The Receiver of this process' WeightSync, as `weightsync run` or the operator set it up.

        Also serves the agent's HTTP and ends with its runner. Raises ConfigError.
        """
        from .runtime import attach

        receiver = cls(target, config=load_config(), rank=rank_from_env(), device=device)
        attach(receiver)
        return receiver

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ready(self) -> bool:
        """Holds the last step whole: may serve."""
        return self._state == AgentState.SYNCED

    @property
    def pending(self) -> bool:
        """Something of the sender's is there to be taken in, most likely a step. For the thread that polls."""
        return bool(self._put_back) or (not self._socket.closed and _readable(self._socket))

    @property
    def descriptors(self) -> tuple[int, int]:
        """Readable when something came: for another thread to wait on, which reads nothing. Edge-triggered (ZMQ_FD), so
        only what comes after a `look` that gave False is certain to show.
        """
        return self._socket.getsockopt(zmq.FD), self._monitor.getsockopt(zmq.FD)  # type: ignore[return-value]

    @property
    def step(self) -> int:
        """The last step that it holds whole; 0: none yet."""
        return self._step

    @property
    def state(self) -> AgentReport:
        """Identity, state and memory, for reports; any thread."""
        identity = self.identity
        return AgentReport(
            rank=identity.rank,
            pod=identity.pod,
            node=identity.node,
            pid=identity.pid,
            gpu=identity.gpu,
            state=self._state,
            message=self._message[:4096],
            step=self._step,
            memory=self._memory,
        )

    def report(self) -> Report:
        """A Report of this receiver alone; any thread."""
        return Report(
            namespace=self.config.namespace,
            name=self.config.name,
            uid=self.config.uid,
            session=self.session,
            transport=self.config.transport,
            route=self.route,
            agents=[self.state],
        )

    # --- the engine's loop --------------------------------------------------------------------------------------

    def poll(self, timeout: float = 0) -> int | None:
        """Takes in a step if one begins within `timeout` seconds; gives its number once it is whole, else None.

        A step that broke off gives None too: the receiver is then tainted (`ready` is False, `state.message` says
        why) until a later step is whole.

        Raises:
            ManifestMismatch, Refused, SelfTestFailed: this receiver can't join; nothing was written.
            Closed: the sender said goodbye, or this end was closed.
        """
        deadline = Deadline(timeout)
        self._mark()
        self._look_until = time.perf_counter() + min(timeout, LOOK_SECONDS if LOOKS else 0)
        return self._advance(deadline)

    def _advance(self, deadline: Deadline) -> int | None:
        while True:
            message = self._take(deadline.remaining)
            if message is not None and (step := self._handle(message)) is not None:
                return step
            if self._failure is not None:
                raise self._failure
            if deadline.passed and message is None:
                return None

    def wait(self, timeout: float | None = None) -> int | None:
        """As `poll`, until a whole step came, or None after `timeout` seconds (None: no end)."""
        deadline = Deadline(timeout if timeout is not None else float("inf"))
        self._mark()
        self._look_until = time.perf_counter() + min(deadline.remaining, LOOK_SECONDS if LOOKS else 0)
        while True:
            step = self._advance(deadline.earlier(1.0))
            if step is not None or deadline.passed:
                return step

    def look(self) -> bool:
        """Whether a step has begun, which `wait` then takes in. Everything else that came is taken in, joining above
        all; no weights move. Raises what `poll` does.
        """
        while (message := self._take(0)) is not None or _readable(self._monitor):
            if message is not None and self._opens_step(message):
                self._put_back.appendleft(message)
                return True
            if message is not None:
                self._handle(message)
        if self._failure is not None:
            raise self._failure
        if self._owes_hello and time.monotonic() >= self._hello_after:
            self._say_hello()
        return False

    def _opens_step(self, message: protocol.FromSender) -> bool:
        transport = self._transport
        if isinstance(message, protocol.Regroup):
            return transport is not None  # its group is made by all of an engine's workers at once
        if not isinstance(message, protocol.Begin) or transport is None:
            return False
        return message.manifest_hash == transport.manifest.hash and message.step > self._begun

    def _mark(self) -> None:
        """The engine has stopped here: what it queued so far reads the old weights, and is let finish."""
        if self._transport is not None:
            self._transport.mark()

    def _take(self, timeout: float) -> protocol.FromSender | None:
        """One message, or None. Raises Closed when this end is closed or, within a step, when the sender is gone."""
        if self._socket.closed:
            raise Closed("this receiver is closed")
        if self._put_back:
            return self._put_back.popleft()
        # The socket first: a message that is there costs no poll.
        frame = self._receive()
        if frame is None and timeout > 0:
            frame = self._look()
        if frame is None:
            if self._owes_hello and time.monotonic() >= self._hello_after:
                self._say_hello()
            timeout = min(timeout, HELLO_SECONDS) if self._owes_hello else timeout
            if timeout > 0:
                self._poller.poll(max(1, round(timeout * 1000)))
            if _readable(self._monitor):
                self._connection(recv_monitor_message(self._monitor, zmq.NOBLOCK))
            frame = self._receive()
        if frame is None:
            return None
        try:
            return protocol.decode_from_sender(frame)
        except protocol.ProtocolError as error:
            self.errors["protocol"] += 1
            self._post(protocol.Error(cause=str(error)))
            return None

    def _look(self) -> bytes | None:
        """For the first moments of a wait, looks where the sender lays a Begin, which is seen sooner than one sent."""
        while self._transport is not None and time.perf_counter() < self._look_until:
            if (frame := self._transport.find()) is not None:
                return frame
            if _readable(self._socket):
                return self._receive()
            if _readable(self._monitor):
                return None
            time.sleep(0)  # the engine's other threads go first
        return None

    def _receive(self) -> bytes | None:
        if not _readable(self._socket):
            return None
        frames = self._socket.recv_multipart(zmq.NOBLOCK)
        return frames[0] if len(frames) == 1 else b""

    def _post(self, message: protocol.Message) -> bool:
        """False when there is no sender to hear it: the next one gets a Hello, and nothing of what was for the last."""
        if not self._connected:
            return False
        try:
            self._socket.send(protocol.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _connection(self, event: Mapping[str, object]) -> None:
        if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._owes_hello, self._hello_after, self._connected = True, 0.0, True
            return
        self._owes_hello = self._connected = False
        if self._in_step:
            raise Closed("the sender's connection is gone: its process ended or its node is off")
        if self._state == AgentState.JOINED:
            self._state, self._message = AgentState.STARTING, "its sender is gone; it waits for the next one"

    def _say_hello(self) -> None:
        """The event of a connection comes a moment before the socket can send over it: tried until it is out."""
        self._owes_hello = not self._post(
            protocol.Hello(
                protocol=protocol.PROTOCOL_VERSION,
                namespace=self.config.namespace,
                name=self.config.name,
                identity=self.identity,
                manifest_hash=self._manifest.hash if self._manifest else "",
                step=self._step,
            )
        )

    def _handle(self, message: protocol.FromSender) -> int | None:
        if isinstance(message, protocol.Begin):
            return self._take_step(message)
        if isinstance(message, protocol.Welcome):
            self._join(message)
        elif isinstance(message, protocol.Admitted):
            if self._state in (AgentState.STARTING, AgentState.REFUSED):
                self._state, self._message = AgentState.JOINED, "it holds no whole step yet"
        elif isinstance(message, protocol.Regroup):
            self._regroup(message)
        elif isinstance(message, protocol.Refuse):
            self._refused(Refused(f"the sender refused rank {self.identity.rank}: {message.reason}"))
        elif isinstance(message, protocol.Bye):
            raise Closed(message.reason or "the sender said goodbye")
        elif isinstance(message, protocol.Error):
            self.errors["protocol"] += 1
            log.error("the sender did not understand: %s", message.cause)
        # Bucket, Commit and Abort of a step that was given up, and Ping, need no answer.
        return None

    # --- joining ------------------------------------------------------------------------------------------------

    def _join(self, welcome: protocol.Welcome) -> None:
        if welcome.manifest is not None:
            self._manifest = welcome.manifest
        if self._manifest is None or self._manifest.hash != welcome.manifest_hash:
            self._refused(Refused("the sender's manifest does not have the hash that it announced"))
            return
        self._drop_transport()
        self._begun = 0
        deadline = Deadline(self.config.join_timeout_seconds)
        began = time.perf_counter()
        try:
            with held_back():
                self.target.bind(self._manifest)
                bound = time.perf_counter()
                self._transport = receiver_transport(welcome, self._manifest, self.target, self.config, self.device)
                joined = self._transport.join(deadline)
            log.debug(
                "rank %d: %d tensors fit, found in %.3f s; memory mapped and copies planned in %.3f s",
                *(self.identity.rank, len(self._manifest.tensors), bound - began, time.perf_counter() - bound),
            )
        except ManifestMismatch as mismatch:
            self._post(protocol.Differs(differences=str(mismatch)[:65536], offer_number=welcome.offer_number))
            self._refused(mismatch)
            return
        except SelfTestFailed as error:
            self._drop_transport()
            self._post(protocol.Differs(differences=f"self-test: {error}"[:65536], offer_number=welcome.offer_number))
            self._refused(error)
            return
        except TransportError as error:
            # The sender may be gone, or just busy: nothing is wrong with this receiver for good.
            self._drop_transport()
            self.errors["transport"] += 1
            self._state, self._message = AgentState.STARTING, f"joining failed and is tried again: {error}"
            log.warning("rank %d: %s", self.identity.rank, self._message)
            self._post(
                protocol.Differs(differences=self._message[:65536], offer_number=welcome.offer_number, retry=True)
            )
            self._owes_hello, self._hello_after = True, time.monotonic() + JOIN_AGAIN_SECONDS
            return
        self.session, self.route, self._welcome = welcome.session, joined.route, welcome
        if self._hello_after:  # a new offer came before the Hello that was to ask for one
            self._owes_hello, self._hello_after = False, 0.0
        self._post(joined.model_copy(update={"offer_number": welcome.offer_number}))

    def _refused(self, error: WeightSyncError) -> None:
        self.errors["refused"] += 1
        self._state, self._message = AgentState.REFUSED, str(error)
        self._failure = error

    def _regroup(self, message: protocol.Regroup) -> None:
        if self._transport is None:
            return

        def check() -> None:
            newer = self._take(0)
            if newer is not None and not isinstance(newer, protocol.Ping):
                self._put_back.append(newer)
                raise Closed(f"the sender gave group {message.epoch} up")
            if not self._connected:
                raise Closed("the sender's connection is gone")

        try:
            deadline = Deadline(message.timeout_seconds)
            regrouped = self._transport.regroup(message, self.identity.rank, deadline, check)
        except WeightSyncError as error:
            self.errors["transport"] += 1
            log.error("rank %d: group %d failed: %s", self.identity.rank, message.epoch, error)
            return
        self.route = regrouped.route
        self._post(regrouped)

    # --- a step -------------------------------------------------------------------------------------------------

    def _take_step(self, begin: protocol.Begin) -> int | None:
        transport = self._transport
        if transport is None or begin.manifest_hash != transport.manifest.hash:
            self._post(protocol.Error(step=begin.step, cause="it has not joined with this manifest: say Hello again"))
            return None
        if begin.step <= self._begun:
            return None  # it came both ways: see transport/mailbox.py
        self._begun = begin.step
        began = time.perf_counter()
        sampled: list[MemorySample] = []

        def started() -> None:
            self._meter.before()
            if transport.settled and not begin.verify:
                sampled.append(self._meter.after())

        channel = ReceiverStepChannel(begin, self._post, self._take, started)
        # From here on bytes land: whatever happens, the weights are mixed until the step is whole.
        self._state, self._message = AgentState.TAINTED, f"step {begin.step} is on its way"
        self._in_step = True
        try:
            transport.receive(channel)
            commit = channel.wait_commit()
            if begin.verify:
                self._verify(transport, commit)
        except Closed as closed:
            self._broken(begin.step, str(closed))
            return None
        except Exception as error:  # an engine's load_weights may raise anything; the sender has to know
            verified_wrong = isinstance(error, VerifyFailed)
            self.errors[
                "verify" if verified_wrong else "transport" if isinstance(error, TransportError) else "load"
            ] += 1
            cause = f"{type(error).__name__}: {error}"
            # As text: a handler that keeps the record would keep the traceback's frames, and with them the views.
            trace = "".join(traceback.format_exception(error))
            log.error("rank %d: step %d failed: %s", self.identity.rank, begin.step, trace)
            self._post(protocol.Error(step=begin.step, bucket=channel.bucket, cause=cause[:65536]))
            self._broken(begin.step, cause)
            return None
        finally:
            self._in_step = False
        self._memory = sampled[0] if sampled else self._meter.after()
        self._state, self._message, self._step = AgentState.SYNCED, "", begin.step
        ack = protocol.Ack(
            step=begin.step,
            load_microseconds=round((time.perf_counter() - began) * 1e6),
            verified=begin.verify,
            memory=self._memory,
        )
        transport.lay(protocol.encode(ack))
        if not self._seen(transport):
            self._post(ack)
        return begin.step

    @staticmethod
    def _seen(transport: ReceiverTransport) -> bool:
        """Whether the sender was looking where the Ack was laid."""
        until = time.perf_counter() + SEEN_SECONDS if LOOKS else 0.0
        while time.perf_counter() < until:
            if transport.taken():
                return True
        return False

    def _verify(self, transport: ReceiverTransport, commit: protocol.Commit) -> None:
        mine = transport.digests()
        if mine != commit.digests:
            names = [entry.name for entry in transport.manifest.tensors]
            differing = first_differences(mine, commit.digests, names)
            raise VerifyFailed(f"the bytes of {', '.join(differing)} differ from the sender's")

    def _broken(self, step: int, cause: str) -> None:
        self._memory = self._meter.after()
        self._message = f"step {step} broke off: {cause}"

    # --- the end ------------------------------------------------------------------------------------------------

    def _drop_transport(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def close(self, reason: str = "") -> None:
        """Releases every mapping and says goodbye. The target keeps its weights. Idempotent."""
        if self._socket.closed:
            return
        self._drop_transport()
        self._post(protocol.Bye(reason=reason))
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()


def _readable(socket: zmq.Socket[bytes]) -> bool:
    """By the socket's own word: an empty receive raises, which takes ten times as long."""
    events = socket.get(zmq.EVENTS)
    return isinstance(events, int) and bool(events & zmq.POLLIN)


def _device_of(target: Target) -> torch.device:
    if isinstance(target, TensorTarget):
        devices = {tensor.device for tensor in target.tensors.values()}
        if len(devices) == 1:
            return devices.pop()
    device = getattr(target, "device", None)
    return device if isinstance(device, torch.device) else torch.device("cpu")
