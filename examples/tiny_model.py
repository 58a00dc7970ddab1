"""A language model that is made in a moment: 60,000 parameters, letters as tokens. For trials, CI and these examples.

    python examples/tiny_model.py FOLDER

writes config, tokenizer and random weights, as `save_pretrained` does; nothing is downloaded.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ("<pad>", "<end>")


def tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token."""
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={word: place for place, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=SPECIAL[0], eos_token=SPECIAL[1])


def config(**changes: Any) -> Qwen3Config:
    sizes: dict[str, Any] = {
        "vocab_size": 272, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "tie_word_embeddings": True,
        # Ten times the usual: which token is likeliest is decided by a wide margin, not by the last bit.
        "initializer_range": 0.2,
    }  # fmt: skip
    return Qwen3Config(**(sizes | changes))


def model(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """Random weights in which no two tensors are alike, the norms' included."""
    torch.manual_seed(seed)
    made = Qwen3ForCausalLM(config(**changes)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.8, 1.2)
    return made


def save(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Writes everything into `folder`, and gives it."""
    model(seed, **changes).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(save(Path(sys.argv[1])))
