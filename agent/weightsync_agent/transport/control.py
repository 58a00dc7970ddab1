"""The memory that a sender and one receiver share for words and short messages, and the two ends that have it.

Its page of words says which step's bytes lie still, and counts what is exported; its mailbox carries Begin and Ack to a
peer that is looking.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from ..errors import Closed, TransportError
from ..host_memory import ControlPage, HostMemory
from ..manifest import Manifest
from ..protocol import Welcome
from ..targets import Target
from .base import ReceiverTransport, SenderTransport, SendPlan
from .mailbox import CONTROL_BYTES, FROM_RECEIVER, FROM_SENDER, Mailbox

STEP_WORD = 0
"""The step whose bytes lie still. 0: none, so that who copied on has a torn step."""
FIRST_EXPORT_WORD = 1
"""Words from here on: one an exported region, in the offer's order after the control memory. 1 while exported, 0 once
released."""


class Control:
    """One end's view of the control memory, which it closes."""

    def __init__(self, memory: HostMemory, out: int, inbox: int) -> None:
        self.memory = memory
        self._page = ControlPage(memory)
        self._mailbox = Mailbox(memory, out, inbox) if memory.nbytes >= CONTROL_BYTES else None

    @classmethod
    def create(cls) -> Self:
        """The sender's, new. Raises TransportError where there is no memory."""
        return cls(HostMemory.create(CONTROL_BYTES, "weightsync-control"), FROM_SENDER, FROM_RECEIVER)

    @classmethod
    def mapped(cls, memory: HostMemory) -> Self:
        """The receiver's."""
        return cls(memory, FROM_RECEIVER, FROM_SENDER)

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
        if self._mailbox is not None:
            self._mailbox.lay(frame)

    def find(self) -> bytes | None:
        return self._mailbox.find() if self._mailbox is not None else None

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

    control: Control


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

    def find(self, rank: int) -> bytes | None:
        export = self._exports.get(rank)
        return export.control.find() if export is not None else None

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
        self._control: Control | None = None

    def lay(self, frame: bytes) -> None:
        if self._control is not None:
            self._control.lay(frame)

    def find(self) -> bytes | None:
        return self._control.find() if self._control is not None else None

    def taken(self) -> bool:
        return self._control is not None and self._control.taken()
