"""File descriptors from the sender to one receiver, over a Unix socket (SCM_RIGHTS, unix(7)).

A descriptor is memory's passport: it needs no name, no common namespace and no common user, and when the last process
that holds it is gone, however it died, the kernel frees the memory. Only the folder with the socket is shared.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..deadline import Deadline
from ..errors import ConfigError, TransportError

MAX_PATH_BYTES = 107
"""sun_path of sockaddr_un, without its closing zero."""

MAX_DESCRIPTORS = 64
TOKEN_CHARACTERS = 64
PEER_SECONDS = 1.0
"""A connected receiver has this long to say its token: it does so in its first packet."""


class DescriptorServer:
    """Hands out descriptors to whoever shows the token they were laid out under, once.

    The descriptors stay the caller's: the kernel duplicates them for the receiver.
    """

    def __init__(self, directory: str) -> None:
        self.path = str(Path(directory) / "descriptors.sock")
        if len(self.path.encode()) > MAX_PATH_BYTES:
            raise ConfigError(f"the runtime directory {directory} is too long for a Unix socket: choose a shorter one")
        self._laid_out: dict[str, tuple[int, ...]] = {}
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with suppress(FileNotFoundError):
            os.unlink(self.path)  # of an earlier sender of this very directory
        try:
            self._listener.bind(self.path)
        except OSError as error:
            self._listener.close()
            raise ConfigError(f"the sender can't listen at {self.path}: {error.strerror}") from None
        self._listener.listen(128)
        self._thread = threading.Thread(target=self._serve, name="weightsync-descriptors", daemon=True)
        self._thread.start()

    def lay_out(self, descriptors: Sequence[int]) -> str:
        """The token that fetches these descriptors. Raises ValueError beyond MAX_DESCRIPTORS."""
        if not 0 < len(descriptors) <= MAX_DESCRIPTORS:
            raise ValueError(f"{len(descriptors)} descriptors; 1 to {MAX_DESCRIPTORS} can be passed at once")
        token = secrets.token_hex(TOKEN_CHARACTERS // 2)
        with self._lock:
            self._laid_out[token] = tuple(descriptors)
        return token

    def withdraw(self, token: str) -> None:
        """The token fetches nothing any more. Harmless when it was used."""
        with self._lock:
            self._laid_out.pop(token, None)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(timeout=PEER_SECONDS)
        with suppress(FileNotFoundError):
            os.unlink(self.path)

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ECONNABORTED):
                    return  # closed
                time.sleep(0.1)  # no descriptor is free at the moment: the peer waits in the backlog
                continue
            with peer, suppress(OSError):
                token = _read_exactly(peer, TOKEN_CHARACTERS, Deadline(PEER_SECONDS)).decode("ascii", "replace")
                # Sent under the lock: withdrawn ones may be closed right after, and their numbers be other files'.
                with self._lock:
                    # A random key of 256 bits: a dictionary's look-up gives nothing away that could be guessed along.
                    descriptors = self._laid_out.pop(token, None)
                    if descriptors:
                        socket.send_fds(peer, [len(descriptors).to_bytes(1, "little")], descriptors)


def fetch_descriptors(path: str, token: str, count: int, deadline: Deadline) -> list[int]:
    """The receiver's side: `count` descriptors, now its own to close.

    Raises TransportError when the socket can't be reached, the token is not known, or the count differs.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(max(0.001, deadline.remaining))
        try:
            peer.connect(path)
            peer.sendall(token.encode())
            header, descriptors, _, _ = socket.recv_fds(peer, 1, MAX_DESCRIPTORS)
        except TimeoutError:
            raise TransportError(f"{path} passed no memory within {deadline.seconds:g} s") from None
        except OSError as error:
            raise TransportError(
                f"the sender's socket {path} can't be reached ({error.strerror}): memory is only shared within one "
                "pod, whose processes mount one runtime directory"
            ) from None
    if not header or header[0] != count or len(descriptors) != count:
        for descriptor in descriptors:
            os.close(descriptor)
        raise TransportError(f"the sender passed {len(descriptors)} descriptors over {path}, not {count}: it refused")
    return list(descriptors)


def _read_exactly(peer: socket.socket, size: int, deadline: Deadline) -> bytes:
    """What came by the deadline, which is for all of it: a peer that trickles holds nobody up.

    What is there by then is read once more, however late this thread comes to look.
    """
    data = b""
    while len(data) < size:
        late = deadline.passed
        peer.settimeout(max(0.001, deadline.remaining))
        part = peer.recv(size - len(data))
        data += part
        if not part or late:
            break
    return data
