"""transformers judges what an engine says: which tokens are those of a model on given weights."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from streamed import Streamed

EQUAL = 1e-3
"""Logits that differ by less are one: either may be the largest in another engine's float32."""


def judge(model: Path, weights: dict[str, torch.Tensor]) -> Any:
    """A model of the checkpoint's kind on these weights, which may change afterwards."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        # By a checkpoint, whose names it may have others for: it stacks experts.
        shutil.copy(model / "config.json", folder)
        whole = {name: tensor.detach().clone().contiguous() for name, tensor in weights.items()}
        save_file(whole, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        made, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not found["unexpected_keys"]
    assert set(found["missing_keys"]) <= {"lm_head.weight"}
    return made.eval()


def fresh_tokens(model: Path, weights: dict[str, torch.Tensor], prompt: list[int], count: int = 16) -> list[int]:
    """What a fresh model on these weights says after the prompt."""
    with torch.no_grad():
        ids = torch.tensor([prompt])
        made = judge(model, weights).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    found: list[int] = made[0, len(prompt) :].tolist()
    return found


def chosen(judging: Any, prompt: list[int], made: list[int]) -> list[bool]:
    """Of each token that was made after the prompt: is it the judge's own choice there?"""
    with torch.no_grad():
        logits = judging(torch.tensor([prompt + made])).logits[0, len(prompt) - 1 : -1]
    own = logits.gather(1, torch.tensor(made)[:, None])[:, 0]
    found: list[bool] = (own >= logits.max(1).values - EQUAL).tolist()
    return found


def own_tokens(judging: Any, prompt: list[int], made: list[int]) -> int:
    """How many of the first tokens are the judge's own choices."""
    return [*chosen(judging, prompt, made), False].index(False)


def read_on(request: Streamed, judging: Any, prompt: list[int]) -> tuple[list[int], int]:
    """Reads a request until it clearly says what the judge would not, or ends: what it said, and how much of it the
    judge would have said too.
    """
    made, runs = request.tokens, True
    own = len(made)
    while runs and own > len(made) - 16:
        runs = request.until(2 * len(made))
        made = request.tokens
        own = own_tokens(judging, prompt, made)
    return made, own
