"""Python's cyclic garbage collector, held back while a join makes tens of thousands of objects that all stay.

Their number sets off full collections, and each looks at everything that the process holds: 0.15 s in one that has done
no more than import torch, more in an engine. Garbage without cycles is freed as ever.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_back() -> Iterator[None]:
    """Until the end of the block, in all threads; then as before."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
