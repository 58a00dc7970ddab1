"""Two boxes for one short message each, in memory that sender and receiver share: seen by who looks, at once.

A message over ZeroMQ wakes two threads on its way, some 90 us there and back; one that is laid into a box is seen in
about a microsecond by a peer that is looking. So a step's Begin and Ack are laid here too, and whichever comes first
counts: a peer that sleeps is woken by ZeroMQ as ever, and who takes a message from here takes the other for the
repetition that it is. An Ack that was taken from here is not sent again: taking it in would be the next step's delay.
Frames are the same and validated the same.
"""

from __future__ import annotations

import mmap

import numpy as np

from ..host_memory import HostMemory

BOX_BYTES = mmap.PAGESIZE
LARGEST_FRAME = BOX_BYTES - 12
"""A longer message goes over ZeroMQ alone (a Begin with digests)."""

FROM_SENDER, FROM_RECEIVER = 1, 2
"""The boxes' places in the control memory, after its page of words."""

CONTROL_BYTES = 3 * BOX_BYTES


class Mailbox:
    """One process' view of both boxes: `out` is written by it alone, `inbox` by the peer alone."""

    def __init__(self, memory: HostMemory, out: int, inbox: int) -> None:
        self._bytes = memory.tensor().numpy()
        self._out, self._in = out * BOX_BYTES, inbox * BOX_BYTES
        self._words = self._bytes.view(np.uint32)
        # The last word of a process's own box: the count of the peer's message that it took.
        self._taken, self._mine_taken = (self._out + BOX_BYTES) // 4 - 1, (self._in + BOX_BYTES) // 4 - 1
        self._laid = False
        self._sent = int(self._words[self._out // 4])
        self._seen = int(self._words[self._in // 4])

    def lay(self, frame: bytes) -> None:
        """Lays a message where the peer looks; the one before is gone. Too long ones are left out."""
        self._laid = len(frame) <= LARGEST_FRAME
        if not self._laid:
            return
        start = self._out
        self._bytes[start + 8 : start + 8 + len(frame)] = np.frombuffer(frame, np.uint8)
        self._words[start // 4 + 1] = len(frame)
        # The count last: x86 keeps the order of stores, and on weaker machines a torn frame fails its validation.
        self._sent = (self._sent + 1) & 0xFFFFFFFF
        self._words[start // 4] = self._sent

    def find(self) -> bytes | None:
        """The message that came since the last call, if any."""
        start = self._in
        count = int(self._words[start // 4])
        if count == self._seen:
            return None
        self._seen = count
        size = min(int(self._words[start // 4 + 1]), LARGEST_FRAME)
        return self._bytes[start + 8 : start + 8 + size].tobytes()

    def took(self) -> None:
        """What `find` gave last was of use: the peer need not repeat it."""
        self._words[self._taken] = self._seen

    def taken(self) -> bool:
        """Whether the peer took what was laid last."""
        return self._laid and int(self._words[self._mine_taken]) == self._sent
