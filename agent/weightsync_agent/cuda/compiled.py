"""Triton's kernels, loaded when first asked for; and why they can't be, where they can't."""

from __future__ import annotations

import logging
import os
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

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


@cache
def triton_problem(device: int) -> str | None:
    """Why no Triton kernel can be compiled and run on this device, or None. Logged once."""
    try:
        module = kernels()
        nothing = torch.zeros(2, dtype=torch.int64, device=torch.device("cuda", device))
        with torch.cuda.device(device):
            module.copy_rows[(1,)](
                nothing, nothing, nothing.to(torch.int32), *(0,) * 6,
                ELEMENTS=module.ELEMENTS, PERSISTENT=False, FROM=None, TO=None, CONVERTS=False,
                num_warps=module.WARPS,
            )  # fmt: skip
    except Exception as error:
        # Whatever a compiler can fail with: no C compiler in the image, no room for its cache, an unknown GPU.
        problem = f"{type(error).__name__}: {error}"
        log.warning("Triton fails, so copy plans and digests go through torch's own kernels, slower: %s", problem)
        return problem
    return None
