"""Ends this process when the one that started it is gone.

A local run holds the other end of every agent's stdin and never writes to it: the end of file is its death, `kill -9`
included. Only with WEIGHTSYNC_EXIT_ON_STDIN_EOF=1; a pod's stdin is empty from the start.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

from weightsync_api.agent_config import ENV_EXIT_ON_STDIN_EOF

log = logging.getLogger("weightsync.parent")

GRACE_SECONDS = 10.0
"""From SIGTERM to the hard end: time for a goodbye, and for a trainer to leave a long kernel on a busy machine."""
EXIT_ORPHANED = 143
"""128 + SIGTERM, as a shell reports it."""

_started = threading.Lock()


def bound() -> bool:
    """Whether this process was started by a local run and ends with it."""
    return os.environ.get(ENV_EXIT_ON_STDIN_EOF) == "1"


def end_with_parent() -> bool:
    """Starts the watch, once a process; False where it was not asked for. At the end of file the process gets SIGTERM,
    and is gone GRACE_SECONDS later whatever it does with that."""
    if not bound() or not _started.acquire(blocking=False):
        return False
    threading.Thread(target=_watch, name="weightsync-parent", daemon=True).start()
    return True


def _watch() -> None:
    # Not sys.stdin: a thread that waits inside its buffer's lock breaks the interpreter's shutdown.
    try:
        while os.read(0, 4096):
            pass
    except OSError as error:
        log.warning("stdin can't be read (%s): this process does not notice the end of its runner", error.strerror)
        return
    log.warning("the process that started this one is gone: it ends too")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(EXIT_ORPHANED)
