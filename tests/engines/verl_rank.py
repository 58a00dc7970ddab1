"""One of two FSDP2 ranks that each feed verl's receiver of their own: STORE RANK ADDRESS STEPS. Says what it sent last,
a JSON line."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from bucket_peers import judged
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from weightsync_agent.engines.verl import VerlSender


def main() -> None:
    store, rank, address, steps = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(40, 31), torch.nn.Linear(31, 50), torch.nn.LayerNorm(50))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = StateDictOptions(full_state_dict=True)
    with VerlSender(
        model, address, each_rank=True, dtype=torch.bfloat16, bucket_bytes=2000, allow_object_wire=True
    ) as sender:
        for step in range(1, steps + 1):
            model(torch.randn(8, 40)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            report = sender.step()
            assert (report.step, report.complete) == (step, True)
    whole = get_model_state_dict(model, options=options)
    print(json.dumps(judged({name: tensor.bfloat16() for name, tensor in whole.items()})), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
