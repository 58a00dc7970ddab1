"""Checkpoints on disk, as trainers leave them, and what should be read of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from weightsync_agent.sources.checkpoint import Checkpoint, CheckpointSource, Version


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(50, 8, generator=generator).bfloat16(),
        "layer.weight": torch.randn(8, 8, generator=generator),
        "layer.odd": torch.randn(7, generator=generator).half(),
        "scalar": torch.tensor(float(seed)),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
        "head": torch.randn(50, 8, generator=generator).bfloat16(),
    }


def save_sharded(directory: Path, tensors: dict[str, torch.Tensor], count: int = 2) -> None:
    """As Hugging Face lays it out: shards, then the index."""
    directory.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    names = list(tensors)
    for number in range(count):
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        part = {name: tensors[name] for name in names[number::count]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def save_version(root: Path, name: str, seed: int) -> Path:
    (root / name).mkdir(parents=True)
    save_file(weights(seed), root / name / "model.safetensors")
    return root / name


def read(checkpoint: Checkpoint, version: Version | None = None) -> dict[str, torch.Tensor]:
    version = version or checkpoint.current()
    found = {name: torch.full(s, 1).to(getattr(torch, dtype)) for name, dtype, s in version.tensors}
    checkpoint.read_into(version, found)
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return set(found) == set(expected) and all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in expected.items()
    )


def cut(path: Path, by: int) -> None:
    os.truncate(path, path.stat().st_size - by)


def replace(path: Path, seed: int) -> None:
    """Another file takes its place, whole at once."""
    save_file(weights(seed), path.with_name("new"))
    path.with_name("new").rename(path)


def attached(source: CheckpointSource) -> dict[str, torch.Tensor]:
    """The tensors that it reads into, in memory of their own."""
    return source.attach(torch.zeros(source.manifest.arena_bytes, dtype=torch.uint8))
