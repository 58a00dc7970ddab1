"""The sender: joins receivers at any time, and carries each step through: Begin, buckets, Commit, ACKs.

One thread at a time drives the ROUTER socket, under `_lock`: `step()` for the whole of a step, and between steps a
service thread that admits receivers as they come. Reports are published whole, so reading one never waits for a step.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Self

import torch
import zmq
from weightsync_api.agent_config import AgentConfig
from weightsync_api.reports import AgentReport, AgentState, MemorySample, Report, StepReport
from weightsync_api.v1alpha1.spec import TransferMode, Transport, VerifyMode

from . import protocol, wire
from .adopt import adopt as adopt_tensors
from .deadline import Deadline
from .errors import (
    Closed,
    ConfigError,
    JoinTimeout,
    StepFailed,
    StepTimeout,
    TransportError,
)
from .identity import load_config, local_identity
from .lobby import OF_JOINING, Lobby
from .memory import meter_for
from .peers import Peer
from .send_channel import StepChannel
from .sources.module import Gatherer, Weights, gatherer_for
from .step_log import StepLog
from .transport import Arena, make_arena, sender_transport
from .transport.base import SendPlan

PUBLISH_STEPS = 8
"""Steps that are so quick that as many pass between two looks of the service thread: readers must miss none of them."""

SPIN_SECONDS = 0.002
SPINS = (os.cpu_count() or 1) >= 4
"""Whether a core can be spared for waiting: the trainer's thread does nothing else within a step."""

MAX_TAKEN = 4096
"""Messages taken in at once: who floods the socket can't hold a step beyond its deadline."""

log = logging.getLogger("weightsync.sender")

SERVICE_SECONDS = 0.05
"""How often receivers that say Hello between steps are admitted. Waiting on the socket's file descriptor instead would
wake the service thread at every ACK, in the middle of the step's own thread."""


class Sender:
    """Sends a module's, a dict's or an iterator's tensors to every receiver, step by step.

    The tensors' addresses must stay; their values are read at `step()`. FSDP `DTensor`s are gathered bucket by bucket:
    then every rank of the trainer makes a Sender and calls `step()`, and rank 0 sends.

    Args:
        source: what to send, in this order.
        config: the AgentConfig of the WeightSync.
        adopt: moves the tensors into one shared arena (views; same values, same Parameter objects, ties kept), which
            lets receivers map them once and copy once a step.
        arena: the arena that already holds the tensors at `Manifest.arena_offsets`.
        dtype: send floating-point tensors converted to this dtype (float32 masters as bfloat16).

    Raises:
        ConfigError: the tensors and the configuration don't fit, or the endpoint is taken.
    """

    def __init__(
        self,
        source: Weights,
        *,
        config: AgentConfig,
        pod: str = "",
        node: str = "",
        adopt: bool = False,
        arena: Arena | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.config = config
        self.session = secrets.token_hex(8)
        self.errors: Counter[str] = Counter()
        """Errors by kind since the start, for metrics: protocol, refused, timeout, lost, transport, receiver."""
        self._gatherer: Gatherer = gatherer_for(source, dtype)
        self._pid = os.getpid()
        self._closed = False
        self._finished = False
        self._step = 0
        self._lock = threading.RLock()
        self._log = StepLog(config, self.session)
        self._unpublished = 0
        """Steps that the log does not tell yet: the service thread publishes them, off the step's path."""
        self._channel: StepChannel | None = None
        self._group: tuple[int, ...] = ()
        self._epoch = 0
        self._memory = MemorySample()
        self._tried_join = False
        if not self._gatherer.leads:
            return  # this trainer rank only helps to gather

        tensors = self._gatherer.tensors
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            raise ConfigError(f"the weights are on several devices ({', '.join(map(str, devices))}): move them to one")
        self.device = devices.pop() if devices else torch.device("cpu")
        self.manifest = self._gatherer.manifest
        self._tensors = tensors if self._gatherer.plain else []
        if not tensors:
            raise ConfigError("there are no weights to send: the source has no tensors")
        self._arena = arena
        if adopt and arena is None:
            if not self._gatherer.plain:
                raise ConfigError("adopt=True needs whole tensors of the dtype that is sent: no DTensors, no dtype=")
            self._arena = make_arena(self.device, self.manifest.arena_bytes)
            named = dict(zip(self._gatherer.names, tensors, strict=True))
            adopt_tensors(named, self.manifest, self._arena.tensor())
        self.identity = local_identity(0, self.device, pod, node)
        Path(config.runtime_dir).mkdir(parents=True, exist_ok=True)
        self._transport = sender_transport(
            config.transport,
            SendPlan(
                manifest=self.manifest,
                tensors=tensors,
                mode=self._mode(),
                bucket_bytes=config.bucket_bytes,
                slots=config.slots,
                runtime_dir=config.runtime_dir,
                device=self.device,
                interface=config.interface,
                collective_address=config.collective_address,
                arena=self._arena,
                gather=None if self._gatherer.plain else self._gatherer.gather,
            ),
        )
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._meter = meter_for(self.device, lambda: self._transport.owned_bytes)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = wire.authenticate(self._context, config.curve_dir)
        try:
            self._socket = wire.bind_router(self._context, config.bind, config.curve_dir)
        except ConfigError:
            self._transport.close()
            raise
        self._lobby = Lobby(config, self.session, self.manifest, self._transport, self._send, self.errors)
        self._publish()
        self._wake = threading.Event()
        self._service = threading.Thread(target=self._serve, name="weightsync-sender", daemon=True)
        self._service.start()

    @classmethod
    def from_env(cls, source: Weights, *, adopt: bool = False, dtype: torch.dtype | None = None) -> Self:
        """The Sender of this process' WeightSync, as `weightsync run` or the operator set it up.

        Also serves the agent's HTTP and ends with its runner. Raises ConfigError.
        """
        from .runtime import attach

        sender = cls(source, config=load_config(), adopt=adopt, dtype=dtype)
        if sender._gatherer.leads:
            attach(sender)
        return sender

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- a step -------------------------------------------------------------------------------------------------

    def step(self) -> StepReport:
        """Brings the weights as they are now to every receiver; in place at all of them when it returns.

        The first step waits for the receivers that the configuration expects. Never hangs: every wait has a deadline.

        Raises:
            JoinTimeout: no receiver is there.
            StepFailed: a receiver that was there did not acknowledge. Its `report` has the causes.
            ConfigError: a tensor is not where it was when the Sender was made; nothing was sent.
            Closed: this sender was closed, or is that of the process that this one was forked from.
        """
        if os.getpid() != self._pid:
            raise Closed(f"this sender is that of process {self._pid}, from which this one was forked: step there")
        if not self._gatherer.leads:
            self._gatherer.follow()
            return StepReport(step=0, started_at=datetime.now(UTC), duration_microseconds=0, bytes=0, complete=True)
        try:
            with self._lock:
                return self._lead()
        finally:
            self._gatherer.conclude()  # whatever became of the step, the trainer's other ranks go on

    def _lead(self) -> StepReport:
        if self._closed:
            raise Closed("this sender is closed")
        self._check_addresses()
        members = self._members()
        self._step = max(self._step, *(peer.step for peer in members)) + 1
        deadline = Deadline(self.config.step_timeout_seconds)
        channel = StepChannel(self._step, members, deadline, self._post, self._poll)
        started_at, began = datetime.now(UTC), time.perf_counter()
        if not self._transport.whole:
            self._meter.before()
        self._channel, self._lobby.in_step = channel, True
        unforeseen: BaseException | None = None
        try:
            self._carry(channel)
        except (TransportError, StepTimeout) as error:
            if not self._closed:
                self._break_off(channel, error)
        except BaseException as error:
            # Ctrl-C, or what gathering raised. The trainer may go on and write: nobody may call this step whole.
            unforeseen = error
            if not self._closed:
                cause = TransportError(f"step {channel.step} was interrupted by {type(error).__name__}: {error}")
                self._break_off(channel, cause)
        finally:
            self._channel, self._lobby.in_step = None, False
        if self._closed:  # by a signal's handler, in this very thread
            raise Closed(f"this sender was closed within step {channel.step}") from unforeseen
        duration = time.perf_counter() - began
        self._lobby.catch_up(self._step)
        try:
            report = self._conclude(channel, started_at, duration)
        except StepFailed as failure:
            if unforeseen is None or isinstance(unforeseen, Exception):
                raise failure from unforeseen
            raise unforeseen from None
        if unforeseen is not None:
            raise unforeseen
        return report

    def _check_addresses(self) -> None:
        """What was sent from an old address would be old bytes, or another's. Raises ConfigError."""
        now = [tensor.data_ptr() for tensor in self._tensors]
        if now == self._addresses:
            return
        moved = [n for n, a, b in zip(self._gatherer.names, now, self._addresses, strict=True) if a != b]
        raise ConfigError(
            f"{', '.join(moved[:20])}{f' and {len(moved) - 20} more' if len(moved) > 20 else ''} moved since the "
            "Sender was made (`param.data = ...`, `resize_`, `model.to(...)`), and nothing was sent: write weights in "
            "place (`param.data.copy_(...)`), or close this Sender and make another"
        )

    def _members(self) -> list[Peer]:
        """The receivers of the step that begins. Raises JoinTimeout."""
        self._take_all()
        if not self._tried_join:
            self._await_receivers()
        if self._transport.collective:
            # One that died since the last step is no part of this one: a collective would wait for it.
            for peer in self._lobby.present():
                if not self._post(peer, protocol.Ping()):
                    self._lost(peer)
        members = self._lobby.present()
        if not members:
            raise JoinTimeout(self._nobody())
        return members

    def _lost(self, peer: Peer) -> None:
        peer.state, peer.message = AgentState.LOST, "its connection is gone: the process ended or the node is off"
        self._lobby.forget(peer)

    def _carry(self, channel: StepChannel) -> None:
        config, transport, step = self.config, self._transport, channel.step
        verify = config.verify.mode == VerifyMode.DIGEST and (
            step % config.verify.every_steps == 0 or any(not p.verified_once for p in channel.members.values())
        )
        channel.verify = verify
        transport.fence()
        if transport.collective:
            self._regroup(channel)
        transport.open_step(step)
        digests = transport.digests() if verify and transport.whole else b""
        begin = protocol.Begin(
            step=step,
            manifest_hash=self.manifest.hash,
            verify=verify,
            whole=transport.whole,
            digests=digests,
            flag_base=transport.flag_base,
            timeout_seconds=max(channel.deadline.remaining, 0.001),
        )
        frame = protocol.encode(begin)
        for rank in channel.ranks:
            transport.lay(rank, frame)
        channel.begin(begin)
        if transport.whole:
            self._meter.before()  # while the receivers copy; nothing was allocated since the step began
        else:
            transport.send(channel)
            channel.post(protocol.Commit(step=step, digests=transport.digests() if verify else b""))
        channel.committed_at = time.perf_counter()
        channel.wait_acks(channel.deadline.earlier(config.ack_timeout_seconds))

    def _regroup(self, channel: StepChannel) -> None:
        """Makes the collective's group anew where its members changed or the last step broke in it.

        A receiver that is lost while the group is made leaves the step, and the others make another group.
        """
        deadline = channel.deadline.earlier(self.config.join_timeout_seconds)
        while (ranks := (0, *sorted(channel.ranks))) != self._group or self._transport.needs_regroup:
            if len(ranks) == 1:
                raise TransportError(f"step {channel.step}: every receiver was lost while the group was made")
            self._group = ()
            self._epoch += 1

            def check(ranks: tuple[int, ...] = ranks) -> None:
                channel.alive()
                if (0, *sorted(channel.ranks)) != ranks:
                    raise TransportError(f"step {channel.step}: a receiver was lost while the group was made")

            invitation = self._transport.regroup(self._epoch, ranks, deadline.remaining)
            channel.post(invitation)
            try:
                check()
                self._transport.connect(invitation, deadline, check)
                channel.wait_regrouped(self._epoch, deadline)
                check()
            except TransportError:
                self._transport.needs_regroup = True
                if (0, *sorted(channel.ranks)) == ranks:
                    raise
            else:
                self._group = ranks

    def _break_off(self, channel: StepChannel, error: TransportError | StepTimeout) -> None:
        """The step can't be completed: those who have not acknowledged are told to drop it, and are tainted."""
        timed_out = isinstance(error, StepTimeout)
        # First in shared memory, where it can't be late: the trainer may write as soon as step() returns.
        self._transport.close_step()
        self.errors["timeout" if timed_out else "transport"] += 1
        self._take_all()
        for rank in channel.ranks:
            if rank not in channel.acks:
                self._post(channel.members[rank], protocol.Abort(step=channel.step, cause=str(error)[:4096]))
                channel.fail(rank, AgentState.TAINTED, str(error))
        if self._transport.collective:
            self._transport.needs_regroup = True

    def _conclude(self, channel: StepChannel, started_at: datetime, duration: float) -> StepReport:
        self._memory = self._meter.after()
        for rank, ack in channel.acks.items():
            peer = channel.members[rank]
            peer.state, peer.message, peer.step = AgentState.SYNCED, "", channel.step
            peer.ack_microseconds, peer.memory = ack.ack_microseconds, ack.memory
            peer.verified_once |= ack.verified
        # A receiver that failed has left the group, also where that was after the last broadcast.
        self._transport.needs_regroup |= self._transport.collective and bool(channel.failed)
        for rank, failure in channel.failed.items():
            self.errors["lost" if failure.state == AgentState.LOST else "receiver"] += 1
            if failure.state == AgentState.LOST:
                self._lobby.forget(channel.members[rank])
        for peer in channel.absent:
            self._lost(peer)
        parts = channel.acks | channel.failed
        report = StepReport(
            step=channel.step,
            started_at=started_at,
            duration_microseconds=round(duration * 1e6),
            bytes=self.manifest.nbytes,
            memory=self._memory,
            receivers=[parts[rank] for rank in sorted(parts)],
            verified=bool(channel.acks) and all(ack.verified for ack in channel.acks.values()),
            complete=bool(channel.acks) and not channel.failed,
        )
        self._log.add(report)
        self._unpublished += 1
        if self._unpublished >= PUBLISH_STEPS:
            self._publish()
        if not report.complete:
            causes = "; ".join(f"{channel.members[r].label}: {f.error}" for r, f in sorted(channel.failed.items())[:20])
            raise StepFailed(
                f"WeightSync {self.config.namespace}/{self.config.name}: step {channel.step} reached "
                f"{len(channel.acks)} of {len(parts)} receivers; {causes}; the next step() sends everything again",
                report,
            )
        return report

    # --- joining ------------------------------------------------------------------------------------------------

    def _await_receivers(self) -> None:
        """The first step waits until every expected receiver joined, or goes on with those there at the deadline."""
        self._tried_join = True
        deadline = Deadline(self.config.join_timeout_seconds)
        while self._lobby.waits_for() and not deadline.passed:
            self._poll(min(0.1, deadline.remaining))
        for rank, reason in self._lobby.missing().items():
            log.warning("rank %d is not there: %s", rank, reason)

    def _nobody(self) -> str:
        told = "; ".join(f"rank {rank}: {reason}" for rank, reason in list(self._lobby.missing().items())[:20])
        return (
            f"WeightSync {self.config.namespace}/{self.config.name}: no receiver has joined at {self.config.bind} "
            f"within {self.config.join_timeout_seconds:g} s; {told or 'none is expected: spec.receivers.replicas is 0'}"
        )

    # --- the socket ---------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Admits receivers between steps. The lock is only tried: while a step runs, the step takes messages in."""
        while not self._wake.wait(SERVICE_SECONDS):
            if not self._lock.acquire(blocking=False):
                continue
            try:
                if self._closed:
                    return
                self._take_all()
                if self._unpublished:
                    self._publish()
            except zmq.ZMQError as error:
                log.error("the sender's socket failed, no receiver can join any more: %s", error)
                return
            except Exception:
                log.exception("a receiver's message could not be handled")
            finally:
                self._lock.release()

    def _poll(self, timeout: float) -> None:
        """Waits up to `timeout` seconds for a message and takes in all that are there."""
        if timeout > 0 and self._channel is not None and SPINS:
            # Waking a thread that sleeps takes longer than all else that a step costs beyond its copies.
            spin_until = time.perf_counter() + min(timeout, SPIN_SECONDS)
            while not self._readable() and time.perf_counter() < spin_until:
                if self._found(self._channel):
                    return
        if timeout <= 0 or self._readable() or self._socket.poll(max(1, round(timeout * 1000))):
            self._take_all()

    def _found(self, channel: StepChannel) -> bool:
        """Takes in what receivers laid where it is seen sooner than sent (transport/mailbox.py)."""
        any_found = False
        for rank in channel.ranks:
            if rank not in channel.acks and (frame := self._transport.find(rank)) is not None:
                with suppress(protocol.ProtocolError):  # torn or foolish: what counts comes over the socket too
                    any_found |= channel.take(channel.members[rank], protocol.decode_from_receiver(frame))
        return any_found

    def _readable(self) -> bool:
        """By the socket's own word: an empty receive raises, which takes ten times as long."""
        events = self._socket.get(zmq.EVENTS)
        return isinstance(events, int) and bool(events & zmq.POLLIN)

    def _take_all(self) -> None:
        for _ in range(MAX_TAKEN):
            if not self._readable():
                return
            self._take(self._socket.recv_multipart(zmq.NOBLOCK))

    def _take(self, frames: list[bytes]) -> None:
        address = frames[0]
        try:
            if len(frames) != 2:
                raise protocol.ProtocolError(f"{len(frames) - 1} frames instead of 1")
            message = protocol.decode_from_receiver(frames[1])
        except protocol.ProtocolError as error:
            self.errors["protocol"] += 1
            self._send(address, protocol.Error(cause=str(error)))
            return
        peer = self._lobby.at(address)
        if isinstance(message, OF_JOINING):
            self._lobby.take(address, message, self._step)
            self._publish()
        elif peer is None:
            log.debug("%s of an earlier sender's step, or of a receiver that was given up", message.kind)
        elif isinstance(message, protocol.Bye):
            self._bye(peer, message)
        elif self._channel is None or not self._channel.take(peer, message):
            # Late words of a step that was broken off: the receiver stays tainted until a whole step.
            log.debug("%s: %s for no step in progress", peer.label, message.kind)

    def _bye(self, peer: Peer, message: protocol.Bye) -> None:
        reason = f"it said goodbye: {message.reason}" if message.reason else "it said goodbye"
        if self._channel is not None and self._channel.members.get(peer.rank) is peer:
            self._channel.fail(peer.rank, AgentState.LOST, f"step {self._channel.step}: {reason}")
        if peer.state != AgentState.REFUSED:  # why it never joined says more than that it left
            peer.state, peer.message = AgentState.LOST, reason
        self._lobby.forget(peer)
        self._publish()

    def _post(self, peer: Peer, message: protocol.Message) -> bool:
        return self._send(peer.address, message)

    def _send(self, address: bytes, message: protocol.Message) -> bool:
        """False when the peer's connection is gone, or its queue is full because it stopped reading."""
        try:
            self._socket.send_multipart([address, protocol.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    # --- reports ------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """The kept steps and the agents as they are now. Never waits for a step; any thread."""
        if self._unpublished and self._lock.acquire(blocking=False):
            try:
                self._publish()
            finally:
                self._lock.release()
        return self._log.report()

    def wait_report(self, after: int, timeout: float) -> Report:
        """A report with a step above `after`, or whatever there is after `timeout` seconds; any thread."""
        return self._log.wait(after, timeout)

    def _publish(self) -> None:
        self._unpublished = 0
        last = self._log.last
        me = AgentReport(
            rank=0,
            pod=self.identity.pod,
            node=self.identity.node,
            pid=self.identity.pid,
            gpu=self.identity.gpu,
            state=AgentState.SYNCED if last else AgentState.JOINED,
            message="its last step did not reach every receiver" if last and not last.complete else "",
            step=self._log.last_complete,
            memory=self._memory,
        )
        peers = [self._lobby.peers[rank] for rank in sorted(self._lobby.peers)]
        self._log.publish(
            [me, *(peer.report() for peer in peers)],
            transport=self._transport.kind,
            mode=self._transport.plan.mode,
            route=self._transport.route,
            self_tested=bool(peers) and all(peer.joined for peer in peers),
            finished=self._finished,
        )

    # --- the end ------------------------------------------------------------------------------------------------

    def _mode(self) -> Literal["Direct", "Packed"]:
        wanted, shareable = self.config.mode, self._arena is not None or self.device.type == "cuda"
        if self.config.transport == Transport.NCCL:
            return "Direct" if wanted == TransferMode.DIRECT and self._gatherer.plain else "Packed"
        if wanted == TransferMode.DIRECT and not (shareable and self._gatherer.plain):
            raise ConfigError(
                "transfer.mode Direct needs weights in memory that can be shared, whole and in the dtype that is sent: "
                "pass adopt=True, or choose mode Auto or Packed"
            )
        return "Direct" if wanted != TransferMode.PACKED and shareable and self._gatherer.plain else "Packed"

    def finish(self) -> None:
        """Says in the report that no more steps come. `close` does so too."""
        if self._gatherer.leads and not self._finished:
            self._finished = True
            with self._lock:
                self._publish()

    def close(self, reason: str = "the sender has finished") -> None:
        """Says goodbye to every receiver and gives all memory back. Idempotent.

        In a process that was forked from the sender's it does nothing: sockets and receivers are the parent's.
        """
        if not self._gatherer.leads or os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for peer in self._lobby.present():
                self._post(peer, protocol.Bye(reason=reason))
            self._finished = True
            self._publish()
            self._socket.close()
            self._transport.close()
        self._wake.set()
        if threading.current_thread() is not self._service:
            self._service.join(timeout=2 * SERVICE_SECONDS)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
