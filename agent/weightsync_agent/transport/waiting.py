"""How the host waits for a GPU within a step: by looking, since the words and events that it waits for wake nobody."""

from __future__ import annotations

import os
import time

SPIN_SECONDS = 0.005
"""So long a wait only yields (a sleep, of 0 s too, takes 60 to 90 us, a yield 1); after that it sleeps in between."""

SLEEP_SECONDS = 5e-5

LOOK_SECONDS = 1e-3
"""A look at the sockets takes tens of microseconds, one at a word less than one: so often the sockets, at most."""


class Waiter:
    """One wait: call `pause` between two looks."""

    __slots__ = ("_look_at", "_spin_until")

    def __init__(self) -> None:
        now = time.monotonic()
        self._spin_until = now + SPIN_SECONDS
        self._look_at = now + LOOK_SECONDS

    def pause(self) -> bool:
        """Yields, or sleeps. True: it is time to look at messages and the deadline too."""
        now = time.monotonic()
        if now < self._spin_until:
            os.sched_yield()  # without the GIL, so that this process's other threads go on too
        else:
            time.sleep(SLEEP_SECONDS)
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_SECONDS
        return True
