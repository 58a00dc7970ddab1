"""One rank of an FSDP2 trainer of two, on the CPU: CONFIG_PATH RANK STORE DTYPE STEPS. Rank 0 says what it sent.

A step in which rank 0 fails must let the other go on, so the steps are separated by the trainer's own collective.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from weightsync_agent.errors import WeightSyncError
from weightsync_agent.sender import Sender
from weightsync_api.agent_config import AgentConfig


def build() -> torch.nn.Sequential:
    """Alike on every rank, and in the test: odd sizes, a tie, a buffer, and a tensor larger than a bucket."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Embedding(513, 24),
        torch.nn.Linear(24, 37),
        torch.nn.LayerNorm(37),
        torch.nn.Linear(24, 513, bias=False),
    )
    model[3].weight = model[0].weight
    model.register_buffer("count", torch.arange(3))
    return model


def trained(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.mul_(0.5).add_(number)


def sent(model: torch.nn.Module, dtype: torch.dtype | None) -> dict[str, str]:
    """SHA-256 of each tensor as it should arrive."""
    found = {}
    for name, tensor in model.state_dict().items():
        whole = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        found[name] = hashlib.sha256(whole.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return found


def main() -> None:
    config = AgentConfig.model_validate_json(Path(sys.argv[1]).read_text())
    rank, dtype = int(sys.argv[2]), getattr(torch, sys.argv[4], None)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=2)
    whole, model = build(), build()
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[1], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with Sender(model, config=config, dtype=dtype) as sender:
        for _ in range(int(sys.argv[5])):
            trained(model)
            trained(whole)
            told: dict[str, object] = {}
            try:
                report = sender.step()
                told = {"step": report.step, "complete": report.complete, "verified": report.verified}
            except WeightSyncError as error:
                told = {"failed": type(error).__name__}
            if rank == 0:
                print(json.dumps(told | {"sent": sent(whole, dtype)}), flush=True)
                sys.stdin.readline()
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
