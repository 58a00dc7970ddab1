"""The sender's end of the control wire: one ROUTER socket, and where each word that comes in over it goes.

Words of joining go to the lobby, those of a step to the channel of the step at work. One thread at a time drives the
socket, under `lock`: `Sender.step` for the whole of a step, and between steps a service thread that admits receivers as
they come.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping

import zmq
from weightsync_api.agent_config import AgentConfig
from weightsync_api.reports import AgentState

from . import protocol, wire
from .deadline import Deadline
from .lobby import OF_JOINING, Lobby
from .peers import Peer
from .send_channel import StepChannel
from .step_log import Publisher
from .transport.base import SenderTransport

SERVICE_SECONDS = 0.05
"""How often receivers that say Hello between steps are admitted. Waiting on the socket's file descriptor instead would
wake the service thread at every ACK, in the middle of the step's own thread."""

SPIN_SECONDS = 0.1
"""The trainer's thread does nothing else within a step."""

READ_SECONDS = 1.0
"""Longest wait of who only reads for the service thread, whose turns take microseconds where no receiver joins."""

MAX_TAKEN = 4096
"""Messages taken in at once: who floods the socket can't hold a step beyond its deadline."""

Absent = Callable[[], Mapping[int, str]]
"""Receivers' ranks that won't join, and why, by who drives their processes."""

log = logging.getLogger("weightsync.sender")


class Router:
    """Binds the configured endpoint at once; takes messages in from `start` on.

    Raises ConfigError: the endpoint can't be bound, or a key is missing.
    """

    def __init__(self, config: AgentConfig, errors: Counter[str]) -> None:
        self.lock = threading.RLock()
        self.stepping = False
        """Whether a step has `lock`, or waits for it."""
        self.closed = False
        self.lobby: Lobby
        self._name = f"{config.namespace}/{config.name}"
        self._pid = os.getpid()
        self._channel: StepChannel | None = None
        self._last_step = 0
        self._errors = errors
        self._transport: SenderTransport
        self._publisher: Publisher
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = wire.authenticate(self._context, config.curve_dir)
        try:
            self._socket = wire.bind_router(self._context, config.bind, config.curve_dir)
        except BaseException:
            self._end_zmq()
            raise
        self._abandoned = False
        self._wake = threading.Event()
        self._service = threading.Thread(target=self._serve, name="weightsync-sender", daemon=True)

    def start(self, lobby: Lobby, transport: SenderTransport, publisher: Publisher) -> None:
        """Receivers join from now on."""
        self.lobby, self._transport, self._publisher = lobby, transport, publisher
        self._service.start()

    # --- a step -------------------------------------------------------------------------------------------------

    def begin_step(self, channel: StepChannel) -> None:
        """Words of this step go to its channel; joining waits until it is over."""
        self._channel, self.lobby.in_step = channel, True

    def end_step(self) -> None:
        self._channel, self.lobby.in_step = None, False

    def catch_up(self, step: int) -> None:
        """After a step: takes in who came within it. `step`: the last one's number, which receivers are told."""
        self._last_step = step
        self.lobby.catch_up(step)

    def pause(self) -> bool:
        """Takes `lock`, which the caller then releases, unless a step is at work: readers never wait for one."""
        deadline = Deadline(READ_SECONDS)
        while not self.lock.acquire(timeout=0.01):
            if self.stepping or deadline.passed:
                return False
        return True

    def await_receivers(self, timeout: float, absent: Absent) -> bool:
        """Until no expected receiver may still join: each has, or was refused for good, or is one of `absent`.

        False: `timeout` seconds are over first.
        """
        deadline = Deadline(timeout)
        while (waits := self.lobby.waits_for(absent())) and not deadline.passed:
            self.poll(min(0.1, deadline.remaining))
        for rank, reason in self.lobby.missing(absent()).items():
            log.warning("rank %d is not there: %s", rank, reason)
        return not waits

    # --- out ----------------------------------------------------------------------------------------------------

    def post(self, peer: Peer, message: protocol.Message) -> bool:
        return self.send(peer.address, message)

    def send(self, address: bytes, message: protocol.Message) -> bool:
        """False when the peer's connection is gone, or its queue is full because it stopped reading."""
        try:
            self._socket.send_multipart([address, protocol.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    # --- in -----------------------------------------------------------------------------------------------------

    def poll(self, timeout: float) -> None:
        """Waits up to `timeout` seconds for a message and takes in all that are there."""
        if timeout > 0 and self._channel is not None and wire.SPARE_CORE:
            # Waking a thread that sleeps takes longer than all else that a step costs beyond its copies.
            spin_until = time.perf_counter() + min(timeout, SPIN_SECONDS)
            while not wire.readable(self._socket) and time.perf_counter() < spin_until:
                if self._found(self._channel):
                    return
                os.sched_yield()  # the trainer's other threads go first; sleeping for 0 s would take 75 us
        elif self._channel is not None and self._found(self._channel) and timeout > 0:
            return
        if timeout <= 0 or wire.readable(self._socket) or self._socket.poll(max(1, round(timeout * 1000))):
            self.take_all()

    def take_all(self) -> None:
        """Takes in what is there, without waiting."""
        for _ in range(MAX_TAKEN):
            if not wire.readable(self._socket):
                return
            self._take(self._socket.recv_multipart(zmq.NOBLOCK))

    def _found(self, channel: StepChannel) -> bool:
        """Takes in what receivers laid where it is seen sooner than sent (transport/mailbox.py)."""
        any_found = False
        for rank in channel.ranks:
            if rank in channel.acks or (message := self._transport.find(rank)) is None:
                continue
            if channel.take(channel.members[rank], message, self._transport.note(rank)):
                self._transport.took(rank)
                any_found = True
        return any_found

    def _take(self, frames: list[bytes]) -> None:
        address = frames[0]
        try:
            if len(frames) != 2:
                raise protocol.ProtocolError(f"{len(frames) - 1} frames instead of 1")
            message = protocol.decode_from_receiver(frames[1])
        except protocol.ProtocolError as error:
            self._errors["protocol"] += 1
            self.send(address, protocol.Error(cause=str(error)))
            return
        peer = self.lobby.at(address)
        if isinstance(message, OF_JOINING):
            self.lobby.take(address, message, self._last_step)
            self._publisher.publish()
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
        self.lobby.forget(peer)
        self._publisher.publish()

    # --- between steps, and the end -----------------------------------------------------------------------------

    def _serve(self) -> None:
        """Admits receivers between steps. The lock is only tried: while a step runs, the step takes messages in."""
        while not self._wake.wait(SERVICE_SECONDS) and not self._abandoned:
            if not self.lock.acquire(blocking=False):
                continue
            try:
                if self.closed:
                    return
                self.take_all()
                self._publisher.catch_up()
            except zmq.ZMQError as error:
                log.error("the sender's socket failed, no receiver can join any more: %s", error)
                return
            except Exception:
                log.exception("a receiver's message could not be handled")
            finally:
                self.lock.release()
        if self._abandoned and not self.closed:
            self.closed = True
            # As a crash would: receivers keep what they have, and wait for the next sender.
            self._socket.close(linger=0)
            self._transport.close()
            self._end_zmq()

    def abandon(self) -> None:
        """Nobody holds the sender any more: the service thread, which nothing else would end, gives everything back.

        For a finalizer, so it takes no lock: it may run in any thread, wherever that stands.
        """
        if self.closed or os.getpid() != self._pid:
            return
        warnings.warn(
            f"the Sender of WeightSync {self._name} was dropped without close()", ResourceWarning, stacklevel=2
        )
        self._abandoned = True
        self._wake.set()

    def farewell(self, reason: str) -> None:
        """Says goodbye to every receiver and closes the socket. Under `lock`, once; `stop` follows without it."""
        self.closed = True
        for peer in self.lobby.present():
            self.post(peer, protocol.Bye(reason=reason))
        self._socket.close()

    def stop(self) -> None:
        """Ends the service thread and gives ZeroMQ's threads back."""
        self._wake.set()
        if threading.current_thread() is not self._service:
            self._service.join(timeout=2 * SERVICE_SECONDS)
        self._end_zmq()

    def _end_zmq(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
