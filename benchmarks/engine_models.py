"""The models of the engines' benchmarks: shapes, random weights by seed, and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from weightsync_agent.manifest import Manifest, TensorEntry
from weightsync_agent.sources.shapes import MODELS, ModelConfig, shapes, tensors_of

TINY = {
    "tiny": ModelConfig(
        architectures=("Qwen3ForCausalLM",), hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=500, tie_word_embeddings=True,
    ),
    "tiny-moe": ModelConfig(
        architectures=("Qwen3MoeForCausalLM",), hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=512, num_experts=8,
        moe_intermediate_size=128,
    ),
    "small": ModelConfig(
        architectures=("Qwen3ForCausalLM",), hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, vocab_size=32000,
    ),
}  # fmt: skip
KNOWN = {**MODELS, **TINY}


def manifest_of(model: str) -> Manifest:
    named = shapes(model) if model in MODELS else tensors_of(KNOWN[model])
    return Manifest(tensors=tuple(TensorEntry(name=name, dtype="bfloat16", shape=shape) for name, shape in named))


def fill(tensors: dict[str, torch.Tensor], seed: int) -> None:
    """Random weights, the same for the same seed on the same device."""
    device = next(iter(tensors.values())).device
    generator = torch.Generator(device=device).manual_seed(seed)
    small = max(t.shape[-1] for t in tensors.values()) < 1024
    for name, tensor in tensors.items():
        tensor.normal_(generator=generator).mul_(0.15 if small else 0.02)
        if name.endswith("norm.weight"):
            tensor.add_(1)


def write_checkpoint(model: str, directory: Path, weights: dict[str, torch.Tensor] | None) -> Path:
    """A configuration and a tokenizer; with weights, a whole checkpoint."""
    import qwen3_checkpoint  # of tests/engines, which Runner puts on a case's path

    numbers = KNOWN[model]
    config: dict[str, Any] = numbers.model_dump(exclude={"architectures", "mlp_bias", "mlp_only_layers"})
    if numbers.architectures[0] == "Qwen3MoeForCausalLM":
        config.update(num_experts_per_tok=min(8, numbers.num_experts // 2), norm_topk_prob=True, mlp_only_layers=[])
    else:
        for name in ("num_experts", "moe_intermediate_size", "decoder_sparse_step"):
            config.pop(name)
    config.update(max_position_embeddings=2048, rms_norm_eps=1e-6, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return qwen3_checkpoint.write(directory, config, "bfloat16", weights)
