"""What a step is measured against, in the same run: plain copies, and bare ZeroMQ round trips."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import zmq

from .. import wire
from ..manifest import Manifest
from ..protocol import Begin, encode
from .models import allocate
from .processes import START_SECONDS, BenchError, Other

LARGEST_COPY = 8 << 30
"""Bytes. A larger copy is taken at the rate of this one."""
WARMUPS = 3
ROUND_TRIPS = 2000
ANSWER_MILLISECONDS = 10_000


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def times_of(work: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each call, after WARMUPS."""
    times = []
    for _ in range(WARMUPS + repeats):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return times[WARMUPS:]


def copy_times(nbytes: int, device: torch.device, repeats: int) -> list[float]:
    """Seconds of one `Tensor.copy_` of so many bytes, one flat buffer to another, every page touched."""
    size = min(nbytes, LARGEST_COPY)
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty(size, dtype=torch.uint8, device=device).fill_(2)
    return [seconds * nbytes / size for seconds in times_of(lambda: target.copy_(source), device, repeats)]


def foreach_times(manifest: Manifest, device: torch.device, repeats: int) -> list[float]:
    """Seconds of one `torch._foreach_copy_` of the whole list, each tensor an allocation of its own."""
    sources = list(allocate(manifest, device).values())
    targets = list(allocate(manifest, device).values())
    return times_of(lambda: torch._foreach_copy_(targets, sources), device, repeats)


def round_trip_seconds(directory: Path) -> float:
    """Median of one frame there and back between two processes: a step's sockets, a Begin's size, nothing else.

    Both ends wait in ZeroMQ's own blocking receive. Raises BenchError.
    """
    endpoint = f"ipc://{directory}/echo"
    frame = encode(Begin(step=1, manifest_hash="0" * 64, verify=False, whole=True, timeout_seconds=600))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = wire.bind_router(context, endpoint, "")
    try:
        with Other("weightsync_agent.bench.echo", [endpoint]):
            socket.setsockopt(zmq.RCVTIMEO, round(START_SECONDS * 1000))
            address, _ = socket.recv_multipart()
            socket.setsockopt(zmq.RCVTIMEO, ANSWER_MILLISECONDS)
            times = []
            for _ in range(ROUND_TRIPS):
                began = time.perf_counter()
                socket.send_multipart([address, frame])
                socket.recv_multipart()
                times.append(time.perf_counter() - began)
            socket.send_multipart([address, b""])
    except zmq.Again:
        raise BenchError("the echo process did not answer") from None
    finally:
        socket.close(linger=0)
        context.term()
    return statistics.median(times[ROUND_TRIPS // 10 :])
