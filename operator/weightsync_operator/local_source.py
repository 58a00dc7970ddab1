"""Whether a local run's source can be read, asked before anything is started.

By a process of its own: to judge a checkpoint takes torch, which this half of the project does not import.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from weightsync_api.v1alpha1 import WeightSync

CHECK_SECONDS = 120


def source_problem(ws: WeightSync, folder: Path) -> str | None:
    """Why the sender's source can't be read, a sentence; None: it can, or it is for the user's own process to know.

    `folder`: the manifest's, in which relative paths are resolved.
    """
    source = ws.spec.sender.source
    if source.trainer is not None or _has_command(ws):
        return None
    path = source.checkpoint.path if source.checkpoint is not None else ""
    if path and not (folder / path).exists():
        return f"checkpoint path {path} doesn't exist"  # the common slip, told at once
    command = [sys.executable, "-m", "weightsync_agent.sources.check", source.model_dump_json(exclude_none=True)]
    try:
        found = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=CHECK_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return None  # a slow file system: the sender itself will tell
    lines = found.stderr.strip().splitlines()
    return lines[-1] if found.returncode == 2 and lines else None


def _has_command(ws: WeightSync) -> bool:
    """Whether the sender is the user's own container, which may make the checkpoint first."""
    spec = ws.spec.sender.template.get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    return any(isinstance(c, dict) and c.get("command") for c in containers or [])
