"""The sender: joins receivers at any time, and brings the trainer's weights to all of them at each step.

Its parts: a Router (the socket, and the thread that admits receivers between steps), a Lobby (who joined), a Carrier
(one step over the transport), and a Publisher. Reports are published whole, so reading one never waits for a step.
"""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Self

import torch
from weightsync_api.agent_config import AgentConfig
from weightsync_api.reports import AgentState, Report, StepReport
from weightsync_api.v1alpha1.spec import TransferMode, Transport

from . import protocol
from .addresses import Addresses, Moved
from .adopt import adopt as adopt_tensors
from .carrier import Carrier
from .deadline import Deadline
from .errors import (
    Closed,
    ConfigError,
    GatherFailed,
    JoinTimeout,
    StepFailed,
    StepTimeout,
    TransportError,
)
from .identity import load_config, local_identity
from .lobby import Lobby
from .memory import meter_for
from .names import NameRules
from .peers import Peer
from .relocation import Relocation
from .router import Absent, Router
from .send_channel import StepChannel
from .sources.gatherer import Gatherer
from .sources.module import Weights, gatherer_for
from .step_log import Publisher, StepLog
from .transport import Arena, make_arena, sender_transport
from .transport.base import SendPlan

MAX_REASON = 1000
"""Characters of a goodbye."""
_FINAL = (ConfigError, GatherFailed)
"""What the next step can't do better."""


class Sender:
    """Sends a module's, a dict's or an iterator's tensors to every receiver, step by step.

    Their values are read at `step()`, in place. Tensors that move are followed (relocation.py), in shape, dtype, device
    and ties as they were. FSDP `DTensor`s are gathered bucket by bucket:
    then every rank of the trainer makes a Sender and calls `step()`, and rank 0 sends.

    Args:
        source: what to send, in this order.
        config: the AgentConfig of the WeightSync.
        adopt: moves the tensors into one shared arena (views; same values, same Parameter objects, ties kept), which
            lets receivers map them once and copy once a step.
        arena: the arena that already holds the tensors at `Manifest.arena_offsets`.
        dtype: send floating-point tensors converted to this dtype (float32 masters as bfloat16).
        names: rules, or (pattern, replacement) pairs, that rename the tensors (see names.py); None: the
            configuration's.
        each_rank: every rank that shares the `DTensor`s sends, each to the receivers of its own configuration.

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
        names: NameRules | None = None,
        each_rank: bool = False,
    ) -> None:
        self.config = config
        self.session = secrets.token_hex(8)
        self.errors: Counter[str] = Counter()
        """Errors by kind since the start, for metrics: protocol, refused, timeout, lost, transport, receiver."""
        self._gatherer: Gatherer = gatherer_for(
            source, dtype, config.names if names is None else names, each_rank=each_rank
        )
        self._pid = os.getpid()
        self._step = 0
        self._log = StepLog(config, self.session, self._gatherer.renaming)
        self._tried_join = False
        if not self._gatherer.leads:
            return  # this trainer rank only helps to gather

        tensors = self._gatherer.tensors
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            raise ConfigError(f"the weights are on several devices ({', '.join(map(str, devices))}): move them to one")
        self.device = devices.pop() if devices else torch.device("cpu")
        self.manifest = self._gatherer.manifest
        if not tensors:
            raise ConfigError("there are no weights to send: the source has no tensors")
        self._arena = arena if not self._gatherer.dropped else None  # else tensors are elsewhere than it would say
        if adopt and arena is None:
            if not self._gatherer.plain:
                raise ConfigError("adopt=True needs tensors that are sent as they are: no DTensors, no dtype=, no LoRA")
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
                push=config.push,
                runtime_dir=config.runtime_dir,
                device=self.device,
                interface=config.interface,
                collective_address=config.collective_address,
                arena=self._arena,
                gather=None if self._gatherer.plain else self._gatherer.gather,
                computed=self._gatherer.computed,
            ),
        )
        self._addresses = Addresses(self._gatherer, self._arena.tensor() if self._arena is not None else None)
        transport = self._transport
        self._meter = meter_for(self.device, lambda: transport.owned_bytes)
        try:
            self._router = Router(config, self.errors)
        except BaseException:
            self._transport.close()
            raise
        lobby = Lobby(config, self.session, self.manifest, self._transport, self._router.send, self.errors)
        self._lobby = lobby
        self._carrier = Carrier(
            config, self.manifest, self._transport, self._addresses, self._meter, self._router, self.errors
        )
        self._relocation = Relocation(
            self._addresses, self._gatherer.names, transport, lobby, self._router, config.join_timeout_seconds
        )
        self._publisher = Publisher(self._log, self.identity, self._transport, lobby.peers)
        self._publisher.publish()
        self._router.start(lobby, self._transport, self._publisher)
        # Nothing that the service thread holds may hold this Sender, or it would never be collected.
        weakref.finalize(self, self._router.abandon).atexit = False

    @classmethod
    def from_env(
        cls,
        source: Weights,
        *,
        adopt: bool = False,
        dtype: torch.dtype | None = None,
        names: NameRules | None = None,
        each_rank: bool = False,
    ) -> Self:
        """The Sender of this process' WeightSync, as `weightsync run` or the operator set it up.

        Also serves the agent's HTTP and ends with its runner. Raises ConfigError.
        """
        from .runtime import attach

        sender = cls(source, config=load_config(), adopt=adopt, dtype=dtype, names=names, each_rank=each_rank)
        if sender._gatherer.leads:
            attach(sender)
        return sender

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is None:
            self.close()
        else:
            self.close(f"the sender ended with {kind.__name__}: {error}"[:MAX_REASON])

    # --- a step -------------------------------------------------------------------------------------------------

    @property
    def begun(self) -> int:
        """The number of the last step that began, whole or not; 0: none yet."""
        return self._step

    def step(self, *, absent: Absent = dict) -> StepReport:
        """Brings the weights as they are now to every receiver; in place at all of them when it returns.

        The first step waits for the receivers that the configuration expects: until each has joined, or can't because
        it does not fit. Never hangs: every wait has a deadline.

        Args:
            absent: asked within that wait, for ranks that won't join and why. For who drives the engines too.

        Raises:
            JoinTimeout: no receiver is there; the sentence has each one's reason. Where none can join, at once.
            StepFailed: a receiver that was there did not acknowledge. Its `report` has the causes.
            ConfigError: a tensor is not as it was when the Sender was made: its shape, dtype, device, or what it is
                tied to. The sentence says whether nothing was sent, or the step was broken off.
            GatherFailed: with FSDP2, on every rank that is left: a rank died, or the process group timed out.
            Closed: this sender was closed, or is that of the process that this one was forked from.
        """
        if os.getpid() != self._pid:
            raise Closed(f"this sender is that of process {self._pid}, from which this one was forked: step there")
        if not self._gatherer.leads:
            self._gatherer.refresh()
            self._gatherer.follow()
            return StepReport(step=0, started_at=datetime.now(UTC), duration_microseconds=0, bytes=0, complete=True)
        try:
            self._router.stepping = True
            with self._router.lock:
                return self._lead(absent)
        finally:
            self._router.stepping = False
            self._gatherer.conclude()  # whatever became of the step, the trainer's other ranks go on

    def _lead(self, absent: Absent) -> StepReport:
        if self._router.closed:
            raise Closed("this sender is closed")
        self._gatherer.refresh()
        if not self._carrier.checks_late:
            try:
                self._addresses.check("nothing was sent")
            except Moved as moved:
                self._relocation.follow(moved.indices)
        members = self._members(absent)
        deadline = Deadline(self.config.step_timeout_seconds)
        started_at, began = datetime.now(UTC), time.perf_counter()
        while (report := self._attempt(members, deadline, started_at, began)) is None:
            members = self._members(absent)
        return report

    def _attempt(
        self, members: list[Peer], deadline: Deadline, started_at: datetime, began: float
    ) -> StepReport | None:
        """A step to these receivers. None: tensors were found moved within it, so it is to come once more, whole."""
        router, carrier = self._router, self._carrier
        self._step = max(self._step, *(peer.step for peer in members)) + 1
        channel = StepChannel(self._step, members, deadline, router.post, router.poll)
        router.begin_step(channel)
        unforeseen: BaseException | None = None
        moved: Sequence[int] = ()
        try:
            carrier.carry(channel)
        except Moved as found:
            # What receivers have copied by now are old bytes: nothing of it was committed.
            if router.closed:
                pass
            elif deadline.passed:
                told = f"step {channel.step}: tensors moved again and again for {deadline.seconds:.3g} s"
                carrier.break_off(channel, StepTimeout(f"{told}: let nothing move them while step() runs"))
            else:
                moved = found.indices
                carrier.drop(channel, f"step {channel.step} comes again: tensors had moved")
        except (TransportError, StepTimeout) as error:
            if not router.closed:
                carrier.break_off(channel, error)
        except BaseException as error:
            # Ctrl-C, or what gathering raised. The trainer may go on and write: nobody may call this step whole.
            unforeseen = error
            if not router.closed:
                cause = TransportError(f"step {channel.step} was interrupted by {type(error).__name__}: {error}")
                carrier.break_off(channel, cause)
        finally:
            router.end_step()
        if router.closed:  # by a signal's handler, in this very thread
            raise Closed(f"this sender was closed within step {channel.step}") from unforeseen
        duration = time.perf_counter() - began
        router.catch_up(self._step)
        if moved:
            self._part(channel)
            self._relocation.follow(moved)
            return None
        try:
            report = self._conclude(channel, started_at, duration)
        except StepFailed as failure:
            if unforeseen is None or (isinstance(unforeseen, Exception) and not isinstance(unforeseen, _FINAL)):
                raise failure from unforeseen
            raise unforeseen from None
        if unforeseen is not None:
            raise unforeseen
        return report

    def _members(self, absent: Absent) -> list[Peer]:
        """The receivers of the step that begins. Raises JoinTimeout."""
        self._router.take_all()
        timeout, in_time = self.config.join_timeout_seconds, True
        if not self._tried_join:
            # The first step goes on with those there at the deadline, or once nobody else can come.
            in_time = self._router.await_receivers(timeout, absent)
        if self._transport.collective:
            # One that died since the last step is no part of this one: a collective would wait for it.
            for peer in self._lobby.present():
                if not self._router.post(peer, protocol.Ping()):
                    self._lobby.lost(peer)
        members = self._lobby.present()
        # Where all were refused at once, the next step still waits: for what takes their places.
        self._tried_join |= bool(members) or not in_time
        if not members:
            raise JoinTimeout(self._lobby.nobody(absent(), None if in_time else timeout))
        return members

    def _conclude(self, channel: StepChannel, started_at: datetime, duration: float) -> StepReport:
        self._publisher.memory = memory = channel.memory or self._meter.after()
        for rank, ack in channel.acks.items():
            peer = channel.members[rank]
            peer.state, peer.message, peer.step = AgentState.SYNCED, "", channel.step
            peer.ack_microseconds, peer.memory = ack.ack_microseconds, ack.memory
            peer.verified_once |= ack.verified
        # A receiver that failed has left the group, also where that was after the last broadcast.
        self._transport.needs_regroup |= self._transport.collective and bool(channel.failed)
        for failure in channel.failed.values():
            if failure.state != AgentState.LOST:
                self.errors["receiver"] += 1
        self._part(channel)
        parts = channel.acks | channel.failed
        report = StepReport(
            step=channel.step,
            started_at=started_at,
            duration_microseconds=round(duration * 1e6),
            bytes=self.manifest.nbytes,
            memory=memory,
            receivers=[parts[rank] for rank in sorted(parts)],
            verified=bool(channel.acks) and all(ack.verified for ack in channel.acks.values()),
            complete=bool(channel.acks) and not channel.failed,
        )
        self._publisher.add(report)
        if not report.complete:
            causes = "; ".join(f"{channel.members[r].label}: {f.error}" for r, f in sorted(channel.failed.items())[:20])
            raise StepFailed(
                f"WeightSync {self.config.namespace}/{self.config.name}: step {channel.step} reached "
                f"{len(channel.acks)} of {len(parts)} receivers; {causes}; the next step() sends everything again",
                report,
            )
        return report

    def _part(self, channel: StepChannel) -> None:
        """With those that the step found gone."""
        for rank, failure in channel.failed.items():
            if failure.state == AgentState.LOST:
                self.errors["lost"] += 1
                self._lobby.forget(channel.members[rank])
        for peer in channel.absent:
            self._lobby.lost(peer)

    # --- reports ------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """The kept steps and the agents as they are now. Never waits for a step; any thread."""
        if self._gatherer.leads and self._publisher.behind and self._router.pause():
            try:
                self._publisher.catch_up()
            finally:
                self._router.lock.release()
        return self._log.report()

    def wait_report(self, after: int, timeout: float) -> Report:
        """A report with a step above `after`, or whatever there is after `timeout` seconds; any thread."""
        return self._log.wait(after, timeout)

    # --- the end ------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Says in the report that no more steps come. `close` does so too."""
        if self._gatherer.leads and not self._publisher.finished:
            self._publisher.finished = True
            with self._router.lock:
                self._publisher.publish()

    def close(self, reason: str = "the sender has finished") -> None:
        """Says goodbye to every receiver and gives all memory back. Idempotent.

        In a process that was forked from the sender's it does nothing: sockets and receivers are the parent's.
        """
        if not self._gatherer.leads or os.getpid() != self._pid:
            return
        with self._router.lock:
            if self._router.closed:
                return
            self._router.farewell(reason)
            self._publisher.finished = True
            self._publisher.publish()
            self._transport.close()
            self._transport.let_go()
            self._addresses.let_go()
            self._arena = None
            self._gatherer.let_go()
        self._router.stop()
