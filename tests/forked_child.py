"""A child that was forked and executes nothing, as a DataLoader's worker: it holds what its parent held."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def idle_child() -> Iterator[None]:
    """Lives within; must have ended well after."""
    stays, ends = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ends)
        os.read(stays, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(ends)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.close(stays)
