"""The memory meter sees what a process really takes and gives back, on the CPU by the kernel's own count."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from collections.abc import Iterator

import pytest
import torch
from weightsync_agent.host_memory import HostMemory
from weightsync_agent.memory import HostMeter, MemoryMeter, meter_for

MIB = 1 << 20
SLACK = 8 * MIB
"""The kernel batches its count, and the interpreter allocates too."""


class Owned:
    bytes = 0


@pytest.fixture
def owned() -> Owned:
    return Owned()


@pytest.fixture
def meter(owned: Owned) -> Iterator[MemoryMeter]:
    gc.collect()  # else what earlier tests left in cycles may go between two counts
    meter = meter_for(torch.device("cpu"), lambda: owned.bytes)
    yield meter
    meter.close()


def test_a_step_that_keeps_memory_shows_it(meter: MemoryMeter) -> None:
    meter.before()
    kept = torch.ones(64 * MIB, dtype=torch.uint8)
    sample = meter.after()
    assert abs(sample.delta - kept.numel()) < SLACK
    assert sample.peak >= sample.reserved_after


def test_a_step_that_gives_all_back_shows_nothing_but_its_peak(meter: MemoryMeter) -> None:
    meter.before()
    used = torch.ones(64 * MIB, dtype=torch.uint8)
    meter.sample()
    del used
    sample = meter.after()
    assert abs(sample.delta) < SLACK
    assert sample.peak - sample.reserved_before > 64 * MIB - SLACK


def test_a_leak_of_a_bucket_a_step_is_a_slope(meter: MemoryMeter) -> None:
    leaked, seen = [], []
    for _ in range(5):
        meter.before()
        leaked.append(torch.ones(16 * MIB, dtype=torch.uint8))
        seen.append(meter.after().reserved_after)
    growth = [after - before for before, after in itertools.pairwise(seen)]
    assert all(8 * MIB < step < 24 * MIB for step in growth), growth


def test_shared_segments_count_once_and_for_their_owner(meter: MemoryMeter, owned: Owned) -> None:
    with HostMemory.create(64 * MIB) as memory:
        memory.tensor().fill_(1)
        meter.before()
        owned.bytes = memory.nbytes
        sample = meter.after()
    assert sample.allocated_after == 64 * MIB
    # Mapped and touched shared memory is no resident memory of the process itself: only `owned` counts it.
    assert abs(sample.delta - 64 * MIB) < SLACK


def test_the_reserved_memory_is_plausible(meter: MemoryMeter) -> None:
    meter.before()
    sample = meter.after()
    with open("/proc/self/status") as status:
        resident = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS:"))
    assert 10 * MIB < sample.reserved_after <= resident + SLACK


def test_after_without_before_is_a_step_that_changed_nothing(meter: MemoryMeter) -> None:
    assert meter.after().delta == 0
    meter.before()
    meter.after()
    assert meter.after().delta == 0


def test_a_closed_meter_does_not_raise_in_a_step(meter: MemoryMeter) -> None:
    meter.close()
    meter.close()
    meter.before()
    assert meter.after().reserved_after == 0


def test_a_forked_process_reads_its_own_memory(meter: MemoryMeter) -> None:
    kept = torch.ones(64 * MIB, dtype=torch.uint8)
    meter.before()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            more = bytearray(b"1") * (64 * MIB)
            meter.before()
            os.write(write, str(meter.after().reserved_after + len(more) * 0).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    theirs = int(os.read(read, 64))
    os.close(read)
    os.close(write)
    assert theirs - meter.after().reserved_after > 64 * MIB - SLACK
    assert kept.numel()


def counts_open() -> int:
    """Descriptors of the kernel's count. Not of anything: what earlier tests left may be closed at any moment."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(path.endswith("/statm") for path in found)


def test_it_keeps_one_descriptor_and_gives_it_back() -> None:
    before = counts_open()
    meter = HostMeter(lambda: 0)
    for _ in range(10):
        meter.before()
        meter.after()
    assert counts_open() == before + 1
    del meter
    assert counts_open() == before
