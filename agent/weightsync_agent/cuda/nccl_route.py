"""Which way NCCL moves the bytes, read from what it says when a communicator's channels are connected.

NCCL has no call for it. Its INFO lines are the only place where it says what it chose for each channel (the formats
are those of src/transport/{p2p,shm,net}.cc of NCCL 2.18 to 2.30):

    host:9:31 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
    host:9:31 [0] NCCL INFO Channel 02 : 0[0] -> 1[1] via SHM/direct/direct
    host:9:31 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/Socket/0
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

log = logging.getLogger("weightsync.nccl")

LOCAL = "Local"
"""Route of a group of one."""
UNKNOWN = ""
"""NCCL said nothing that we understand."""

_CHANNEL = re.compile(r"Channel \d+(?:/\d+)? : \d+\[\w+\] -> \d+\[\w+\](?: \[(?:send|receive)\])? via (\S+)")
_WARNING = re.compile(r"NCCL WARN (.*)")
_SLOWEST_FIRST = ("NET/Socket", "NET", "SHM", "P2P")


def parse_route(text: str, size: int) -> str:
    """The route of a communicator of `size` ranks from NCCL's INFO lines; the slowest, where channels differ.

    One of P2P/CUMEM, P2P/IPC, P2P/direct, P2P/MNNVL, P2P/indirect, SHM/direct, SHM/CE, NET/Socket, NET/IB, or NET/ and
    the name of a plugin; LOCAL for one rank, UNKNOWN where no line says it.
    """
    if size == 1:
        return LOCAL
    found = {"/".join(via.split("/")[:2]) for via in _CHANNEL.findall(text)}
    if not found:
        return UNKNOWN
    return min(found, key=lambda route: (_speed(route), route))


def _speed(route: str) -> int:
    return next((place for place, start in enumerate(_SLOWEST_FIRST) if route.startswith(start)), len(_SLOWEST_FIRST))


def last_warning(text: str) -> str:
    """NCCL's last WARN line without its prefix; empty where there is none."""
    found = _WARNING.findall(text)
    return found[-1].strip() if found else ""


def advice(text: str, environ: Mapping[str, str]) -> str:
    """What to change, where NCCL's own words have a cause that is known; else empty.

    Sources: measured between processes in Linux namespaces with one GPU's device node hidden.
    """
    low = text.lower()
    if "duplicate gpu" in low:
        return "two ranks have the same GPU, which NCCL can't do: use IPC (spec.transport: IPC)"
    own_gpu_only = ("invalid device ordinal", "invalid argument", "invalid device context")
    if "NCCL_HOSTID" in environ:
        if any(cause in low for cause in own_gpu_only) and environ.get("NCCL_P2P_DISABLE") != "1":
            return (
                "NCCL_HOSTID is set, so NCCL takes the processes for one host's and maps the GPUs into each other, "
                "but each sees its own GPU's device node only: unset NCCL_HOSTID, or set NCCL_P2P_DISABLE=1 and "
                "NCCL_CUMEM_HOST_ENABLE=0 with one /dev/shm for both"
            )
        if "uds" in low or "connection refused" in low:
            return (
                "NCCL_HOSTID is set, but the processes have network namespaces of their own, through which NCCL "
                "can't pass memory: unset NCCL_HOSTID, or set NCCL_CUMEM_ENABLE=0"
            )
    if "shm" in low and ("no space" in low or "posix_fallocate" in low):
        return "/dev/shm is too small: mount a larger memory-backed volume there"
    if any(cause in low for cause in ("connection refused", "no route", "timed out", "no socket interface")):
        return "the sender's pod can't be reached on NCCL's network interface: set spec.network.interface"
    return ""


@dataclass
class Capture:
    """What NCCL said within `captured`."""

    text: str = field(default="")
    read: Callable[[], str] = field(default=lambda: "")
    """What it has said until now."""


_capturing = threading.Lock()
_VARIABLES = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")


@contextmanager
def captured(reset: Callable[[], None] | None) -> Iterator[Capture]:
    """Diverts NCCL's log of this process into memory while a communicator is made; the user's settings come back after.

    Nothing goes to stderr. Where the user asked for NCCL's log (NCCL_DEBUG=INFO), these lines go to our logger. Where
    they asked for it in a file, nothing is diverted: NCCL would truncate the file when it opens it again.

    Args:
        reset: ncclResetDebugInit of the library, which makes it read its environment again; None where it has none:
            then the log is caught only if NCCL has said nothing in this process before.
    """
    if os.environ.get("NCCL_DEBUG_FILE"):
        log.warning("NCCL_DEBUG_FILE is set, so NCCL's log is left alone and the route that it takes is not known")
        yield Capture()
        return
    if not _capturing.acquire(blocking=False):
        yield Capture()  # another communicator of this process is being made, maybe the peer of this one
        return
    try:
        fd = os.memfd_create("weightsync-nccl-log", os.MFD_CLOEXEC)
        before = {name: os.environ.get(name) for name in _VARIABLES}

        def read() -> str:
            return os.pread(fd, 64 << 20, 0).decode(errors="replace")

        capture = Capture(read=read)
        os.environ.update(
            NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,P2P,SHM,NET", NCCL_DEBUG_FILE=f"/proc/self/fd/{fd}"
        )
        try:
            if reset is not None:
                reset()
            yield capture
        finally:
            capture.text = read()
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            if reset is not None:
                reset()
            capture.read = lambda: capture.text
            os.close(fd)
            if (before["NCCL_DEBUG"] or "").upper() in ("INFO", "TRACE"):
                for line in capture.text.splitlines():
                    log.info("%s", line)
    finally:
        _capturing.release()
