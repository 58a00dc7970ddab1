"""The receiver: joins its sender whenever that is there, and takes each step in: copy, synchronise, release, ACK.

Its parts: a Dealer (the socket), a Membership (what it joined), and a StepReceiver (one step over the transport).
It has no thread: the engine's own loop calls `poll` or `wait`, and between two calls nothing of its weights moves.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Self

import torch
from weightsync_api.agent_config import AgentConfig
from weightsync_api.reports import AgentReport, AgentState, Report

from . import protocol
from .deadline import Deadline
from .dealer import Dealer
from .errors import Closed, Refused
from .identity import load_config, local_identity, rank_from_env
from .membership import Membership
from .memory import meter_for
from .protocol import Identity
from .receive_step import StepReceiver
from .standing import Standing
from .targets import LoadWeights, Target, TensorTarget, target_for

log = logging.getLogger("weightsync.receiver")

LOOK_SECONDS = 0.05
"""For so long each wait looks for a step, which is seen sooner than one that wakes a sleeping thread."""

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
        self.errors: Counter[str] = Counter()
        """Errors by kind since the start, for metrics: protocol, transport, verify, load, refused."""
        self._standing = Standing(
            local_identity(rank, self.device, pod, node), message="it has not reached its sender yet"
        )
        if self.device.type == "cuda":
            from .cuda.warm import warm

            warm(self.device)
        self._dealer = Dealer(config, self.errors, self._hello, self._lost)
        self._membership = membership = Membership(
            config, self.target, self.device, self._standing, self._dealer, self.errors
        )
        meter = meter_for(self.device, lambda: membership.owned_bytes)
        self._steps = StepReceiver(self._dealer, self._standing, meter, self.errors)

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
    def identity(self) -> Identity:
        return self._standing.identity

    @property
    def session(self) -> str:
        """Of the sender that it joined last; empty before."""
        return self._membership.session

    @property
    def route(self) -> str:
        """What the bytes really go through, such as SharedMemory, CUDA-IPC, P2P/CUMEM, NET/Socket."""
        return self._membership.route

    @property
    def ready(self) -> bool:
        """Holds the last step whole: may serve."""
        return self._standing.state == AgentState.SYNCED

    @property
    def pending(self) -> bool:
        """Something of the sender's is there to be taken in, most likely a step. For the thread that polls."""
        return self._dealer.pending

    @property
    def descriptors(self) -> tuple[int, int]:
        """Readable when something came: for another thread to wait on, which reads nothing. Edge-triggered (ZMQ_FD), so
        only what comes after a `look` that gave False is certain to show.
        """
        return self._dealer.descriptors

    @property
    def step(self) -> int:
        """The last step that it holds whole; 0: none yet."""
        return self._standing.step

    @property
    def broken(self) -> int:
        """Steps that broke off so far."""
        return self._steps.broken

    @property
    def broken_by(self) -> type[Exception] | None:
        """The kind of error that the last of them ended with here; Closed where the sender broke it off."""
        return self._steps.broken_by

    @property
    def state(self) -> AgentReport:
        """Identity, state and memory, for reports; any thread."""
        return self._standing.report()

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

        A step that broke off gives None too, at once: the receiver is then tainted (`ready` is False, `state.message`
        says why) until a later step is whole.

        Raises:
            ManifestMismatch, Refused, SelfTestFailed: this receiver can't join; nothing was written.
            Closed: the sender said goodbye, or this end was closed.
        """
        deadline = Deadline(timeout)
        self._mark()
        self._dealer.look_for(min(timeout, LOOK_SECONDS))
        return self._advance(deadline)

    def _advance(self, deadline: Deadline) -> int | None:
        broken = self.broken
        while True:
            message = self._dealer.take(deadline.remaining)
            if message is not None and (step := self._handle(message)) is not None:
                return step
            if self._membership.failure is not None:
                raise self._membership.failure
            # A target may have to put something in order before the next one comes.
            if self.broken != broken or (deadline.passed and message is None):
                return None

    def wait(self, timeout: float | None = None) -> int | None:
        """As `poll`, until a whole step came, or None after `timeout` seconds (None: no end)."""
        deadline = Deadline(timeout if timeout is not None else float("inf"))
        self._mark()
        self._dealer.look_for(min(deadline.remaining, LOOK_SECONDS))
        while True:
            step = self._advance(deadline.earlier(1.0))
            if step is not None or deadline.passed:
                return step

    def look(self) -> bool:
        """Whether a step has begun, which `wait` then takes in. Everything else that came is taken in, joining above
        all; no weights move. Raises what `poll` does.
        """
        while (message := self._dealer.take(0)) is not None or self._dealer.event_pending:
            if message is not None and self._opens_step(message):
                self._dealer.put_back(message, first=True)
                return True
            if message is not None:
                self._handle(message)
        if self._membership.failure is not None:
            raise self._membership.failure
        self._dealer.greet()
        return False

    def _opens_step(self, message: protocol.FromSender) -> bool:
        if isinstance(message, protocol.Regroup):
            return self._membership.transport is not None  # its group is made by all of an engine's workers at once
        if not isinstance(message, protocol.Begin):
            return False
        return self._membership.covers(message) and message.step > self._membership.begun

    def _mark(self) -> None:
        """The engine has stopped here: what it queued so far reads the old weights, and is let finish."""
        if self._membership.transport is not None:
            self._membership.transport.mark()

    def _handle(self, message: protocol.FromSender) -> int | None:
        """Gives a step's number where the message brought a whole one. Raises Closed at a goodbye."""
        if isinstance(message, protocol.Begin):
            return self._take_step(message)
        if isinstance(message, protocol.Welcome):
            self._membership.join(message)
        elif isinstance(message, protocol.Admitted):
            self._membership.admitted()
        elif isinstance(message, protocol.Regroup):
            self._membership.regroup(message)
        elif isinstance(message, protocol.Refuse):
            self._membership.refuse(Refused(f"the sender refused rank {self.identity.rank}: {message.reason}"))
        elif isinstance(message, protocol.Bye):
            raise Closed(message.reason or "the sender said goodbye")
        elif isinstance(message, protocol.Error):
            self.errors["protocol"] += 1
            log.error("the sender did not understand: %s", message.cause)
        # Bucket, Commit and Abort of a step that was given up, and Ping, need no answer.
        return None

    def _take_step(self, begin: protocol.Begin) -> int | None:
        membership = self._membership
        if membership.transport is None or not membership.covers(begin):
            cause = "it has not joined with this manifest: say Hello again"
            self._dealer.post(protocol.Error(step=begin.step, cause=cause))
            return None
        if begin.step <= membership.begun:
            return None  # it came both ways: see transport/mailbox.py
        membership.begun = begin.step
        return self._steps.receive(begin, membership.transport)

    # --- the connection -----------------------------------------------------------------------------------------

    def _hello(self) -> protocol.Hello:
        manifest = self._membership.manifest
        return protocol.Hello(
            protocol=protocol.PROTOCOL_VERSION,
            namespace=self.config.namespace,
            name=self.config.name,
            identity=self.identity,
            manifest_hash=manifest.hash if manifest else "",
            step=self.step,
        )

    def _lost(self) -> None:
        if self._steps.in_step:
            raise Closed("the sender's connection is gone: its process ended or its node is off")
        standing = self._standing
        if standing.state == AgentState.JOINED:
            standing.state, standing.message = AgentState.STARTING, "its sender is gone; it waits for the next one"

    def close(self, reason: str = "") -> None:
        """Releases every mapping and says goodbye. The target keeps its weights. Idempotent."""
        if self._dealer.closed:
            return
        self._membership.leave()
        self._dealer.close(reason)


def _device_of(target: Target) -> torch.device:
    if isinstance(target, TensorTarget):
        devices = {tensor.device for tensor in target.tensors.values()}
        if len(devices) == 1:
            return devices.pop()
    device = getattr(target, "device", None)
    return device if isinstance(device, torch.device) else torch.device("cpu")
