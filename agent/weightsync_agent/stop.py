"""SIGTERM and SIGINT of an agent: unwind what runs, say goodbye, and be gone in time whatever happens."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType

log = logging.getLogger("weightsync.agent")

STOP_SECONDS = 2.0
"""From the signal to the end, the goodbye to the peers included."""
EXIT_STUCK = 1


class Stopped(BaseException):
    """Unwinds the role's loop, whatever it waits for. Not an Exception: nothing may swallow it."""


def stop_on_signals() -> None:
    """From now on SIGTERM and SIGINT raise Stopped in the main thread, once."""

    def asked(number: int, _: FrameType | None) -> None:
        for other in (signal.SIGTERM, signal.SIGINT):
            signal.signal(other, signal.SIG_IGN)
        threading.Thread(target=_hard_end, name="weightsync-stop", daemon=True).start()
        log.info("%s: saying goodbye", signal.Signals(number).name)
        raise Stopped

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, asked)


def _hard_end() -> None:
    time.sleep(STOP_SECONDS)
    log.error("still here %g s after being asked to end: ending hard", STOP_SECONDS)
    os._exit(EXIT_STUCK)
