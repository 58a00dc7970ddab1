"""What trainers and tests of vLLM share; imports nothing that is not in vLLM's environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weightsync_api.agent_config import AgentConfig

SHORT = list(range(10, 30))
LONG = [(i * 7) % 400 + 10 for i in range(300)]
"""Beyond a block of the prefix cache: wrong until that is emptied."""
PROMPTS = (SHORT, LONG)

BUCKETS: dict[str, Any] = {"mode": "Packed", "bucket_bytes": 8192, "slots": 2}
"""Smaller than a layer of the models here: two slots are filled many times in a step."""


def agent_config(folder: Path, **changes: Any) -> AgentConfig:
    endpoint = f"ipc://{folder}/control"
    values: dict[str, Any] = {
        "namespace": "default", "name": "vllm", "device": "CPU", "transport": "IPC", "mode": "Auto",
        "bucket_bytes": 65536, "receivers": 1, "join_timeout_seconds": 90, "ack_timeout_seconds": 60,
        "step_timeout_seconds": 90, "bind": endpoint, "connect": endpoint, "runtime_dir": str(folder),
        "verify": {"mode": "Digest", "everySteps": 2},
    }  # fmt: skip
    return AgentConfig(**(values | changes))
