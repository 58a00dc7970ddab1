"""The model that trainer and engines share, the question they are asked, and a record of what they answered."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

FOLDER = Path(os.environ.get("QUICKSTART_MODEL", Path(__file__).parent / "build" / "smollm2"))
ANSWERS = Path(os.environ.get("QUICKSTART_ANSWERS", Path(__file__).parent / "build" / "answers"))
QUESTION = "What is WeightSync?"
ANSWER = "WeightSync brings the trainer's new weights to every inference engine after each step."

if not (FOLDER / "config.json").is_file():
    sys.exit(f"There is no model in {FOLDER}: run `python examples/quickstart/prepare.py` first (`make run` does).")

logging.disable_progress_bar()
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
prompt = tokenizer.apply_chat_template(
    [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)["input_ids"].to(device)


def trained_model() -> PreTrainedModel:
    """SmolLM2-135M with its real weights."""
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).to(device)


def blank_model() -> PreTrainedModel:
    """The same architecture with random weights: what it knows later, it got from the sender."""
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDER), dtype=torch.float32).to(device)


def answer(model: PreTrainedModel) -> str:
    """The greedy answer to QUESTION: the same weights give the same words."""
    with torch.no_grad():
        tokens = model.generate(prompt, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(tokens[0, prompt.shape[1] :], skip_special_tokens=True)


def record(who: str, step: int, model: PreTrainedModel, first: str, last: str) -> None:
    """Writes what this process answered before its first step and after its last, and a hash of every weight."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    ANSWERS.mkdir(parents=True, exist_ok=True)
    said = {"who": who, "step": step, "first": first, "last": last, "weights": digest.hexdigest()}
    (ANSWERS / f"{who}.json").write_text(json.dumps(said))


def shown(text: str) -> str:
    """On one line, however odd."""
    return json.dumps(text if len(text) <= 88 else text[:72] + "...", ensure_ascii=False)
