"""NCCL through ctypes: the few calls that a broadcast with a deadline needs, of the library that torch itself loaded.

torch's own process groups can't be made without a default group, can't be aborted from the thread that waits, and say
nothing about the route. All calls here are non-blocking, as "Fault Tolerance" in NCCL's user guide has it: a call
may answer "in progress", and is then asked for until it is done, its deadline passes, or a peer is known to be dead.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

from ..deadline import Deadline
from ..errors import StepTimeout, TransportError
from .nccl_route import UNKNOWN, advice, captured, last_warning, parse_route

log = logging.getLogger("weightsync.nccl")

UNIQUE_ID_BYTES = 128
SUCCESS = 0
IN_PROGRESS = 7
UINT8 = 1
ABORT_SECONDS = 30.0
CLOSE_SECONDS = 10.0

_UNDEFINED = -(1 << 31)
"""NCCL_CONFIG_UNDEF_INT: INT_MIN."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


class _Config(ctypes.Structure):
    """ncclConfig_t as of NCCL 2.17 (nccl.h.in, tag v2.17.1-1). A later library (2.28: ncclConfig_v22800) copies `size`
    bytes of it, and what its own version has beyond that keeps the library's defaults (parseCommConfig in init.cc)."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    ]


_CONFIG_MAGIC = 0xCAFEBEEF
_CONFIG_VERSION = 2 * 10000 + 17 * 100 + 1

_SIGNATURES: dict[str, list[object]] = {
    "ncclGetVersion": [ctypes.POINTER(ctypes.c_int)],
    "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
    "ncclCommInitRankConfig": [
        ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int, ctypes.POINTER(_Config)
    ],
    "ncclCommGetAsyncError": [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)],
    "ncclCommFinalize": [ctypes.c_void_p],
    "ncclCommDestroy": [ctypes.c_void_p],
    "ncclCommAbort": [ctypes.c_void_p],
    "ncclBroadcast": [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p
    ],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclCommRegister": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)],
    "ncclCommDeregister": [ctypes.c_void_p, ctypes.c_void_p],
}  # fmt: skip


class Library:
    """libnccl.so.2 with its calls' types set."""

    def __init__(self, path: str) -> None:
        """Raises TransportError where it can't be loaded or is older than 2.18."""
        self.path = path
        try:
            self._library = ctypes.CDLL(path)
            for name, arguments in _SIGNATURES.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = arguments, ctypes.c_int
            self._library.ncclGetErrorString.argtypes = [ctypes.c_int]
            self._library.ncclGetErrorString.restype = ctypes.c_char_p
            self._library.ncclGetLastError.argtypes = [ctypes.c_void_p]
            self._library.ncclGetLastError.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise TransportError(
                f"NCCL can't be loaded from {path}: {error}; torch for CUDA brings it (the package nvidia-nccl)"
            ) from None
        self.broadcast: Callable[..., int] = self._library.ncclBroadcast
        self.group_start: Callable[..., int] = self._library.ncclGroupStart
        self.group_end: Callable[..., int] = self._library.ncclGroupEnd
        if self.version < (2, 18, 0):
            raise TransportError(f"NCCL {self.version} of {path} is too old: 2.18 or later is needed")

    def call(self, name: str, *arguments: object) -> int:
        return int(getattr(self._library, name)(*arguments))

    def checked(self, name: str, *arguments: object) -> None:
        """Raises TransportError for any result but success."""
        result = self.call(name, *arguments)
        if result != SUCCESS:
            raise TransportError(f"NCCL: {name} failed: {self.why(result)}")

    def why(self, result: int) -> str:
        """The library's words for a result, and its last error in this process."""
        name = self._library.ncclGetErrorString(result)
        last = self._library.ncclGetLastError(None)
        words = [part.decode(errors="replace").strip() for part in (name, last) if part]
        return ": ".join(word for word in words if word)[:1000] or f"result {result}"

    @property
    def version(self) -> tuple[int, int, int]:
        found = ctypes.c_int()
        self.checked("ncclGetVersion", ctypes.byref(found))
        return found.value // 10000, found.value // 100 % 100, found.value % 100

    @property
    def reset_log(self) -> Callable[[], None] | None:
        """Makes NCCL read NCCL_DEBUG and its kin again; None where the library has no such call."""
        for name in ("ncclResetDebugInitInternal", "ncclResetDebugInit"):
            function = getattr(self._library, name, None)
            if function is not None:
                function.argtypes, function.restype = [], None
                found: Callable[[], None] = function
                return found
        return None


@cache
def library() -> Library:
    """The NCCL that torch loaded, so that a process has one; else the package nvidia-nccl's, else the system's."""
    return Library(_loaded_path() or _package_path() or "libnccl.so.2")


def _loaded_path() -> str:
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            found = re.search(r"(/\S*libnccl\.so[\d.]*)$", line)
            if found:
                return found[1]
    return ""


def _package_path() -> str:
    try:
        import nvidia.nccl as package  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return ""
    places = [Path(place) / "lib" / "libnccl.so.2" for place in package.__path__]
    return next((str(place) for place in places if place.exists()), "")


def unique_id() -> bytes:
    """A new group's id, to be given to every member; rank 0 makes it. Raises TransportError."""
    found = _UniqueId()
    library().checked("ncclGetUniqueId", ctypes.byref(found))
    return bytes(found.internal)


def use_interface(interface: str) -> None:
    """NCCL's sockets go over this interface. Only before NCCL's first use in the process, and only where not set."""
    if interface:
        # With `=` NCCL takes the name as it is, not as the start of one.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


class Communicator:
    """One member of one group. Used by one thread at a time; thrown away, by `abort`, after any error."""

    def __init__(
        self,
        unique_id: bytes,
        rank: int,
        size: int,
        device: torch.device,
        deadline: Deadline,
        *,
        check: Callable[[], None] = lambda: None,
        warm: Callable[[Communicator], None] = lambda _: None,
    ) -> None:
        """Joins the group of `size` members as `rank`; waits until all are in.

        Args:
            unique_id: of `unique_id()`, UNIQUE_ID_BYTES bytes.
            check: called while waiting; may raise.
            warm: the first broadcasts, alike on every member. NCCL connects its channels within them, which is when
                it says its route; so they belong to the joining and to its deadline.

        Raises TransportError with NCCL's own words, StepTimeout where not all members came by the deadline.
        """
        if len(unique_id) != UNIQUE_ID_BYTES or not 0 <= rank < size:
            raise TransportError(f"NCCL: rank {rank} of {size} with an id of {len(unique_id)} bytes can't join a group")
        self.rank, self.size, self.device = rank, size, device
        self.route = UNKNOWN
        self._nccl = library()
        self._comm = ctypes.c_void_p()
        self._error = ctypes.c_int()
        self._deadline = deadline
        self._check = check
        self._registered: list[ctypes.c_void_p] = []
        config = _Config(
            size=ctypes.sizeof(_Config),
            magic=_CONFIG_MAGIC,
            version=_CONFIG_VERSION,
            blocking=0,
            cga_cluster_size=_UNDEFINED,
            min_ctas=_UNDEFINED,
            max_ctas=_UNDEFINED,
            net_name=None,
            split_share=_UNDEFINED,
        )
        raw = _UniqueId.from_buffer_copy(unique_id)
        with captured(self._nccl.reset_log) as capture:
            try:
                with torch.cuda.device(device):
                    result = self._nccl.call(
                        "ncclCommInitRankConfig", ctypes.byref(self._comm), size, raw, rank, ctypes.byref(config)
                    )
                self._settle(result, "joining the group")
                warm(self)
            except (TransportError, StepTimeout) as error:
                said = capture.read()
                self.abort()
                warning = last_warning(said)
                hint = advice(f"{error} {warning}", os.environ)
                parts = [str(error)]
                if warning and warning not in parts[0]:
                    parts.append(f"NCCL said: {warning}")
                if hint:
                    parts.append(hint)
                raise type(error)("; ".join(parts)) from None
            except BaseException:
                self.abort()
                raise
        self.route = parse_route(capture.text, size)

    @property
    def open(self) -> bool:
        return self._comm.value is not None

    def bound_by(self, deadline: Deadline, check: Callable[[], None]) -> None:
        """What ends the waits from now on: a step's deadline, and `check`, which may raise."""
        self._deadline, self._check = deadline, check

    def broadcast(self, pointer: int, nbytes: int, stream: int, root: int = 0) -> None:
        """Queues a broadcast of device memory on a CUstream: from it at the root, into it elsewhere.

        Within `group` it is queued at the group's end. Raises TransportError, StepTimeout.
        """
        result = self._nccl.broadcast(pointer, pointer, nbytes, UINT8, root, self._comm, stream)
        if result != SUCCESS:
            self._settle(result, "a broadcast")

    @contextmanager
    def group(self) -> Iterator[None]:
        """What is queued within goes to the GPU as one."""
        self._nccl.group_start()
        try:
            yield
        except BaseException:
            self._nccl.group_end()  # the depth is the thread's and must come back to 0
            raise
        self._settle(self._nccl.group_end(), "a group of broadcasts")

    def poll(self) -> bool:
        """Whether NCCL has taken all that was queued. Raises TransportError where the group is broken."""
        self._require()
        result = self._nccl.call("ncclCommGetAsyncError", self._comm, ctypes.byref(self._error))
        state = self._error.value if result == SUCCESS else result
        if state not in (SUCCESS, IN_PROGRESS):
            raise TransportError(f"NCCL: the group of {self.size} broke: {self._nccl.why(state)}")
        return state == SUCCESS

    def register(self, pointer: int, nbytes: int) -> None:
        """Lets NCCL map this memory into its peers, so that broadcasts from and into it need no copy in between.

        Until `close`. Where the route can't, NCCL does nothing. Raises TransportError.
        """
        self._require()
        handle = ctypes.c_void_p()
        self._nccl.checked("ncclCommRegister", self._comm, pointer, nbytes, ctypes.byref(handle))
        self._registered.append(handle)

    def abort(self) -> None:
        """Ends every broadcast that is under way here and gives the group's memory back. Idempotent, bounded."""
        self._end("ncclCommAbort", ABORT_SECONDS)

    def close(self) -> None:
        """Leaves the group in order, when nothing is under way. Idempotent, bounded."""
        if not self.open:
            return
        for handle in self._registered:
            self._nccl.call("ncclCommDeregister", self._comm, handle)
        self._registered.clear()
        try:
            self._deadline, self._check = Deadline(CLOSE_SECONDS), lambda: None
            self._settle(self._nccl.call("ncclCommFinalize", self._comm), "leaving the group")
        except (TransportError, StepTimeout) as error:
            log.warning("%s: the communicator is aborted instead", error)
            self.abort()
            return
        self._end("ncclCommDestroy", ABORT_SECONDS)

    def _end(self, call: str, seconds: float) -> None:
        """In a thread: these wait for NCCL's own threads, which must not be able to hang a step."""
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm.value is None:
            return
        thread = threading.Thread(target=self._nccl.call, args=(call, comm), name="weightsync-nccl-end", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            log.error("NCCL: %s is not done after %g s: its memory comes back when this process ends", call, seconds)

    def _require(self) -> None:
        if self._comm.value is None:
            raise TransportError("NCCL: the group was given up after a failure; the next step makes a new one")

    def _settle(self, result: int, what: str) -> None:
        """Until NCCL has taken a call, or the deadline or `check` ends it."""
        if result not in (SUCCESS, IN_PROGRESS):
            raise TransportError(f"NCCL: {what} failed on rank {self.rank} of {self.size}: {self._nccl.why(result)}")
        tries = 0
        while not self.poll():
            tries += 1
            if tries < 200:
                continue  # a launch takes some 30 us: less than the shortest sleep
            if self._deadline.passed:
                raise StepTimeout(
                    f"NCCL: {what} was not done on rank {self.rank} of {self.size} "
                    f"within {self._deadline.seconds:.3g} s"
                )
            self._check()
            time.sleep(5e-5 if tries < 2000 else 1e-3)
