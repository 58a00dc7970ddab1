"""Two boxes for one short message each, in memory that sender and receiver share: seen by who looks, at once.

A message over ZeroMQ wakes two threads on its way, some 90 us there and back; one that is laid into a box is seen in
about a microsecond by a peer that is looking. So a step's Begin and Ack are laid here too, and whichever comes first
counts: a peer that sleeps is woken by ZeroMQ as ever, and who takes a message from here takes the other for the
repetition that it is. An Ack that was taken from here is not sent again: taking it in would be the next step's delay.
Frames are the same and validated the same.

What can be known before it is due is laid ahead: the next step's Begin while receivers copy, a step's Ack while the
receiver's own copy runs. The peer decodes it in time that nobody waits for, and a word makes it count: 1 us instead of
the 50 to 80 that making, laying and decoding a message take where the caches are cold.
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
    """One process' view of both boxes: `out` is written by it alone, `inbox` by the peer alone."""

    def __init__(self, memory: HostMemory, out: int, inbox: int) -> None:
        self._bytes = memory.tensor().numpy()
        self._out, self._in = out * BOX_BYTES, inbox * BOX_BYTES
        self._words = self._bytes.view(np.uint32)
        # A box's last words: the count of the peer's message that its owner took; the count of its own that is
        # confirmed, and a number that goes with that.
        self._out_end, self._in_end = (self._out + BOX_BYTES) // 4, (self._in + BOX_BYTES) // 4
        self._laid = False
        self._laid_ahead: bytes | None = None
        self._sent = int(self._words[self._out // 4])
        self._seen = int(self._words[self._in // 4])
        self._foreseen: bytes | None = None
        self.note = 0
        """What the peer confirmed the message with that `find` gave last; 0: it was not laid ahead."""

    def lay(self, frame: bytes) -> None:
        """Lays a message where the peer looks; the one before is gone. Too long ones are left out.

        The very one that was laid ahead is confirmed.
        """
        if frame != self._laid_ahead:
            self._lay(frame, 0)
        else:
            self.confirm()

    def lay_ahead(self, frame: bytes) -> None:
        """Lays a message that counts only once it is confirmed."""
        self._lay(frame, AHEAD)
        self._laid_ahead = frame if self._laid else None

    def confirm(self, note: int = 0) -> bool:
        """Makes what was laid ahead count. False: nothing is there."""
        if self._laid_ahead is None:
            return False
        self._laid_ahead = None
        self._words[self._out_end - 3] = min(note, 0xFFFFFFFF)
        self._words[self._out_end - 2] = self._sent
        return True

    def _lay(self, frame: bytes, ahead: int) -> None:
        self._laid_ahead = None
        self._laid = len(frame) <= LARGEST_FRAME
        if not self._laid:
            return
        start = self._out
        self._bytes[start + 8 : start + 8 + len(frame)] = np.frombuffer(frame, np.uint8)
        self._words[start // 4 + 1] = len(frame) | ahead
        # The count last: x86 keeps the order of stores, and on weaker machines a torn frame fails its validation.
        self._sent = (self._sent + 1) & 0xFFFFFFFF
        self._words[start // 4] = self._sent

    def find(self) -> bytes | None:
        """The message that came since the last call, if any; one that was laid ahead, once it is confirmed."""
        start = self._in
        count = int(self._words[start // 4])
        if count != self._seen:
            self._seen, self._foreseen = count, None
            size = int(self._words[start // 4 + 1])
            at = start + 8
            frame = self._bytes[at : at + min(size & ~AHEAD, LARGEST_FRAME)].tobytes()
            if not size & AHEAD:
                self.note = 0
                return frame
            self._foreseen = frame
        if self._foreseen is None or int(self._words[self._in_end - 2]) != count:
            return None
        frame, self._foreseen = self._foreseen, None
        self.note = int(self._words[self._in_end - 3])
        return frame

    def foresee(self) -> bytes | None:
        """The message that the peer laid ahead and has not confirmed yet, as `find` last saw it."""
        return self._foreseen

    def took(self) -> None:
        """What `find` gave last was of use: the peer need not repeat it."""
        self._words[self._out_end - 1] = self._seen

    def taken(self) -> bool:
        """Whether the peer took what was laid last."""
        return self._laid and int(self._words[self._in_end - 1]) == self._sent
