"""Rows of other projects' transfers, by the scripts of the source tree's benchmarks/, which are not in the package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import torch
from weightsync_api.bench_result import BenchRow

from ..errors import ConfigError

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"
VERL_BUCKET_MIB = 512
"""BucketedWeightSender's own default."""


def load() -> ModuleType:
    """benchmarks/peer_runs.py, with what it needs fetched. Raises ConfigError."""
    if not (FOLDER / "peer_runs.py").is_file():
        raise ConfigError(f"--peers needs the source tree: there is no {FOLDER}/peer_runs.py")
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    peers = importlib.import_module("peers")
    if not peers.versions():
        raise ConfigError(f"the peers' files are not there: run `python {FOLDER}/peers.py fetch` first")
    return importlib.import_module("peer_runs")


def versions() -> dict[str, str]:
    """Of the peers that were fetched. Call after `load`."""
    found: dict[str, str] = importlib.import_module("peers").versions()
    return found


def rows(transport: str, model: str, device: torch.device, steps: int) -> list[BenchRow]:
    """Every peer that can move these weights over this transport, one after the other, to one receiver."""
    runs = load()
    place = "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"
    if transport == "shm":
        return [runs.verl(model, place, steps, VERL_BUCKET_MIB)]
    if transport == "ipc":
        return [runs.verl(model, place, steps, VERL_BUCKET_MIB), runs.vllm_ipc(model, place, steps)]
    if transport == "nccl":
        return [runs.vllm_nccl(model, (place, f"cuda:{(device.index or 0) + 1}"), steps)]
    return []
