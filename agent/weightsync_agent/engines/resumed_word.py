"""A word of shared memory in which an engine core says which step it goes on with: its answer may be read later then.

The answer takes vLLM's output thread, a socket and a thread of the trainer's to arrive; the word is there at once. It
says nothing but that: whether the step succeeded at its receivers is the sender's to tell, and what the workers
reported, or failed with, is in the answer.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable

import numpy as np
import torch

from ..errors import TransportError
from ..host_memory import HostMemory
from ..wire import SPARE_CORE
from .shared_file import SharedFile, map_file

log = logging.getLogger("weightsync.vllm")

NBYTES = 8
"""One int64, which a 64-bit machine stores and loads as a whole."""

LOOK_SECONDS = 2e-3
"""So long it is looked at, beside an engine that has acknowledged its weights; the answer is waited for after that."""

_PREFIX = "weightsync_resumed"

NAME_PATTERN = rf"^({_PREFIX}_[0-9a-f]{{32}})?$"
"""Of such a file, or empty: an engine core writes into no other one, whoever asks it to."""


class ResumedWord:
    """The trainer's end. Raises TransportError where there is no room in /dev/shm."""

    def __init__(self) -> None:
        file = SharedFile.create(NBYTES, _PREFIX)
        self.name = file.name
        self._word = _word(file.memory)
        self._unlink = weakref.finalize(self, file.unlink)  # also where this process ends before an engine mapped it

    def clear(self) -> None:
        """Before an engine is asked for a step, and while it takes none."""
        self._word[0] = 0

    def says(self, step: int) -> bool:
        """Whether the engine went on with this step. Its name is needed no more then."""
        if step < 1 or self._word[0] != step:
            return False
        self._unlink()
        return True

    def awaited(self, step: int, answered: Callable[[], bool]) -> bool:
        """As `says`, after a moment's looking where a core is spare. Ends at the answer."""
        until = time.monotonic() + (LOOK_SECONDS if SPARE_CORE else 0.0)
        while not self.says(step):
            if answered() or time.monotonic() >= until:
                return self.says(step)
            os.sched_yield()  # without the GIL, so that this process's other threads go on too
        return True

    def close(self) -> None:
        """Takes the name away. Idempotent."""
        self._unlink()


class WordWriter:
    """The engine core's end of the word that it was given last."""

    def __init__(self) -> None:
        self._name = ""
        self._word: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None

    def write(self, name: str, step: int) -> None:
        """Never raises: the answer says the same."""
        if name != self._name:
            self._name, self._word = name, None
            try:
                self._word = _word(map_file(name, NBYTES, "the trainer"))
            except (OSError, TransportError) as error:
                log.info("steps are told to the trainer by their answers alone: %s", error)
        if self._word is not None:
            self._word[0] = step


def _word(memory: HostMemory) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """int64 [1]; the mapping lives as long as it does."""
    words: np.ndarray[tuple[int], np.dtype[np.int64]] = memory.tensor().view(torch.int64).numpy()
    memory.close()
    return words
