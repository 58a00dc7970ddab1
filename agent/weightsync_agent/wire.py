"""The ZeroMQ sockets of the control wire, with every option that matters set on purpose.

The sender binds a ROUTER, receivers connect a DEALER. Options: http://api.zeromq.org/4-3:zmq-setsockopt
"""

from __future__ import annotations

import os
import socket as sockets
from contextlib import closing
from pathlib import Path

import zmq
from zmq.auth import load_certificate
from zmq.auth.thread import ThreadAuthenticator

from .errors import ConfigError
from .forked import let_go_in_children
from .protocol import MAX_MESSAGE_BYTES

HEARTBEAT_MILLISECONDS = 2_000
DEAD_AFTER_MILLISECONDS = 10_000
"""A peer whose machine fell silent is disconnected after this long; a killed process, at once."""

HIGH_WATER_MARK = 1_000
"""Messages queued for one peer. A step queues as many as it has buckets in flight: a full queue is a stuck peer."""

LINGER_MILLISECONDS = 1_000
"""How long a closing socket still tries to deliver a Bye."""

GREETING_SECONDS = 2.0
"""How long an answer is waited for on a socket path that somebody listens at: ZMTP's greeting comes at once, and from a
process of its own I/O threads (https://rfc.zeromq.org/spec/23/)."""

HANDSHAKE_MILLISECONDS = 5_000
"""How long a receiver waits for the handshake at a Unix socket before it connects to what the path is by then; over a
network ZeroMQ's own 30 s stay. Threads of ZeroMQ's own shake hands, so that a sender at work answers in microseconds,
and one that is slower still is met at the next try. Nobody answers where the sender was killed and somebody else has
its listening socket (a fork that Python knows nothing of)."""

SPARE_CORE = (os.cpu_count() or 1) >= 4
"""Whether a core can be spared for looking for a message within a step, which takes it in sooner than who sleeps."""

SERVER_KEY, CLIENT_KEY = "sender", "receiver"
"""File names of the CURVE certificates in `curve_dir`: sender.key(_secret), receiver.key(_secret)."""


def bind_router(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, curve_dir: str) -> zmq.Socket[bytes]:
    """The sender's socket. Raises ConfigError when the endpoint can't be bound or a key is missing."""
    if endpoint.startswith("ipc://") and _answers(endpoint.removeprefix("ipc://")):
        raise ConfigError(
            f"the sender can't bind {endpoint}: it is in use by another sender; end that, or wait until it ends"
        )
    socket = context.socket(zmq.ROUTER)
    try:
        _serve_at(socket, endpoint, curve_dir)
        let_go_in_children(socket)
    except BaseException:
        socket.close(linger=0)
        raise
    return socket


def _serve_at(socket: zmq.Socket[bytes], endpoint: str, curve_dir: str) -> None:
    _common(socket)
    # A message to a peer that is gone raises (EHOSTUNREACH) instead of vanishing: this is how a dead receiver is seen.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if curve_dir:
        _, secret = _certificate(curve_dir, SERVER_KEY, secret=True)
        socket.curve_secretkey, socket.curve_publickey = secret, _certificate(curve_dir, SERVER_KEY)[0]
        socket.curve_server = True
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"the sender can't bind {endpoint}: {error.strerror}; is another sender running there?"
        ) from None


def _answers(path: str) -> bool:
    """Whether a sender serves a socket path: libzmq takes away a socket's file that is there, whoever listens at it.

    Who was killed doesn't answer, though somebody may still hold its listening socket (forked.py). A path that begins
    with @ is no file, and binding it fails by itself.
    """
    if path.startswith("@"):
        return False
    with closing(sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)) as probe:
        probe.settimeout(GREETING_SECONDS)
        try:
            probe.connect(path)
            return probe.recv(1) == b"\xff"
        except OSError:
            return False


def connect_dealer(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, curve_dir: str
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A receiver's socket, and the one that tells of its connections.

    Connecting goes on in the background, for ever. Raises ConfigError when a key is missing.
    """
    socket = context.socket(zmq.DEALER)
    _common(socket)
    # Not ZMQ_IMMEDIATE: with it libzmq drops what was received and not yet read when the connection ends, so that a
    # Bye is lost (socket_base_t::hiccuped). What is for a sender that isn't there the receiver itself doesn't send.
    socket.setsockopt(zmq.IMMEDIATE, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
    if endpoint.startswith("ipc://"):
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)
    if curve_dir:
        public, secret = _certificate(curve_dir, CLIENT_KEY, secret=True)
        socket.curve_publickey, socket.curve_secretkey = public, secret
        socket.curve_serverkey = _certificate(curve_dir, SERVER_KEY)[0]
    # Before connecting: a sender that is there already answers faster than a monitor set up afterwards.
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=0)
        raise ConfigError(f"the receiver can't connect to {endpoint!r}: {error.strerror}") from None
    return socket, monitor


def readable(socket: zmq.Socket[bytes]) -> bool:
    """By the socket's own word: an empty receive raises, which takes ten times as long."""
    events = socket.get(zmq.EVENTS)
    return isinstance(events, int) and bool(events & zmq.POLLIN)


def authenticate(context: zmq.Context[zmq.Socket[bytes]], curve_dir: str) -> ThreadAuthenticator | None:
    """Lets only the receivers' key in, by ZAP (https://rfc.zeromq.org/spec/27/). None without keys."""
    if not curve_dir:
        return None
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve(domain="*", location=curve_dir)
    return authenticator


def _common(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MILLISECONDS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, DEAD_AFTER_MILLISECONDS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, DEAD_AFTER_MILLISECONDS)
    socket.setsockopt(zmq.IPV6, 1)


def _certificate(directory: str, name: str, secret: bool = False) -> tuple[bytes, bytes | None]:
    path = Path(directory) / f"{name}.key{'_secret' if secret else ''}"
    try:
        return load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the CURVE key {path} can't be read: {error}") from None
