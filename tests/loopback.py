"""Addresses of loopback that are this process' own, and so is every port there.

A port that was probed and is bound a moment later may be somebody else's by then: another run's, or that of an outgoing
connection. Linux takes all of 127.0.0.0/8 for itself, and outgoing connections start at 127.0.0.1.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator

_held: list[socket.socket] = []


def _network() -> str:
    """Such as 127.11.200, and no other process' until this one ends."""
    while True:
        network = f"127.{1 + secrets.randbelow(254)}.{secrets.randbelow(256)}"
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0weightsync-tests-{network}")  # abstract names are a network namespace's, as addresses are
        except OSError:
            name.close()
            continue
        _held.append(name)
        return network


def _addresses() -> Iterator[str]:
    while True:
        network = _network()
        yield from (f"{network}.{n}" for n in range(1, 255))


addresses = _addresses()
