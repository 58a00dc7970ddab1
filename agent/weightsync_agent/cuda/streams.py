"""One named set of CUDA streams a device, made once and reused for the process' life.

torch's caching allocator keys free blocks by the stream that they were allocated on, so streams made anew at every
call strand one set of buffers each (vLLM issue 52950: 2 GiB a step). Reused streams can't.
"""

from __future__ import annotations

import threading
from typing import Final

import torch

from .driver import device_index

COPY: Final = "copy"
COMMUNICATION: Final = "communication"
VERIFY: Final = "verify"

_lock = threading.Lock()
_made: dict[tuple[int, str], NamedStream] = {}


class NamedStream:
    """A stream and the events that order it against its caller's. One user at a time: a transport, in its step."""

    def __init__(self, device: int, name: str, high_priority: bool) -> None:
        self.device = device
        self.name = name
        # Lower is more urgent, and torch clamps to what the device has.
        self.stream = torch.cuda.Stream(device=device, priority=-1 if high_priority else 0)  # type: ignore[no-untyped-call]
        self._from_caller = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._to_caller = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._marked = False
        self._lock = threading.Lock()

    def follow(self, caller: torch.cuda.Stream | None = None) -> None:
        """What is queued here next waits for all that `caller` (None: the current stream) has queued until now."""
        caller = caller or torch.cuda.current_stream(self.device)
        with self._lock:
            self._marked = False
            if caller.query():
                return
            self._from_caller.record(caller)
            self.stream.wait_event(self._from_caller)

    def mark(self) -> None:
        """Notes all that the current stream has queued until now, for `follow_mark`."""
        with self._lock:
            self._from_caller.record(torch.cuda.current_stream(self.device))
            self._marked = True

    def follow_mark(self) -> None:
        """As `follow`, for what was queued until the mark; without one, until now.

        Costs nothing where that is done by now: an event that a stream waits for keeps it some 35 us (H200), done or
        not, and an event that is only asked keeps nobody.
        """
        with self._lock:
            if self._marked:
                if not self._from_caller.query():  # type: ignore[no-untyped-call]
                    self.stream.wait_event(self._from_caller)
                return
        self.follow()

    def lead(self, caller: torch.cuda.Stream | None = None) -> None:
        """What `caller` queues next waits for all that is queued here until now."""
        caller = caller or torch.cuda.current_stream(self.device)
        with self._lock:
            self._to_caller.record(self.stream)
            caller.wait_event(self._to_caller)

    def synchronize(self) -> None:
        """Waits for all that is queued here."""
        self.stream.synchronize()

    def synchronize_caller(self) -> None:
        """Waits for all that the current stream has queued."""
        torch.cuda.current_stream(self.device).synchronize()

    @property
    def pointer(self) -> int:
        """CUstream, for the driver's calls."""
        return int(self.stream.cuda_stream)

    def idle(self) -> bool:
        """Whether all that was queued is done. Never waits."""
        return bool(self.stream.query())


def named_stream(device: torch.device | int, name: str, *, high_priority: bool = True) -> NamedStream:
    """The stream of this name on this device: the same object at every call. `high_priority` counts at the first.

    Transfers are at high priority by default: a copy or communication kernel that waits behind the engine's own
    kernels makes the whole group wait.
    """
    index = device_index(device)
    with _lock:
        found = _made.get((index, name))
        if found is None:
            found = _made[index, name] = NamedStream(index, name, high_priority)
        return found


def reset(device: torch.device | int | None = None) -> None:
    """Forgets the streams of a device (None: of all): after a device reset the next call makes new ones."""
    index = None if device is None else device_index(device)
    with _lock:
        for key in [key for key in _made if index is None or key[0] == index]:
            del _made[key]
