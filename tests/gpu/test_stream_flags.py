"""Flags between two processes' streams, and the watchdog that frees a waiting stream whatever else is blocked."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from peer import Here, Peer
from test_arena import until
from weightsync_agent.cuda.arena import DeviceArena
from weightsync_agent.cuda.flags import LARGEST, RELEASED, FlagPage
from weightsync_agent.cuda.streams import named_stream
from weightsync_agent.deadline import Deadline
from weightsync_agent.errors import StepTimeout

MIB = 1 << 20
SIZE = 16 * MIB
TURNS = 50
FULL, EMPTY = 0, 16
"""Words of the sender and of the receiver."""


def open_both(here: Here) -> None:
    page = FlagPage.map(here.receive_fd())
    page.attach(0)
    arena = DeviceArena.map(here.receive_fd(), SIZE, 0)
    here.kept |= {"page": page, "arena": arena, "sums": torch.zeros(TURNS, dtype=torch.int64, device="cuda")}
    stream = here.kept["stream"] = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # loads the kernel and takes its memory before the first wait
        torch.sum(arena.tensor(), 0, out=here.kept["sums"][0])
    torch.cuda.synchronize()


def consume(here: Here) -> list[int]:
    """Queues every turn at once, without looking at any: only flags order the two processes."""
    page, view, sums = here.kept["page"], here.kept["arena"].tensor(), here.kept["sums"]
    stream = here.kept["stream"]
    with torch.cuda.stream(stream):
        for turn in range(TURNS):
            page.wait_geq(stream, FULL, turn + 1)
            torch.sum(view, 0, out=sums[turn])
            page.write(stream, EMPTY, turn + 1)
    stream.synchronize()
    return list(sums.tolist())


def wait_for_ever(here: Here) -> None:
    stream = here.kept["stream"]
    here.kept["page"].wait_geq(stream, FULL, LARGEST)


def close_both(here: Here) -> None:
    here.kept.pop("page").close()
    here.kept.pop("arena").close()


def pass_both(peer: Peer, page: FlagPage, arena: DeviceArena) -> None:
    peer.send_fd(os.dup(page.fd))
    peer.send_fd(arena.export_fd())
    peer.call(open_both)


def test_flags_alone_order_two_processes_that_share_one_slot(device: torch.device, victim: Peer) -> None:
    page, arena = FlagPage.create(), DeviceArena.create(SIZE, device)
    page.attach(device)
    view = arena.tensor()
    view.fill_(0)
    torch.cuda.synchronize()
    pass_both(victim, page, arena)
    stream = torch.cuda.Stream(device)
    victim.start(consume)
    with torch.cuda.stream(stream):
        for turn in range(TURNS):
            page.wait_geq(stream, EMPTY, turn)
            view.fill_(turn)
            page.write(stream, FULL, turn + 1)
    assert victim.result() == [turn * SIZE for turn in range(TURNS)]
    stream.synchronize()
    assert (page.load(FULL), page.load(EMPTY)) == (TURNS, TURNS)
    victim.call(close_both)
    del view
    page.close()
    arena.close()


def test_a_store_frees_a_waiting_stream_while_another_thread_is_blocked_in_the_driver(device: torch.device) -> None:
    page = FlagPage.create()
    page.attach(device)
    stream = named_stream(device, "flags").stream
    done = torch.zeros(1, device=device)
    done.fill_(0)
    torch.cuda.synchronize()
    for turn in range(3):
        page.wait_geq(stream, 0, turn + 1)
        with torch.cuda.stream(stream):
            done.fill_(turn + 1)
        started, finished = threading.Event(), threading.Event()

        def allocate(started: threading.Event = started, finished: threading.Event = finished) -> None:
            started.set()
            block = torch.empty(512 * MIB, dtype=torch.uint8, device=device)
            del block
            torch.cuda.empty_cache()
            finished.set()

        thread = threading.Thread(target=allocate, daemon=True)
        thread.start()
        started.wait(10)
        blocked = not finished.wait(0.5)
        print(f"turn {turn}: the other thread is {'blocked' if blocked else 'free'} while a stream waits")
        assert not stream.query()
        page.store(0, turn + 1)
        assert finished.wait(10), "the store did not free what the waiting stream blocked"
        thread.join(10)
        stream.synchronize()
        assert float(done) == turn + 1
    page.close()


def test_a_peer_that_is_killed_while_its_stream_waits_disturbs_nobody(device: torch.device, victim: Peer) -> None:
    page, arena = FlagPage.create(), DeviceArena.create(SIZE, device)
    page.attach(device)
    torch.cuda.synchronize()
    pass_both(victim, page, arena)
    victim.call(wait_for_ever)
    ours = named_stream(device, "flags")
    page.wait_geq(ours.stream, EMPTY, 1)
    victim.kill()
    assert not ours.idle()
    page.release_until(ours.idle, Deadline(10))
    assert page.load(EMPTY) == RELEASED
    page.clear()
    page.write(ours.stream, FULL, 1)
    page.wait_geq(ours.stream, FULL, 1)
    assert until(ours.idle, 10), "the page works on, cleared"
    assert int(torch.ones(5, device=device).sum()) == 5
    page.close()
    arena.close()


def test_a_stream_that_no_flag_holds_makes_the_release_give_up_at_its_deadline(device: torch.device) -> None:
    page = FlagPage.create()
    page.attach(device)
    ours = named_stream(device, "flags")
    with torch.cuda.stream(ours.stream):
        torch.cuda._sleep(3_000_000_000)
    with pytest.raises(StepTimeout, match="still busy"):
        page.release_until(ours.idle, Deadline(0.05))
    torch.cuda.synchronize()
    page.close()


@pytest.mark.parametrize(("index", "value"), [(-1, 0), (1024, 0), (0, -1), (0, LARGEST + 1)])
def test_words_and_values_out_of_range_are_refused(device: torch.device, index: int, value: int) -> None:
    page = FlagPage.create()
    page.attach(device)
    stream = torch.cuda.current_stream(device)
    with pytest.raises(ValueError, match="flag"):
        page.write(stream, index, value)
    with pytest.raises(ValueError, match="flag"):
        page.wait_geq(stream, index, value)
    page.close()
