"""One of two FSDP2 ranks that train a tiny model on the CPU: CONFIG_PATH RANK STORE OPTIONS_JSON.

Options: each_rank, lora, dtype, steps. Says, a JSON object a line, what became of each step, and at rank 0 what a fresh
model on the gathered weights generates. Goes on when it reads a line: `die` kills it, `send` makes a step without
training before it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trainer_models import greedy, tiny
from weightsync_agent.errors import GatherFailed, WeightSyncError
from weightsync_agent.sender import Sender
from weightsync_api.agent_config import AgentConfig


def build(options: dict[str, Any]) -> Any:
    model = tiny.model(1, tie_word_embeddings=False)
    if options.get("lora"):
        import peft

        torch.manual_seed(5)
        targets = ["q_proj", "up_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    return model


def shard(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    inner = model.base_model.model if hasattr(model, "peft_config") else model
    for layer in inner.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def expected(model: Any, options: dict[str, Any]) -> list[int]:
    """By a way of its own: torch gathers the weights, and a fresh model loads them."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() != 0:
        return []
    whole = build(options)
    whole.load_state_dict(state)
    if options.get("lora"):
        whole = whole.merge_and_unload(safe_merge=True)
    dtype = getattr(torch, options.get("dtype", "float32"))
    fresh = type(whole)._from_config(whole.config, dtype=dtype).eval()
    fresh.load_state_dict(whole.state_dict())
    return greedy(fresh)


def main() -> None:
    torch.set_num_threads(1)
    config = AgentConfig.model_validate_json(Path(sys.argv[1]).read_text())
    rank, options = int(sys.argv[2]), json.loads(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=2)
    model = shard(build(options))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05)
    dtype = getattr(torch, options["dtype"]) if "dtype" in options else None
    torch.manual_seed(100 + rank)
    order = ""
    with Sender(model, config=config, dtype=dtype, each_rank=options.get("each_rank", False)) as sender:
        for _ in range(options["steps"]):
            if order == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if order != "send":
                tokens = torch.randint(2, 200, (2, 16))
                model(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            told: dict[str, Any] = {}
            try:
                report = sender.step()
                told = {"step": report.step, "complete": report.complete, "names": sender.report().names}
            except GatherFailed as error:
                print(json.dumps({"failed": type(error).__name__, "said": str(error)}), flush=True)
                continue
            except WeightSyncError as error:
                told = {"failed": type(error).__name__}
            told["expected"] = expected(model, options)
            print(json.dumps(told), flush=True)
            order = sys.stdin.readline().strip()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
