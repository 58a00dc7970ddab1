"""GRPO with TRL, whose completions come from a running engine that has the trainer's weights after every step.

`weightsync run examples/trl-grpo.yaml` runs it beside an engine of transformers.
"""

import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from weightsync_agent.trainers import EngineRollout, WeightSyncCallback

FOLDER = Path(os.environ.get("MODEL", Path(__file__).parent / "build" / "tiny"))
ENGINES = os.environ.get("ENGINES", "http://127.0.0.1:18001").split(",")
STEPS = 5

if not FOLDER.is_dir():
    raise FileNotFoundError(f"{FOLDER}: python examples/tiny_model.py {FOLDER} makes it")
logging.basicConfig(level=logging.INFO, format="%(message)s")
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
rollout = EngineRollout(ENGINES)


def letters(completions: list[str], **_: Any) -> list[float]:
    """The reward: the more letters, the better."""
    return [sum(map(str.isalpha, text)) / max(len(text), 1) for text in completions]


class Compare(TrainerCallback):
    """After each step: do trainer and engine say the same?"""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        prompt = tokenizer("one ")["input_ids"]
        options = {"max_tokens": 16, "temperature": 0}
        engine = rollout.complete([prompt], options)[0].token_ids
        mine = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :].tolist()
        print(f"step {state.global_step}: the engine says what the trainer says: {engine == mine}", flush=True)


trainer = GRPOTrainer(
    model,
    reward_funcs=letters,
    args=GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=8, num_generations=8,
        max_completion_length=16, learning_rate=5e-3, beta=0.0, use_cpu=not torch.cuda.is_available(), bf16=False,
        save_strategy="no", report_to=[], disable_tqdm=True, logging_strategy="no",
    ),
    train_dataset=Dataset.from_dict({"prompt": ["one ", "two ", "three ", "four "] * 16}),
    processing_class=tokenizer,
    rollout_func=rollout,
    callbacks=[WeightSyncCallback(), Compare()],
)  # fmt: skip
trainer.train()
