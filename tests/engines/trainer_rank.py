"""One of two ranks of transformers' Trainer on the CPU (DDP), with the callback: CONFIG_PATH URL FOLDER.

After each step both compare the engine at URL with a fresh model on their own weights, and say so.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from test_trainers_callback import arguments, by_http, dataset
from trainer_models import fresh, greedy, tiny
from transformers import Trainer, TrainerCallback
from weightsync_agent.trainers import WeightSyncCallback
from weightsync_api.agent_config import AgentConfig


class Comparing(TrainerCallback):
    def __init__(self, url: str) -> None:
        self.url = url

    def on_step_end(self, *_: Any, **kwargs: Any) -> None:
        said = by_http(self.url)
        print(json.dumps({"said": said, "expected": greedy(fresh(kwargs["model"]))}), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    config = AgentConfig.model_validate_json(Path(sys.argv[1]).read_text())
    trainer = Trainer(
        tiny.model(1),
        arguments(Path(sys.argv[3]), ddp_backend="gloo"),
        train_dataset=dataset(32),
        callbacks=[WeightSyncCallback(config=config), Comparing(sys.argv[2])],
    )
    trainer.train()  # type: ignore[no-untyped-call]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
