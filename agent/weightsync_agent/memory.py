"""What a process's memory was around a step, read at the same two points of every step, so that a leak is a slope."""

from __future__ import annotations

import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from weightsync_api.reports import MemorySample


class MemoryMeter(ABC):
    """Reads memory before and after a step. It never raises within a step and costs tens of microseconds."""

    @abstractmethod
    def before(self) -> None:
        """Call first in a step."""

    @abstractmethod
    def after(self) -> MemorySample:
        """Call last in a step. A call without `before` reports a step that changed nothing."""

    @abstractmethod
    def sample(self) -> None:
        """Looks at the peak in mid-step; does nothing where the allocator records it (CUDA)."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what the meter holds. Idempotent."""


class HostMeter(MemoryMeter):
    """CPU: reserved is the process's own resident memory (anonymous pages: heap, stacks; no files, no shared memory)
    plus the shared segments that it owns; allocated is those segments alone.

    Resident anonymous memory is RssAnon of proc(5), read from /proc/self/statm as `resident` less `shared` (the pages
    that are backed by files or are shared memory): the same count as in /proc/self/status, at a tenth of its time.
    Its accuracy is the kernel's: on machines of many cores the kernel batches the count by thread, some 100 KiB each.
    """

    def __init__(self, owned_bytes: Callable[[], int]) -> None:
        self._owned_bytes = owned_bytes
        self._fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._pid = os.getpid()
        self._before: int | None = None
        self._peak = 0

    def before(self) -> None:
        self._before = self._peak = self._reserved()

    def sample(self) -> None:
        self._peak = max(self._peak, self._reserved())

    def after(self) -> MemorySample:
        owned = self._owned_bytes()
        reserved = self._reserved(owned)
        before = reserved if self._before is None else self._before
        sample = MemorySample(
            reserved_before=before,
            reserved_after=reserved,
            allocated_after=owned,
            peak=max(self._peak, before, reserved),
        )
        self._before, self._peak = None, 0
        return sample

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def _reserved(self, owned: int | None = None) -> int:
        return self._resident() + (self._owned_bytes() if owned is None else owned)

    def _resident(self) -> int:
        if os.getpid() != self._pid and self._fd >= 0:  # forked: the open file is still the parent's
            os.close(self._fd)
            self._fd, self._pid = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC), os.getpid()
        try:
            _, resident, shared, *_ = os.pread(self._fd, 256, 0).split()
        except (OSError, ValueError):
            return 0
        return (int(resident) - int(shared)) * mmap.PAGESIZE


class CudaMeter(MemoryMeter):
    """CUDA: torch's caching allocator on one device (reserved, allocated, max reserved within the step), plus the
    driver memory that the agent owns: staging memory counts, whoever allocated it.

    `untracked` is what the driver says that this process uses of the device (NVML) minus what torch reserved: its
    context, the agent's driver memory and NCCL's buffers. Where NVML is missing or doesn't see the process (another
    PID namespace) it is the agent's driver memory alone. NVML takes up to milliseconds, so it is asked at most once in
    NVML_SECONDS.
    """

    NVML_SECONDS = 1.0

    def __init__(self, device: torch.device, owned_bytes: Callable[[], int]) -> None:
        # A bare index: torch looks a torch.device up anew at every call.
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._owned_bytes = owned_bytes
        self._before: int | None = None
        self._nvml = _nvml_process_bytes(device)
        self._nvml_at = -self.NVML_SECONDS
        self._untracked = 0

    def before(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = _allocator(self._device)[0] + self._owned_bytes()

    def after(self) -> MemorySample:
        owned = self._owned_bytes()
        tracked, allocated, peak = _allocator(self._device)
        reserved = tracked + owned
        before = reserved if self._before is None else self._before
        self._before = None
        if time.monotonic() - self._nvml_at >= self.NVML_SECONDS:
            self._untracked, self._nvml_at = self._nvml() - tracked, time.monotonic()
        return MemorySample(
            reserved_before=before,
            reserved_after=reserved,
            allocated_after=allocated + owned,
            peak=max(peak + owned, before, reserved),
            untracked=max(owned, self._untracked),
        )

    def sample(self) -> None:
        return

    def close(self) -> None:
        return


def _allocator(device: int) -> tuple[int, int, int]:
    """Reserved, allocated and peak reserved bytes of torch's caching allocator, by one call."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    if not stats:  # CUDA is not initialised yet: nothing is allocated
        return 0, 0, 0
    reserved, allocated = stats["reserved_bytes"]["all"], stats["allocated_bytes"]["all"]
    return int(reserved["current"]), int(allocated["current"]), int(reserved["peak"])


def meter_for(device: torch.device, owned_bytes: Callable[[], int]) -> MemoryMeter:
    """The meter of a device. `owned_bytes`: what the agent allocated outside torch's allocator, now."""
    return CudaMeter(device, owned_bytes) if device.type == "cuda" else HostMeter(owned_bytes)


def _nvml_process_bytes(device: torch.device) -> Callable[[], int]:
    """A function that gives the device memory of this process in bytes; 0 where it can't be known."""
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception:  # no package, no driver library, no permission: NVML is optional
        return lambda: 0

    def used() -> int:
        try:
            found = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except pynvml.NVMLError:
            return 0
        pid = os.getpid()
        return int(sum(process.usedGpuMemory or 0 for process in found if process.pid == pid))

    return used
