"""Tells a process beside an engine that something came for the engine's receiver, so that it need not ask all the time.

Asking costs an engine: its scheduler stops for the answer, and with several workers so does what is on its way in them.
A thread in the worker waits on the receiver's descriptors instead, reads nothing from them, and rings once for each
`arm`. The line is a datagram socket in the abstract namespace of unix(7): no file, and nobody outside the pod reaches
it. A ring says nothing but "look".
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import threading
from collections.abc import Sequence
from typing import Self

CLOSE_SECONDS = 2.0


class Doorbell:
    """The worker's end.

    Args:
        descriptors: of the receiver; closed after this.
        name: the Bell's.
    """

    def __init__(self, descriptors: Sequence[int], name: str) -> None:
        self._name = name
        self._armed = threading.Event()
        self._closing = False
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._poller = select.poll()
        for descriptor in (*descriptors, self._end):
            self._poller.register(descriptor, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="weightsync-doorbell", daemon=True)
        self._thread.start()

    def arm(self) -> None:
        """Rings once for what comes from now on. To be called when nothing is there any more."""
        self._armed.set()

    def close(self) -> None:
        """Idempotent."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._end, 1)
        self._armed.set()
        self._thread.join(CLOSE_SECONDS)
        os.close(self._end)

    def _run(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.setblocking(False)
            while True:
                self._armed.wait()
                self._armed.clear()
                if not self._closing:
                    self._poller.poll()
                if self._closing:
                    return
                with contextlib.suppress(OSError):  # nobody listens, or rings enough wait
                    line.sendto(b"\n", _address(self._name))


class Bell:
    """The end of the process that is told."""

    def __init__(self) -> None:
        self.name = f"weightsync-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(_address(self.name))
        self._socket.setblocking(False)

    def wait(self, seconds: float) -> bool:
        """Whether it rang within `seconds`."""
        rang = bool(select.select([self._socket], [], [], seconds)[0])
        with contextlib.suppress(BlockingIOError):
            while rang:
                self._socket.recv(16)
        return rang

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _address(name: str) -> bytes:
    return b"\0" + name.encode()
