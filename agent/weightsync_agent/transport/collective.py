"""What the senders of collective transports share: they fail together, and should say why."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..errors import TransportError
from .base import SendChannel

REASON_SECONDS = 5.0
"""Nobody waits that long but for a receiver whose machine stalls, and where a network broke that no process did."""
_PAUSE_SECONDS = 0.001


def presence(channel: SendChannel) -> Callable[[], None]:
    """A check for polling loops: raises TransportError once a receiver has left the broadcasts of the step."""

    def check() -> None:
        if not channel.alive():
            raise TransportError("a receiver left the step, and a broadcast can't end without it")

    return check


def hear_reason(channel: SendChannel) -> None:
    """After a broadcast broke: waits a moment for the word of the receiver that broke it.

    Its connection is gone before its Error is here, and the step's report should name it and its cause.
    """
    until = min(REASON_SECONDS, channel.deadline.remaining) + time.monotonic()
    while time.monotonic() < until and channel.alive():
        time.sleep(_PAUSE_SECONDS)
