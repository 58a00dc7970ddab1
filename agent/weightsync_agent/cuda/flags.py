"""Words in shared host memory that order two processes' streams with no host code in between.

A stream writes a word when it comes to that point (`write`), another process' stream waits until the word is at least
a value (`wait_geq`): cuStreamWriteValue32 and cuStreamWaitValue32, 13 us a round trip on one GPU.

Its one danger: while any stream of a process waits on a word, other threads of that process are blocked in the first
launch of a kernel (its module is loaded), in an allocation and in a free that reach the driver. So, three rules:
1. The words lie in host memory, and what frees a waiting stream is a plain store by the CPU (`store`, `release`): no
   call of the driver, which may be what is blocked. Any process that maps the page can do it.
2. A wait is enqueued only when the peer has said that its part is enqueued (Begin): no stream waits while idle.
3. Kernels and buffers of the step are loaded and allocated before the first wait.

Values. The comparison is cyclic: a wait for v is over once (int32)(word - v) >= 0. The transport counts up from 1
within a step and clears the words (`clear`) before Begin, while no stream of either process waits or will write; then
no wait is for more than LARGEST, and a word of RELEASED frees every one, whatever it waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from ..deadline import Deadline
from ..errors import StepTimeout, TransportError
from ..host_memory import HostMemory
from .driver import bind, bindings, call, check, function, on

LARGEST: Final = 0x3FFFFFFF
"""Largest value that a stream may write or wait for."""
RELEASED: Final = 0x7FFFFFFF
"""(int32)(RELEASED - v) >= 0 for every v from 0 to LARGEST: no wait holds against it."""

PAGE_BYTES: Final = 4096

_POLL_SECONDS = 0.0005


class FlagPage:
    """uint32 words in memory that both processes map. `create` in one, `map` in the other; `attach` to use streams."""

    def __init__(self, memory: HostMemory) -> None:
        """Takes ownership of `memory`."""
        self.memory = memory
        self._words = memory.tensor()[: memory.nbytes // 4 * 4].numpy().view(np.uint32)
        self._device: int | None = None
        self._base = self._default = self._geq = 0
        self._write: Callable[..., tuple[Any, ...]] | None = None
        self._wait: Callable[..., tuple[Any, ...]] | None = None

    @classmethod
    def create(cls, nbytes: int = PAGE_BYTES) -> FlagPage:
        """A new page, all words 0. Raises TransportError."""
        return cls(HostMemory.create(nbytes, "weightsync-flags"))

    @classmethod
    def map(cls, fd: int, nbytes: int = PAGE_BYTES) -> FlagPage:
        """The page that a peer made. Takes ownership of `fd`. Raises TransportError for a descriptor that is none."""
        return cls(HostMemory.map(fd, nbytes))

    @property
    def fd(self) -> int:
        """The descriptor to pass on; it stays this object's."""
        return self.memory.fd

    def __len__(self) -> int:
        return len(self._words)

    def attach(self, device: torch.device | int) -> None:
        """Registers the page with a device, once. Before the first wait (rule 3). Raises DriverError."""
        if self._device is not None:
            return
        driver = bindings()
        address = int(self._words.ctypes.data)
        flags = driver.CU_MEMHOSTREGISTER_DEVICEMAP | driver.CU_MEMHOSTREGISTER_PORTABLE
        with on(device) as index:
            call("cuMemHostRegister", address, self._words.nbytes, flags)
            self._base = int(call("cuMemHostGetDevicePointer", address, 0))
        self._default = int(driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)
        self._geq = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        self._write = function("cuStreamWriteValue32")
        self._wait = function("cuStreamWaitValue32")
        self._device = index

    def write(self, stream: torch.cuda.Stream, index: int, value: int) -> None:
        """The word becomes `value` when `stream` has done all that was queued before. Its writes are visible then."""
        if self._write is None or self._device is None:
            raise TransportError("this page of flags is not attached to a device")
        bind(self._device)
        address = self._address(index, value)
        check(self._write(stream.cuda_stream, address, value, self._default), "cuStreamWriteValue32")

    def wait_geq(self, stream: torch.cuda.Stream, index: int, value: int) -> None:
        """What is queued on `stream` next runs once the word is at least `value` (cyclic, see above)."""
        if self._wait is None or self._device is None:
            raise TransportError("this page of flags is not attached to a device")
        bind(self._device)
        check(self._wait(stream.cuda_stream, self._address(index, value), value, self._geq), "cuStreamWaitValue32")

    def load(self, index: int) -> int:
        """The word now, read by the CPU."""
        return int(self._words[index])

    def store(self, index: int, value: int) -> None:
        """Sets the word by a plain store of the CPU: no driver call, works whatever is blocked."""
        self._words[index] = value

    def release(self) -> None:
        """Frees every stream of any process that waits on any word now. Plain stores.

        A peer's write that is still queued may overwrite a word, and a wait that is still queued then blocks again:
        use `release_until` to be sure.
        """
        self._words[:] = RELEASED

    def release_until(self, idle: Callable[[], bool], deadline: Deadline) -> None:
        """Releases again and again until `idle()` is true, such as `NamedStream.idle`. Raises StepTimeout."""
        pause = threading.Event()
        while True:
            self.release()
            if idle():
                return
            if deadline.passed:
                raise StepTimeout(
                    f"a stream is still busy {deadline.seconds:g} s after all its flags were released: "
                    "the GPU itself hangs (see the kernel log for Xid errors); restart this process"
                )
            pause.wait(_POLL_SECONDS)

    def clear(self) -> None:
        """All words 0. Only while no stream of either process waits on or will write to a word of this page."""
        self._words[:] = 0

    def close(self) -> None:
        """Unregisters and unmaps. No stream may wait on it any more. Idempotent."""
        if self._device is not None:
            with on(self._device):
                call("cuMemHostUnregister", int(self._words.ctypes.data))
            self._device = None
            self._write = self._wait = None
        self._words = np.zeros(0, np.uint32)
        self.memory.close()

    def _address(self, index: int, value: int) -> Any:
        if not 0 <= index < len(self._words):
            raise ValueError(f"a page of {len(self._words)} flags has no flag {index}")
        if not 0 <= value <= LARGEST:
            raise ValueError(f"{value} is no value of a flag (0 to {LARGEST})")
        return self._base + 4 * index
