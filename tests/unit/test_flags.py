"""Flags by the CPU alone: what the watchdog does needs no GPU and no driver."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import cast

import pytest
import torch
from weightsync_agent.cuda.flags import LARGEST, PAGE_BYTES, RELEASED, FlagPage
from weightsync_agent.deadline import Deadline
from weightsync_agent.errors import StepTimeout, TransportError


def cyclic_geq(word: int, value: int) -> bool:
    """As cuStreamWaitValue32 compares: (int32)(word - value) >= 0."""
    return (word - value) & 0xFFFFFFFF < 0x80000000


@pytest.mark.parametrize("value", [0, 1, 2, 1000, LARGEST - 1, LARGEST])
def test_a_released_word_frees_whoever_waits_for_any_allowed_value(value: int) -> None:
    assert cyclic_geq(RELEASED, value)


def test_another_process_sees_a_store_and_stores_back() -> None:
    page = FlagPage.create()
    page.store(16, 5)
    code = (
        "import sys; from weightsync_agent.cuda.flags import FlagPage\n"
        "page = FlagPage.map(int(sys.argv[1])); page.store(32, page.load(16) + 1); page.close()"
    )
    fd = os.dup(page.fd)
    subprocess.run([sys.executable, "-c", code, str(fd)], pass_fds=[fd], check=True, timeout=280)
    os.close(fd)
    assert [page.load(16), page.load(32), page.load(0)] == [5, 6, 0]
    page.release()
    assert all(page.load(index) == RELEASED for index in range(len(page)))
    page.clear()
    assert not any(page.load(index) for index in range(len(page)))
    page.close()
    page.close()


def test_release_goes_on_until_idle_against_a_peer_that_writes_late() -> None:
    page = FlagPage.create()
    looks = 0

    def idle() -> bool:
        nonlocal looks
        looks += 1
        freed = page.load(3) == RELEASED
        if looks < 5:
            page.store(3, 1)  # a write of the peer's that was still queued
        return looks > 5 and freed

    page.release_until(idle, Deadline(60))
    assert looks == 6


def test_release_that_never_helps_ends_at_the_deadline() -> None:
    page = FlagPage.create()
    with pytest.raises(StepTimeout, match="still busy"):
        page.release_until(threading.Event().is_set, Deadline(0.02))


def test_a_page_of_no_device_queues_nothing() -> None:
    page = FlagPage.create()
    stream = cast(torch.cuda.Stream, None)  # never looked at
    with pytest.raises(TransportError, match="not attached"):
        page.write(stream, 0, 1)
    with pytest.raises(TransportError, match="not attached"):
        page.wait_geq(stream, 0, 1)
    assert len(page) == PAGE_BYTES // 4
