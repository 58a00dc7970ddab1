"""How a program ends that drives an engine, in tests and benchmarks; imports what every engine's environment has."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import psutil


def run_driver(main: Callable[..., None]) -> NoReturn:
    """Calls `main` with the command line's words, and ends this process: with 0, or with 1 where it raised.

    A driver of an engine can hang at its exit, and an engine outlives its driver: both are ended here.
    """
    code = 0
    try:
        main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(code)
