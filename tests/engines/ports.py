"""A port for a server that a test starts, which takes seconds until it listens: nobody else gets the port meanwhile."""

from __future__ import annotations

import socket

_held: list[socket.socket] = []


def reserve_port() -> int:
    """Kept as long as this process lives: by a socket that does not listen, beside which SO_REUSEADDR may bind and
    listen, as servers do. Whoever takes any free port, to connect from or to listen at, gets another.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _held.append(held)
    return int(held.getsockname()[1])
