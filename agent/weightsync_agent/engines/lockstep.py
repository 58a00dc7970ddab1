"""A conversation of one question, one answer, over a Unix socket of one machine: verl's and checkpoint-engine's wire.

Their own ends wait without end. Here every wait has a deadline, and a peer that dies is noticed when it does, by the
socket's own events (ZeroMQ's monitor).
"""

from __future__ import annotations

import contextlib
import os
import socket as sockets
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..deadline import Deadline
from ..errors import ConfigError, JoinTimeout, StepTimeout, TransportError
from ..wire import HANDSHAKE_MILLISECONDS, readable
from .object_wire import MAX_MESSAGE_BYTES

MAX_PATH_BYTES = 107
"""sun_path of unix(7), less its end."""
CHECK_SECONDS = 0.1
CONNECT_AGAIN_SECONDS = 0.01
FLUSH_SECONDS = 2.0
"""How long the last message may take to be out when a socket is closed."""


class LeftEarly(TransportError):
    """A peer came and went without a word."""


class Lockstep:
    """One end. `asks`: binds and speaks first (REQ); `answers`: connects (REP). Either may come first."""

    def __init__(self, address: str, role: Literal["asks", "answers"], peer: str) -> None:
        """`address`: ipc://PATH or ipc://@NAME. `peer`: who is at the other end, for messages. Raises ConfigError."""
        self.peer = peer
        self.address = address
        self._path = _path(address)
        self._asks = role == "asks"
        self.check: Callable[[], None] | None = None
        """Called while waiting; raises where there is nothing to wait for any more."""
        self._peers = 0
        self._gone = False
        self._bound = False
        self._heard = False
        self._turn = self._asks
        self._open_again = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._open()
            if self._asks:
                self._bind()
            else:
                self._socket.connect(address)
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.REQ if self._asks else zmq.REP)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        # ZeroMQ must not connect again by itself: after the last answer that would be to the next step's socket, where
        # this one, which is about to close, would be taken for that step's receiver.
        self._socket.set(zmq.RECONNECT_IVL, -1)
        if not self._asks:
            self._socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | (0 if self._asks else zmq.EVENT_CLOSED)
        )
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def _connect_again(self) -> None:
        """Nobody listens there yet, or it was the socket of the step before."""
        self._open_again = 0.0
        self._close_socket(0)
        self._open()
        self._socket.connect(self.address)

    def _bind(self) -> None:
        if self._path is not None:
            _clear(self._path)
        try:
            self._socket.bind(self.address)
            self._bound = True
            if self._path is not None:
                self._path.chmod(0o600)  # to connect needs the right to write: nobody else's business
        except (zmq.ZMQError, OSError) as error:
            raise ConfigError(f"can't listen on {self.address} for {self.peer}: {error}") from None

    @property
    def gone(self) -> bool:
        """The peer was there, and has closed its socket or ended."""
        return self._gone

    @property
    def may_send(self) -> bool:
        """It is this end's turn."""
        return self._turn

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, frame: bytes, deadline: Deadline, what: str) -> None:
        """`what`: what this is about, for the sentence. Raises JoinTimeout while nobody came, TransportError."""
        while True:
            self._check(what)
            with contextlib.suppress(zmq.Again):
                self._socket.send(frame, zmq.NOBLOCK)
                self._turn = False
                return
            if deadline.passed:
                raise JoinTimeout(self._nobody(deadline))
            # Not writable yet: nobody is connected. The monitor tells when somebody is, a moment before the socket.
            self._poller.modify(self._socket, zmq.POLLOUT)
            self._poll(deadline.earlier(1.0))
            self._poller.modify(self._socket, zmq.POLLIN)

    def receive(self, deadline: Deadline, what: str) -> bytes:
        """The peer's next message. Raises StepTimeout, JoinTimeout while nobody came, TransportError when it dies."""
        while True:
            self._poll(deadline)
            # The message first: a peer may answer and close at once.
            with contextlib.suppress(zmq.Again):
                frame = self._socket.recv(zmq.NOBLOCK)
                self._turn = self._heard = True
                if not self._asks:
                    self._check_owner()
                return frame
            self._check(what)
            if deadline.passed:
                if self._peers == 0:
                    raise JoinTimeout(self._nobody(deadline))
                raise StepTimeout(
                    f"{self.peer} at {self.address} did not answer within {deadline.seconds:.3g} s, {what}: look at "
                    "its log; it may have failed without closing its socket, or still be loading"
                )

    def _nobody(self, deadline: Deadline) -> str:
        verb = "connected to" if self._asks else "spoken at"
        return (
            f"{self.peer} has not {verb} {self.address} within {deadline.seconds:.3g} s: start its update at the same "
            "time as this end's, and compare the socket's name on both sides"
        )

    def _poll(self, deadline: Deadline) -> None:
        seconds = min(deadline.remaining, 1000.0 if self.check is None else CHECK_SECONDS)
        if self._open_again:
            time.sleep(min(seconds, max(0.0, self._open_again - time.monotonic())))
            self._connect_again()
        ready = dict(self._poller.poll(round(seconds * 1000) + 1))
        while self._monitor in ready and readable(self._monitor):
            self._event(recv_monitor_message(self._monitor, zmq.NOBLOCK))

    def _event(self, event: Mapping[str, object]) -> None:
        if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._peers += 1
        elif self._heard or (self._asks and self._peers):
            self._gone = True
        elif not self._asks:
            self._peers, self._open_again = 0, time.monotonic() + CONNECT_AGAIN_SECONDS

    def _check(self, what: str) -> None:
        if self.check is not None:
            self.check()
        if self._gone:
            kind = TransportError if self._heard else LeftEarly
            raise kind(f"{self.peer} at {self.address} closed its socket or ended, {what}: its own log says why")
        if self._peers > 1:
            raise TransportError(
                f"{self._peers} peers are connected to {self.address}, and one is meant: messages would be dealt out "
                f"among them; give every {self.peer} a socket of its own"
            )

    def _check_owner(self) -> None:
        """A name in a folder that everybody may write to can be taken by anybody."""
        if self._path is not None and self._path.exists():
            owner = self._path.stat().st_uid
            if owner not in (os.geteuid(), 0):
                raise TransportError(
                    f"{self._path} belongs to user {owner}, not to {os.geteuid()}: nothing is read of it"
                )

    def close(self) -> None:
        """Waits for the last message to be out, FLUSH_SECONDS at most. Idempotent."""
        if self._socket.closed:
            return
        self._close_socket(0 if self._gone or not self._peers else round(FLUSH_SECONDS * 1000))
        self._context.term()
        if self._bound and self._path is not None:
            self._path.unlink(missing_ok=True)

    def _close_socket(self, linger_milliseconds: int) -> None:
        self._socket.set(zmq.LINGER, linger_milliseconds)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()


def _path(address: str) -> Path | None:
    """The socket's file; None for an abstract socket. Raises ConfigError."""
    name = address.removeprefix("ipc://")
    if name == address or not name or len(name.encode()) > MAX_PATH_BYTES:
        raise ConfigError(
            f"{address!r} is no Unix socket (ipc://PATH of at most {MAX_PATH_BYTES} bytes): this wire carries objects "
            "that are never read from a network"
        )
    return None if name.startswith("@") else Path(name)


def _clear(path: Path) -> None:
    """Removes the socket file that a dead process left. Raises ConfigError where it is no such thing."""
    try:
        status = path.lstat()
    except OSError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise ConfigError(f"{path} is there and is no socket: it is left alone; choose another name")
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise ConfigError(f"{path} is in use: another sender listens there, or a process that one forked; end it")
