"""Small random checkpoints that transformers and vLLM both load: written by seed, so that a trainer, an engine and a
fresh engine agree on them. Run as a script: DIRECTORY KIND SEED.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import qwen3_checkpoint
import torch

COMMON: dict[str, Any] = {
    # 500 is no multiple of 64: the engine pads the embedding
    "vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MOE: dict[str, Any] = {
    "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
INT8: dict[str, Any] = {
    # 8 bits for weights, a scale a row, and for activations, a scale a token (compressed-tensors' W8A8).
    "quantization_config": {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
                "input_activations": {
                    "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True
                },
            }
        },
    }
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "tied": {**COMMON, "tie_word_embeddings": True},
    "untied": {**COMMON, "tie_word_embeddings": False},
    "moe": {**COMMON, **MOE, "tie_word_embeddings": False},
    "int8": {**COMMON, **INT8, "tie_word_embeddings": False},
}


def shapes(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Checkpoint name and shape of every tensor of a Qwen3 or Qwen3-MoE, in a checkpoint's order."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    found: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (config["vocab_size"], hidden))]
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        found += [
            (layer + "self_attn.q_proj.weight", (heads, hidden)),
            (layer + "self_attn.k_proj.weight", (kv, hidden)),
            (layer + "self_attn.v_proj.weight", (kv, hidden)),
            (layer + "self_attn.o_proj.weight", (hidden, heads)),
            (layer + "self_attn.q_norm.weight", (config["head_dim"],)),
            (layer + "self_attn.k_norm.weight", (config["head_dim"],)),
        ]
        mlps, width = [layer + "mlp."], config["intermediate_size"]
        if "num_experts" in config:
            found.append((layer + "mlp.gate.weight", (config["num_experts"], hidden)))
            mlps = [f"{layer}mlp.experts.{expert}." for expert in range(config["num_experts"])]
            width = config["moe_intermediate_size"]
        for mlp in mlps:
            found += [(mlp + "gate_proj.weight", (width, hidden)), (mlp + "up_proj.weight", (width, hidden))]
            found.append((mlp + "down_proj.weight", (hidden, width)))
        found += [(layer + "input_layernorm.weight", (hidden,)), (layer + "post_attention_layernorm.weight", (hidden,))]
    found.append(("model.norm.weight", (hidden,)))
    if not config["tie_word_embeddings"]:
        found.append(("lm_head.weight", (config["vocab_size"], hidden)))
    return found


def weights(kind: str, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Wide enough apart that a greedy choice is decided by a margin."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    for name, shape in shapes(KINDS[kind]):
        tensor = torch.randn(shape, generator=generator) * (0.25 if len(shape) > 1 else 0.1)
        if name.endswith("_proj.weight") and "quantization_config" in KINDS[kind]:
            scale = tensor.abs().amax(1, keepdim=True) / 127
            found[name], found[name + "_scale"] = (tensor / scale).round().to(torch.int8), scale
            continue
        found[name] = (tensor + 1 if name.endswith("norm.weight") else tensor).to(dtype)
    return found


def write(directory: Path, kind: str, seed: int | None, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint with its tokenizer; without a seed, its configuration alone."""
    given = None if seed is None else weights(kind, seed, dtype)
    return qwen3_checkpoint.write(directory, KINDS[kind], str(dtype).removeprefix("torch."), given)


def nbytes(kind: str, itemsize: int = 4) -> int:
    return sum(math.prod(shape) * itemsize for _, shape in shapes(KINDS[kind]))


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
