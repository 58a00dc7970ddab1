"""Two boxes for one short message each, in memory that sender and receiver share: seen by who looks, at once.

A message over ZeroMQ wakes two threads on its way, some 90 us there and back; one that is laid into a box is seen in
about a microsecond by a peer that is looking. So a step's Begin and Ack are laid here too, and whichever comes first
counts: a peer that sleeps is woken by ZeroMQ as ever, and who takes a message from here takes the other for the
repetition that it is. An Ack that was taken from here is not sent again: taking it in would be the next step's delay.
Frames are the same and validated the same.

What can be known before it is due is laid ahead: the next step's Begin while receivers copy, a step's Ack while the
receiver's own copy runs. The peer decodes it in time that nobody waits for, and a word makes it count: 1 us instead of
the 50 to 80 that making, laying and decoding a message take where the caches are cold. The word is the step's, so that
no order in which stores are seen can make another step's message count.
"""

from __future__ import annotations

import mmap

import numpy as np

from ..host_memory import HostMemory

BOX_BYTES = mmap.PAGESIZE
LARGEST_FRAME = BOX_BYTES - 20
"""A longer message goes over ZeroMQ alone (a Begin with digests)."""

FROM_SENDER, FROM_RECEIVER = 1, 2
"""The boxes' places in the control memory, after its page of words."""

CONTROL_BYTES = 3 * BOX_BYTES


AHEAD = 1 << 31
"""In the word of the frame's length: it counts only once it is confirmed."""


class Mailbox:
    """One process' view of both boxes: `out` is written by it alone, `inbox` by the peer alone.

    A box: the message's count, its length, the frame; at its end a note and a word that confirm what was laid ahead,
    and the count of the peer's message that its owner took. The count is 0 while the frame is written.
    """

    def __init__(self, memory: HostMemory, out: int, inbox: int) -> None:
        self._bytes = memory.tensor().numpy()
        self._out, self._in = out * BOX_BYTES, inbox * BOX_BYTES
        self._words = self._bytes.view(np.uint32)
        self._out_end, self._in_end = (self._out + BOX_BYTES) // 4, (self._in + BOX_BYTES) // 4
        self._laid = False
        self._sent = int(self._words[self._out // 4])
        self._seen = int(self._words[self._in // 4])
        self._foreseen: bytes | None = None

    def lay(self, frame: bytes, *, ahead: bool = False) -> bool:
        """Lays a message where the peer looks; the one before is gone. False: it is too long, and left out.

        `ahead`: it counts only once its word is confirmed.
        """
        self._laid = len(frame) <= LARGEST_FRAME
        if self._laid:
            start = self._out
            self._words[start // 4] = 0
            self._bytes[start + 8 : start + 8 + len(frame)] = np.frombuffer(frame, np.uint8)
            self._words[start // 4 + 1] = len(frame) | (AHEAD if ahead else 0)
            self._sent = self._sent % 0xFFFFFFFF + 1
            # x86 keeps the order of stores; on weaker machines a torn frame fails its validation.
            self._words[start // 4] = self._sent
        return self._laid

    def confirm(self, word: int, note: int = 0) -> None:
        """Makes the message that was laid ahead under this word count. `note`: a number that goes along, 32 bits."""
        self._words[self._out_end - 3] = min(note, 0xFFFFFFFF)
        self._words[self._out_end - 2] = word

    @property
    def confirmed(self) -> tuple[int, int]:
        """The peer's word, and its note."""
        word = int(self._words[self._in_end - 2])
        return word, int(self._words[self._in_end - 3])

    def find(self) -> bytes | None:
        """The message that came since the last call, if any and not laid ahead."""
        start = self._in
        count = int(self._words[start // 4])
        if count in (self._seen, 0):
            return None
        size = int(self._words[start // 4 + 1])
        frame = self._bytes[start + 8 : start + 8 + min(size & ~AHEAD, LARGEST_FRAME)].tobytes()
        if int(self._words[start // 4]) != count:
            return None  # the next one was being written over it
        self._seen = count
        self._foreseen = frame if size & AHEAD else None
        return None if size & AHEAD else frame

    def foresee(self) -> bytes | None:
        """The message that was laid ahead, if it is the last one that `find` saw."""
        return self._foreseen

    def took(self) -> None:
        """The message that was seen last was of use: the peer need not repeat it."""
        self._words[self._out_end - 1] = self._seen

    def taken(self) -> bool:
        """Whether the peer took what was laid last."""
        return self._laid and int(self._words[self._in_end - 1]) == self._sent
