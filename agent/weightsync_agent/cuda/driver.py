"""Checked calls of the CUDA driver through `cuda.bindings`, on torch's own (primary) context.

Every result is looked at; an error names the call and the driver's own name for what went wrong. Imported lazily:
a machine without CUDA imports this module and learns what is missing at the first call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch

from ..errors import ConfigError, TransportError

_bound = threading.local()


class DriverError(TransportError):
    """A call of the CUDA driver failed. `name` is the driver's, such as CUDA_ERROR_INVALID_DEVICE."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


@cache
def bindings() -> ModuleType:
    """The module `cuda.bindings.driver`. Raises ConfigError where it is missing."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ConfigError(
            f"device memory can't be shared by descriptor: the Python package cuda-bindings is missing ({error}); "
            "install it in the version of torch's CUDA, for example `pip install cuda-bindings`"
        ) from None
    found: ModuleType = driver
    return found


def call(name: str, *arguments: Any) -> Any:
    """`bindings().<name>(*arguments)`: its one result, a tuple of several, or None. Raises DriverError."""
    code, *results = getattr(bindings(), name)(*arguments)
    if int(code) != 0:
        raise DriverError(f"the CUDA driver's {name} failed: {error_name(code)}", error_name(code))
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


def function(name: str) -> Callable[..., tuple[Any, ...]]:
    """The raw call, for the step path: the caller passes what it returns to `check`."""
    found: Callable[..., tuple[Any, ...]] = getattr(bindings(), name)
    return found


def check(result: tuple[Any, ...], name: str) -> None:
    """Raises DriverError where a raw call's result says so."""
    if int(result[0]) != 0:
        raise DriverError(
            f"the CUDA driver's {name} failed: {error_name(result[0])}",
            error_name(result[0]),
        )


def error_name(code: Any) -> str:
    """The driver's name of a result, such as CUDA_ERROR_OUT_OF_MEMORY."""
    return str(getattr(code, "name", code))


def device_index(device: torch.device | int) -> int:
    """torch's index of a CUDA device. Raises ConfigError where this process has no such device."""
    if not torch.cuda.is_available():
        raise ConfigError("this process sees no CUDA device: check the pod's GPU request and CUDA_VISIBLE_DEVICES")
    if isinstance(device, int):
        index = device
    elif device.type != "cuda":
        raise ConfigError(f"{device} is no CUDA device")
    else:
        index = torch.cuda.current_device() if device.index is None else device.index
    if not 0 <= index < torch.cuda.device_count():
        raise ConfigError(
            f"there is no CUDA device {index} here: {torch.cuda.device_count()} are visible (CUDA_VISIBLE_DEVICES)"
        )
    return index


@cache
def _primary_context(index: int) -> Any:
    # Retained for the process' life: torch holds it anyway, and giving it back under torch would end it.
    torch.cuda.init()  # type: ignore[no-untyped-call]
    call("cuInit", 0)
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", index))


def bind(device: torch.device | int) -> None:
    """Gives this thread the device's primary context where it has none yet; leaves any other alone.

    A thread that never launched anything has no context, and the driver's stream calls fail in it.
    """
    if getattr(_bound, "any", False):
        return
    if int(call("cuCtxGetCurrent")) == 0:
        call("cuCtxSetCurrent", _primary_context(device_index(device)))
    _bound.any = True


class on:  # noqa: N801 - a context manager that reads as a word, as torch.cuda.device does
    """`with on(device):` the driver's calls go to this device; the thread's context before is restored after."""

    def __init__(self, device: torch.device | int) -> None:
        self.index = device_index(device)

    def __enter__(self) -> int:
        call("cuCtxPushCurrent", _primary_context(self.index))
        return self.index

    def __exit__(self, *_: object) -> None:
        call("cuCtxPopCurrent")


def normal_uuid(text: str) -> str:
    """A GPU UUID as this project writes it: lower case, without the prefix `GPU-` that NVML and CUDA_VISIBLE_DEVICES
    use and torch does not. A MIG instance keeps its prefix `MIG-`.
    """
    text = text.strip()
    return text[4:].lower() if text[:4].upper() == "GPU-" else text.lower().replace("mig-", "MIG-", 1)


def gpu_uuid(device: torch.device | int) -> str:
    """UUID of a CUDA device of this process, as `normal_uuid` spells it."""
    return normal_uuid(str(torch.cuda.get_device_properties(device_index(device)).uuid))


def free_bytes(device: torch.device | int) -> int:
    """Device memory that nobody has, as the driver counts it (all processes)."""
    with on(device):
        return int(call("cuMemGetInfo")[0])


def allocation_of(pointer: int, device: torch.device | int) -> tuple[int, int]:
    """(first address, bytes) of the driver allocation that an address of device memory lies in. Raises DriverError."""
    with on(device):
        base, size = call("cuMemGetAddressRange", bindings().CUdeviceptr(pointer))
    return int(base), int(size)
