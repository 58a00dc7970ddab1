"""What a step is measured against, in the same run: plain copies, and bare ZeroMQ round trips.

They are taken between the steps wherever the memory suffices, so that a machine that gets busier or calmer, and caches
that a step leaves cold, show in both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import zmq

from .. import wire
from ..manifest import Manifest
from ..protocol import Begin, encode
from .models import allocate
from .processes import START_SECONDS, BenchError, Other
from .series import Series

LARGEST_COPY = 8 << 30
"""Bytes. A larger copy is taken at the rate of this one."""
LARGEST_LIST = 24 << 30
WARMUPS = 3
MOST_TRIPS = 10_000
"""Of which the times are kept; a soak takes more."""
ANSWER_MILLISECONDS = 10_000


Copy = Callable[[], float]
"""Copies once and gives the seconds; holds its buffers, every page of them touched, until it is dropped."""


def flat_copy(nbytes: int, device: torch.device) -> Copy:
    """One `Tensor.copy_` of one buffer to another, warm."""
    size = min(nbytes, LARGEST_COPY)
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty(size, dtype=torch.uint8, device=device).fill_(2)
    return _timed(lambda: target.copy_(source), device, nbytes / max(size, 1))


def copy_times(nbytes: int, device: torch.device, repeats: int) -> list[float]:
    """Seconds of each of so many flat copies."""
    once = flat_copy(nbytes, device)
    return [once() for _ in range(repeats)]


def list_copy(manifest: Manifest, device: torch.device) -> Copy:
    """One `torch._foreach_copy_` of all tensors, each an allocation of its own at both ends, warm.

    Beyond LARGEST_LIST the first tensors alone, at whose rate the rest is taken: two more models may not fit.
    """
    part = _first_tensors(manifest, LARGEST_LIST)
    sources = list(allocate(part, device).values())
    targets = list(allocate(part, device).values())
    return _timed(lambda: torch._foreach_copy_(targets, sources), device, manifest.nbytes / max(part.nbytes, 1))


def _first_tensors(manifest: Manifest, nbytes: int) -> Manifest:
    """The first entries up to so many bytes, at least one."""
    total, count = 0, 0
    for entry in manifest.tensors:
        if count and total + entry.nbytes > nbytes:
            break
        total, count = total + entry.nbytes, count + 1
    return Manifest(tensors=manifest.tensors[:count])


def _timed(work: Callable[[], object], device: torch.device, factor: float) -> Copy:
    def once() -> float:
        _synchronize(device)
        began = time.perf_counter()
        work()
        _synchronize(device)
        return (time.perf_counter() - began) * factor

    for _ in range(WARMUPS):
        once()
    return once


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class RoundTrips:
    """One frame there and back between two processes: a step's sockets, a Begin's size, nothing else.

    Both ends wait in ZeroMQ's own blocking receive. Raises BenchError where the other process does not answer.
    """

    def __init__(self, directory: Path) -> None:
        self.seconds = Series(MOST_TRIPS)
        self._frame = encode(Begin(step=1, manifest_hash="0" * 64, verify=False, whole=True, timeout_seconds=600))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        endpoint = f"ipc://{directory}/echo"
        self._socket = wire.bind_router(self._context, endpoint, "")
        self._other = Other("weightsync_agent.bench.echo", [endpoint])
        self._address = b""

    def __enter__(self) -> Self:
        try:
            self._address = self._receive(round(START_SECONDS * 1000))
        except BaseException:
            self.__exit__(BenchError)
            raise
        return self

    def take(self, repeats: int) -> None:
        """So many round trips."""
        for _ in range(repeats):
            began = time.perf_counter()
            self._socket.send_multipart([self._address, self._frame])
            self._receive(ANSWER_MILLISECONDS)
            self.seconds.append(time.perf_counter() - began)

    def _receive(self, milliseconds: int) -> bytes:
        self._socket.setsockopt(zmq.RCVTIMEO, milliseconds)
        try:
            return self._socket.recv_multipart()[0]
        except zmq.Again:
            raise BenchError("the echo process did not answer") from None

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if kind is None:
            self._socket.send_multipart([self._address, b""])
        self._other.__exit__(kind)
        self._socket.close(linger=0)
        self._context.term()
