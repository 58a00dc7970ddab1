"""Triton's kernels, loaded when first asked for; and why they can't be, where they can't."""

from __future__ import annotations

import logging
import os
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

log = logging.getLogger(__name__)

_DTYPES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


@cache
def kernels() -> ModuleType:
    """The module `kernels`. Raises ImportError without Triton."""
    home = Path.home()
    if not {"TRITON_CACHE_DIR", "TRITON_HOME"} & os.environ.keys() and not (home.is_dir() and os.access(home, os.W_OK)):
        # A container with a read-only root file system: Triton would fail at its first compilation.
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="weightsync-triton-")
    from . import kernels as module

    return module


def triton_dtype(dtype: torch.dtype) -> object:
    """Triton's dtype of a floating dtype of torch's. Raises ValueError where there is none."""
    import triton.language as tl

    if dtype not in _DTYPES:
        raise ValueError(f"a copy plan can't convert from or to {dtype}")
    return getattr(tl, _DTYPES[dtype])


class Launcher:
    """A kernel that is compiled and loaded for one device and one kind of arguments, launched with little Python.

    Triton's usual way looks the compilation up at every launch, from all arguments: 50 to 400 us in a process whose
    caches are cold after a wait, where this takes some 10.
    """

    def __init__(self, kernel: Any, arguments: tuple[object, ...], warps: int) -> None:
        """Launches one program with `arguments`, which must be such that it does nothing: so the kernel is loaded."""
        self._kernel = kernel
        self._warps = warps
        self._compiled = kernel[(1,)](*arguments, num_warps=warps)
        self._direct = True
        try:
            self._compiled[(1, 1, 1)](*arguments, stream=torch.cuda.current_stream().cuda_stream)
        except (TypeError, AttributeError, KeyError) as error:
            log.info("this version of Triton launches in its usual way only: %s", error)
            self._direct = False

    def __call__(self, grid: int, stream: torch.cuda.Stream, arguments: tuple[object, ...]) -> None:
        """`arguments`: of the same kinds as those at loading. On `stream`, whose device must be the current one."""
        if self._direct:
            self._compiled[(grid, 1, 1)](*arguments, stream=stream.cuda_stream)
        else:
            with torch.cuda.stream(stream):
                self._kernel[(grid,)](*arguments, num_warps=self._warps)


@cache
def triton_problem(device: int) -> str | None:
    """Why no Triton kernel can be compiled and run on this device, or None. Logged once."""
    try:
        module = kernels()
        nothing = torch.zeros(2, dtype=torch.int64, device=torch.device("cuda", device))
        with torch.cuda.device(device):
            arguments = (
                nothing,
                nothing,
                nothing.to(torch.int32),
                *(0,) * 6,
                nothing.to(torch.int32),
                module.ELEMENTS,
                False,
                None,
                None,
                False,
                False,
            )
            module.copy_rows[(1,)](*arguments, num_warps=module.WARPS)
    except Exception as error:
        # Whatever a compiler can fail with: no C compiler in the image, no room for its cache, an unknown GPU.
        problem = f"{type(error).__name__}: {error}"
        log.warning("Triton fails, so copy plans and digests go through torch's own kernels, slower: %s", problem)
        return problem
    return None
