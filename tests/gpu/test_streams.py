"""Streams are made once: the second seed fault, and the order between the caller's stream and ours."""

from __future__ import annotations

from collections.abc import Callable

import torch
from weightsync_agent.cuda.streams import named_stream, reset

MIB = 1 << 20
CALLS = 12
BUFFER = 64 * MIB
CYCLES = 50_000_000
"""Some 30 ms of a stream's time, in which a wrong order shows."""


def reserved_after_calls(stream: Callable[[], torch.cuda.Stream], device: torch.device) -> list[int]:
    """Reserved memory after each call that takes a staging buffer on its stream and drops it."""
    found = []
    for _ in range(CALLS):
        with torch.cuda.stream(stream()):
            buffer = torch.ones(BUFFER, dtype=torch.uint8, device=device)
            torch.cuda.current_stream().synchronize()
            del buffer
        found.append(torch.cuda.memory_reserved(device))
    torch.cuda.empty_cache()
    return found


def test_reserved_memory_is_flat_with_named_streams_and_grows_with_new_ones(device: torch.device) -> None:
    torch.cuda.empty_cache()
    kept: list[torch.cuda.Stream] = []

    def fresh() -> torch.cuda.Stream:
        kept.append(torch.cuda.Stream(device))
        return kept[-1]

    named = reserved_after_calls(lambda: named_stream(device, "test").stream, device)
    assert set(named) == {named[0]}
    faulty = reserved_after_calls(fresh, device)
    assert faulty[-1] - faulty[0] == (CALLS - 1) * BUFFER, "this is the fault"


def test_one_stream_a_name_and_device_until_a_reset(device: torch.device) -> None:
    first = named_stream(device, "copy")
    assert named_stream(0, "copy") is first
    assert named_stream(device, "verify") is not first
    assert first.stream.priority < 0
    reset(device)
    second = named_stream(device, "copy")
    assert second is not first
    second.follow()
    second.lead()
    torch.cuda.synchronize()


def test_our_stream_follows_the_callers_and_the_caller_ours(device: torch.device) -> None:
    ours = named_stream(device, "order")
    callers = torch.cuda.Stream(device)
    source = torch.zeros(MIB, device=device)
    middle, result = torch.zeros_like(source), torch.zeros_like(source)
    torch.cuda.synchronize()
    for turn in range(1, 6):
        with torch.cuda.stream(callers):
            torch.cuda._sleep(CYCLES)
            source.fill_(turn)
        ours.follow(callers)
        with torch.cuda.stream(ours.stream):
            torch.cuda._sleep(CYCLES)
            middle.copy_(source)
        ours.lead(callers)
        with torch.cuda.stream(callers):
            result.copy_(middle)
        callers.synchronize()
        assert torch.equal(result, torch.full_like(result, turn))
    assert ours.idle()


def test_the_current_stream_is_the_caller_by_default(device: torch.device) -> None:
    ours = named_stream(device, "order")
    source = torch.zeros(MIB, device=device)
    torch.cuda._sleep(CYCLES)
    source.fill_(1)
    ours.follow()
    with torch.cuda.stream(ours.stream):
        total = source.sum()
    ours.lead()
    assert float(total) == MIB
