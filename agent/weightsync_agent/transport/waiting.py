"""How the host waits for a GPU within a step: by looking, since the words and events that it waits for wake nobody."""

from __future__ import annotations

import time

SPIN_SECONDS = 0.005
"""So long a wait only yields (a sleep of the shortest takes some 60 us); after that it sleeps in between."""

SLEEP_SECONDS = 5e-5


class Waiter:
    """One wait: call `pause` between two looks."""

    __slots__ = ("_spin_until",)

    def __init__(self) -> None:
        self._spin_until = time.monotonic() + SPIN_SECONDS

    def pause(self) -> None:
        time.sleep(0 if time.monotonic() < self._spin_until else SLEEP_SECONDS)
