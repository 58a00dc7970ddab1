"""A Qwen3 or Qwen3-MoE checkpoint on disk, as engines load it: its configuration, a tokenizer, and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

WORDS = 1000
"""The tokenizer knows as many at most: prompts are token ids, so a vocabulary's other ids need none."""


def write(directory: Path, config: dict[str, Any], dtype: str, weights: dict[str, torch.Tensor] | None) -> Path:
    """`config`: what transformers' configuration takes; with `num_experts`, that of a Qwen3-MoE. `dtype`: such as
    bfloat16, as the configuration says it. `weights`: by checkpoint name; None: none are written.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

    moe = "num_experts" in config
    made = (Qwen3MoeConfig if moe else Qwen3Config)(**config)
    made.architectures = ["Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM"]
    made.dtype = dtype
    directory.mkdir(parents=True, exist_ok=True)
    made.save_pretrained(directory)
    words = ["<pad>", "<bos>", "<eos>", "<unk>"] + [f"w{i}" for i in range(4, min(config["vocab_size"], WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(directory)
    if weights is not None:
        from safetensors.torch import save_file

        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
