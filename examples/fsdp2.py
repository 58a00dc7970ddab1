"""FSDP2 with two ranks, each with a half of every weight: they gather a bucket at a time, and rank 0 sends it.

`weightsync run examples/fsdp2.yaml` starts it with torchrun, beside an engine of transformers.
"""

import logging
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from weightsync_agent import Sender

FOLDER = Path(os.environ.get("MODEL", Path(__file__).parent / "build" / "tiny"))
STEPS = 5

if not FOLDER.is_dir():
    raise FileNotFoundError(f"{FOLDER}: python examples/tiny_model.py {FOLDER} makes it")
logging.basicConfig(level=logging.INFO, format="%(message)s")
cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).to(device)
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(rank)  # each rank has data of its own

with Sender.from_env(source=model) as sender:
    for _ in range(STEPS):
        tokens = torch.randint(2, 200, (4, 1), device=device) + torch.arange(32, device=device)  # counting
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report = sender.step()  # on every rank
        if rank == 0:
            print(f"step {report.step}: loss {loss.item():.3f}, {report.bytes} bytes sent", flush=True)
dist.destroy_process_group()
