"""The control memory between a sender and one receiver."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from weightsync_agent.errors import Closed, TransportError
from weightsync_agent.host_memory import HostMemory
from weightsync_agent.protocol import Abort, Bye, Commit, Drained, decode_from_receiver, encode
from weightsync_agent.transport.control import Control


@pytest.fixture
def ends() -> Iterator[tuple[Control, Control]]:
    """The sender's and the receiver's, over two mappings of the same memory."""
    sender = Control.create()
    receiver = Control.mapped(HostMemory.map(os.dup(sender.memory.fd), sender.memory.nbytes))
    yield sender, receiver
    receiver.close()
    sender.close()


def test_each_region_is_released_exactly_once(ends: tuple[Control, Control]) -> None:
    sender, receiver = ends
    sender.export(3)
    receiver.release(1)
    assert [sender.exported(region) for region in range(4)] == [1, 0, 1, 0]
    for region in (1, 3):
        with pytest.raises(TransportError, match=f"region {region} of the sender's offer is counted 0 times"):
            receiver.release(region)


@pytest.mark.parametrize("step", [1, 2**32 - 2, 2**32 - 1, 2**32, 2**53])
def test_a_step_that_was_given_up_or_is_another_is_not_whole(step: int, ends: tuple[Control, Control]) -> None:
    sender, receiver = ends
    sender.open_step(step)
    receiver.check_open(step)
    for change in (sender.close_step, lambda: sender.open_step(step + 1)):
        change()
        with pytest.raises(Closed, match=f"step {step} was broken off"):
            receiver.check_open(step)


def test_a_message_is_found_once_by_the_other_end_alone(ends: tuple[Control, Control]) -> None:
    for one, other in (ends, ends[::-1]):
        one.lay(encode(Bye(reason="first")))
        one.lay(encode(Bye(reason="second")))
        assert one.find() is None
        assert other.find() == Bye(reason="second")
        assert other.find() is None
        assert not one.taken()
        other.took()
        assert one.taken()
        one.lay(encode(Bye(reason="third")))
        assert not one.taken()
        assert other.find() == Bye(reason="third")


def test_what_is_no_message_is_none_and_the_next_one_is_found(ends: tuple[Control, Control]) -> None:
    sender, receiver = ends
    for frame in (b"nonsense", b"\xff\x00", encode(Drained(step=1, bucket=0))):
        sender.lay(frame)
        assert receiver.find() is None
        sender.lay_ahead(1, frame)
        assert receiver.find() is None
        sender.confirm(0)
        assert receiver.find() is None
    sender.lay(encode(Abort(step=1, cause="x")))
    assert receiver.find() == Abort(step=1, cause="x")


def test_a_message_laid_ahead_counts_once_it_is_confirmed_and_only_then(ends: tuple[Control, Control]) -> None:
    sender, receiver = ends
    for looked_before in (True, False):
        sender.lay_ahead(7, encode(Commit(step=7)))
        if looked_before:
            assert receiver.find() is None
        assert sender.confirm(123)
        assert not sender.confirm(123), "once"
        assert receiver.find() == Commit(step=7)
        assert receiver.note == 123
        assert receiver.find() is None
        receiver.took()
        assert sender.taken()


def test_a_message_laid_ahead_does_not_count_by_the_word_of_the_step_before(ends: tuple[Control, Control]) -> None:
    """However late the peer looks, and however much was laid and confirmed in between."""
    sender, receiver = ends
    for step in range(1, 5):
        sender.lay_ahead(step, encode(Commit(step=step)))
        if step == 2:
            assert receiver.find() is None
        sender.confirm(step)
        sender.lay_ahead(step + 1, encode(Commit(step=step + 1)))
        assert receiver.find() is None
        assert not sender.taken()
    sender.confirm(9)
    assert receiver.find() == Commit(step=5)
    assert receiver.note == 9


def test_laying_what_was_laid_ahead_confirms_it_and_laying_another_takes_it_back(ends: tuple[Control, Control]) -> None:
    sender, receiver = ends
    ahead, other = Commit(step=8), Commit(step=10)
    sender.lay_ahead(8, encode(ahead))
    assert receiver.find() is None
    sender.lay(encode(ahead))
    assert (receiver.find(), receiver.find()) == (ahead, None)
    sender.lay_ahead(9, encode(Commit(step=9)))
    assert receiver.find() is None
    sender.lay(encode(other))
    assert (receiver.find(), receiver.find()) == (other, None)
    assert receiver.note == 0
    assert not sender.confirm(1), "what was taken back can't be confirmed"


def test_memory_of_a_sender_without_boxes_serves_for_words_alone() -> None:
    with HostMemory.create(4096, "weightsync-test") as memory:
        sender = Control(memory, 1, 2, decode_from_receiver)
        receiver = Control.mapped(HostMemory.map(os.dup(memory.fd), memory.nbytes))
        sender.lay(encode(Bye()))
        sender.lay_ahead(1, encode(Bye()))
        assert not sender.confirm(1)
        assert receiver.find() is None
        assert not sender.taken()
        sender.open_step(4)
        receiver.check_open(4)
        receiver.close()
