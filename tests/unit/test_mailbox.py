"""The boxes in shared memory that a step's Begin and Ack are laid in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from weightsync_agent.host_memory import HostMemory
from weightsync_agent.transport.mailbox import CONTROL_BYTES, FROM_RECEIVER, FROM_SENDER, LARGEST_FRAME, Mailbox


@pytest.fixture
def boxes() -> Iterator[tuple[Mailbox, Mailbox]]:
    memory = HostMemory.create(CONTROL_BYTES, "weightsync-test")
    yield Mailbox(memory, FROM_SENDER, FROM_RECEIVER), Mailbox(memory, FROM_RECEIVER, FROM_SENDER)
    memory.close()


def test_a_message_is_found_once_and_whole(boxes: tuple[Mailbox, Mailbox]) -> None:
    sender, receiver = boxes
    assert receiver.find() is None
    sender.lay(b"begin")
    assert receiver.find() == b"begin"
    assert receiver.find() is None
    assert sender.find() is None


def test_only_what_the_peer_took_needs_no_second_way(boxes: tuple[Mailbox, Mailbox]) -> None:
    sender, receiver = boxes
    assert not receiver.taken()
    receiver.lay(b"ack 1")
    assert not receiver.taken()
    assert sender.find() == b"ack 1"
    assert not receiver.taken(), "found is not taken: it may have been no valid message"
    sender.took()
    assert receiver.taken()
    receiver.lay(b"ack 2")
    assert not receiver.taken(), "the message before was taken, this one was not"


def test_a_message_too_long_for_its_box_is_never_called_taken(boxes: tuple[Mailbox, Mailbox]) -> None:
    sender, receiver = boxes
    receiver.lay(b"ack")
    sender.find()
    sender.took()
    receiver.lay(b"x" * (LARGEST_FRAME + 1))
    assert sender.find() is None
    assert not receiver.taken()
    receiver.lay(b"y" * LARGEST_FRAME)
    assert sender.find() == b"y" * LARGEST_FRAME
    sender.took()
    assert receiver.taken()
