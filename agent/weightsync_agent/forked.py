"""What a child that is forked and executes nothing (a DataLoader's worker) holds of a sender's connections: none.

A process's sockets are its forked children's too. While one of them lived, nobody else could bind the endpoint of a
sender that was killed, and its receivers would not see that it is gone. ZeroMQ closes its sockets on exec, and tells
nobody their numbers: they are found by where they are bound.
"""

from __future__ import annotations

import os
import socket as sockets
import weakref
from urllib.parse import urlsplit

import zmq

Place = str | bytes | tuple[str | None, int | None]
"""A path, an abstract name, or host and port: as `getsockname` gives them."""

_bound: weakref.WeakKeyDictionary[zmq.Socket[bytes], Place] = weakref.WeakKeyDictionary()


def let_go_in_children(socket: zmq.Socket[bytes]) -> None:
    """Children that are forked from now on keep neither this socket's listener nor its connections.

    `socket`: bound. No child may use it, nor its context.
    """
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    _bound[socket] = _place(endpoint.rstrip(b"\0").decode())


def _place(endpoint: str) -> Place:
    if endpoint.startswith("ipc://"):
        path = endpoint.removeprefix("ipc://")
        return f"\0{path[1:]}".encode() if path.startswith("@") else path
    parts = urlsplit(endpoint)
    return parts.hostname, parts.port


def _let_go() -> None:
    """In the child, where ZeroMQ has no threads: nobody waits on these numbers."""
    places = [place for socket, place in list(_bound.items()) if not socket.closed]
    if not places:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in map(int, os.listdir("/proc/self/fd")):
        if any(_is_at(number, place) for place in places):
            # Not closed: ZeroMQ still has the number, which could be another file's by then.
            os.dup2(null, number, inheritable=False)
    os.close(null)


def _is_at(number: int, place: Place) -> bool:
    """A listener, or a connection that it accepted."""
    try:
        found = sockets.socket(fileno=number)
    except OSError:  # no socket, or the listing's own number
        return False
    try:
        kind, name = found.type, found.getsockname()
    except OSError:  # a kind without names
        return False
    finally:
        found.detach()
    if kind != sockets.SOCK_STREAM:
        return False
    if isinstance(name, tuple) and isinstance(place, tuple):
        return name[1] == place[1] and (name[0] == place[0] or place[0] in ("::", "0.0.0.0"))
    return bool(name == place)


os.register_at_fork(after_in_child=_let_go)
