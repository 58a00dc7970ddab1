"""The memory that a sender and one receiver share for words and short messages, and the two ends that have it.

Its page of words says which step's bytes lie still, and counts what is exported; its mailbox carries Begin and Ack to a
peer that is looking.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..errors import Closed, TransportError
from ..host_memory import ControlPage, HostMemory
from ..manifest import Manifest
from ..protocol import FromReceiver, FromSender, ProtocolError, Welcome, decode_from_receiver, decode_from_sender
from ..targets import Target
from .base import ReceiverTransport, SenderTransport, SendPlan
from .mailbox import CONTROL_BYTES, FROM_RECEIVER, FROM_SENDER, Mailbox

STEP_WORD = 0
"""The step whose bytes lie still. 0: none, so that who copied on has a torn step."""
FIRST_EXPORT_WORD = 1
"""Words from here on: one an exported region, in the offer's order after the control memory. 1 while exported, 0 once
released."""


M = TypeVar("M")


class Control(Generic[M]):
    """One end's view of the control memory, which it closes. `decode`: of the peer's frames."""

    def __init__(self, memory: HostMemory, out: int, inbox: int, decode: Callable[[bytes], M]) -> None:
        self.memory = memory
        self._decode = decode
        self._ahead: tuple[int, bytes] = (0, b"")
        """The word and the frame of what was laid ahead and not confirmed yet."""
        self._early: tuple[bytes, M | None] | None = None
        """The frame that the peer laid ahead, decoded."""
        self._counted: bytes | None = None
        """The last of those that counted."""
        self.note = 0
        """What the peer confirmed the message with that `find` gave last; 0: it was not laid ahead."""
        self._page = ControlPage(memory)
        self._mailbox = Mailbox(memory, out, inbox) if memory.nbytes >= CONTROL_BYTES else None

    @staticmethod
    def create() -> Control[FromReceiver]:
        """The sender's, new. Raises TransportError where there is no memory."""
        memory = HostMemory.create(CONTROL_BYTES, "weightsync-control")
        return Control(memory, FROM_SENDER, FROM_RECEIVER, decode_from_receiver)

    @staticmethod
    def mapped(memory: HostMemory) -> Control[FromSender]:
        """The receiver's."""
        return Control(memory, FROM_RECEIVER, FROM_SENDER, decode_from_sender)

    # --- steps --------------------------------------------------------------------------------------------------

    def open_step(self, step: int) -> None:
        self._page[STEP_WORD] = _word_of(step)

    def close_step(self) -> None:
        self._page[STEP_WORD] = 0

    def check_open(self, step: int) -> None:
        """To be called after the copy. Raises Closed where its bytes may be torn."""
        if self._page[STEP_WORD] != _word_of(step):
            # The sender gave the step up and may have changed its weights while they were copied.
            raise Closed(f"step {step} was broken off by the sender while its bytes were copied")

    # --- exports ------------------------------------------------------------------------------------------------

    def export(self, regions: int) -> None:
        """Counts the first `regions` regions as exported."""
        for region in range(regions):
            self._page[FIRST_EXPORT_WORD + region] = 1

    def exported(self, region: int) -> int:
        """The region's count: 0 once it is released, as long as nobody wrote nonsense."""
        return self._page[FIRST_EXPORT_WORD + region]

    def release(self, region: int) -> None:
        """Takes the region's count back. Raises TransportError unless it was exported exactly once."""
        if (count := self.exported(region)) != 1:
            raise TransportError(f"region {region} of the sender's offer is counted {count} times, not once")
        self._page[FIRST_EXPORT_WORD + region] = 0

    # --- messages -----------------------------------------------------------------------------------------------

    def lay(self, frame: bytes) -> None:
        """The very message that was laid ahead is confirmed instead."""
        if self._mailbox is not None and not (frame == self._ahead[1] and self.confirm()):
            self._ahead = (0, b"")
            self._mailbox.lay(frame)

    def lay_ahead(self, step: int, frame: bytes) -> None:
        """A message of this step, which counts once it is confirmed."""
        self._ahead = (0, b"")
        if self._mailbox is not None and self._mailbox.lay(frame, ahead=True):
            self._ahead = (_word_of(step), frame)

    def confirm(self, note: int = 0) -> bool:
        """Makes what was laid ahead count, once. False: nothing is there."""
        word, _ = self._ahead
        self._ahead = (0, b"")
        if self._mailbox is None or not word:
            return False
        self._mailbox.confirm(word, note)
        return True

    def find(self) -> M | None:
        """What came since the last call, and counts; None too for what is no message: what counts comes over the
        socket as well. What was laid ahead is decoded in the meantime.
        """
        box = self._mailbox
        if box is None:
            return None
        if (frame := box.find()) is not None:
            self.note = 0
            return self._decoded(frame)
        ahead = box.foresee()
        if ahead is None:
            return None
        if self._early is None or self._early[0] is not ahead:
            self._early = (ahead, self._decoded(ahead))
        message = self._early[1]
        word, note = box.confirmed
        if message is None or word != _word_of(getattr(message, "step", 0)) or ahead is self._counted:
            return None
        self._counted, self.note = ahead, note
        return message

    def _decoded(self, frame: bytes) -> M | None:
        try:
            return self._decode(frame)
        except ProtocolError:
            return None

    def took(self) -> None:
        if self._mailbox is not None:
            self._mailbox.took()

    def taken(self) -> bool:
        return self._mailbox is not None and self._mailbox.taken()

    def close(self) -> None:
        self.memory.close()


def _word_of(step: int) -> int:
    """32 bits that differ from the next step's, and are never 0."""
    return step % 0xFFFFFFFF + 1


@dataclass
class Shared:
    """What a sender shares with one receiver, whatever else that is."""

    control: Control[FromReceiver]


S = TypeVar("S", bound=Shared)


class MappedSender(SenderTransport, Generic[S]):
    """A sender's end whose receivers map memory of its machine, each with control memory of its own."""

    def __init__(self, plan: SendPlan) -> None:
        super().__init__(plan)
        self._exports: dict[int, S] = {}
        """By rank."""

    def lay(self, rank: int, frame: bytes) -> None:
        if (export := self._exports.get(rank)) is not None:
            export.control.lay(frame)

    def lay_ahead(self, rank: int, step: int, frame: bytes) -> None:
        if (export := self._exports.get(rank)) is not None:
            export.control.lay_ahead(step, frame)

    def find(self, rank: int) -> FromReceiver | None:
        export = self._exports.get(rank)
        return export.control.find() if export is not None else None

    def note(self, rank: int) -> int:
        export = self._exports.get(rank)
        return export.control.note if export is not None else 0

    def took(self, rank: int) -> None:
        if (export := self._exports.get(rank)) is not None:
            export.control.took()

    def open_step(self, step: int) -> None:
        for export in self._exports.values():
            export.control.open_step(step)

    def close_step(self) -> None:
        for export in self._exports.values():
            export.control.close_step()


class MappedReceiver(ReceiverTransport):
    """A receiver's end that maps the sender's memory."""

    def __init__(self, welcome: Welcome, manifest: Manifest, target: Target) -> None:
        super().__init__(welcome, manifest, target)
        self._control: Control[FromSender] | None = None

    def lay(self, frame: bytes) -> None:
        if self._control is not None:
            self._control.lay(frame)

    def lay_ahead(self, step: int, frame: bytes) -> None:
        if self._control is not None:
            self._control.lay_ahead(step, frame)

    def confirm(self, note: int) -> bool:
        return self._control is not None and self._control.confirm(note)

    def find(self) -> FromSender | None:
        return self._control.find() if self._control is not None else None

    def taken(self) -> bool:
        return self._control is not None and self._control.taken()
