"""Names and shapes of real models' tensors, from the numbers of their Hugging Face configuration.

The layouts are those of the checkpoints that `transformers` writes for Qwen2, Qwen3, Llama and Mistral
(one MLP a layer) and Qwen3Moe (a gate and its experts, each expert's three matrices apart).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import SourceError
from ..manifest import MAX_TENSORS

Shapes = list[tuple[str, tuple[int, ...]]]

Architecture = Literal[
    "Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Qwen3MoeForCausalLM"
]
MAX_CONFIG_BYTES = 4 << 20


class ModelConfig(BaseModel):
    """What of a Hugging Face config.json decides names and shapes; everything else in it is ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    architectures: tuple[Architecture] = Field(description="exactly one")
    hidden_size: int = Field(gt=0, le=1 << 20)
    num_hidden_layers: int = Field(gt=0, le=1000)
    num_attention_heads: int = Field(gt=0, le=4096)
    num_key_value_heads: int | None = Field(default=None, gt=0, le=4096, description="None: as many as heads")
    head_dim: int | None = Field(default=None, gt=0, le=1 << 16, description="None: hidden_size / heads")
    intermediate_size: int = Field(default=0, ge=0, le=1 << 24)
    vocab_size: int = Field(gt=0, le=1 << 26)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    num_experts: int = Field(default=0, ge=0, le=65536)
    moe_intermediate_size: int = Field(default=0, ge=0, le=1 << 24)
    decoder_sparse_step: int = Field(default=1, ge=1, le=1000)
    mlp_only_layers: tuple[int, ...] | None = Field(default=None, max_length=1000)


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int) -> ModelConfig:
    return ModelConfig(
        architectures=("Qwen3ForCausalLM",),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
    )


MODELS = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32),
    "qwen3-30b-a3b": ModelConfig(
        architectures=("Qwen3MoeForCausalLM",),
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        num_experts=128,
        moe_intermediate_size=768,
    ),
}
"""Models by name, with the numbers of the config.json that Qwen published (huggingface.co/Qwen)."""


def shapes(model: str) -> Shapes:
    """Names and shapes of a model's tensors, in the order of its layers; a tied head has no entry.

    `model`: a name of MODELS, or the path of a Hugging Face config.json or of a directory that holds one.
    Raises SourceError.
    """
    known = MODELS.get(model.lower())
    return tensors_of(known if known is not None else _read(model))


def tensors_of(config: ModelConfig) -> Shapes:
    """Names and shapes from a model's numbers. Raises SourceError beyond MAX_TENSORS."""
    architecture = config.architectures[0]
    experts = config.num_experts if architecture == "Qwen3MoeForCausalLM" else 0
    if config.num_hidden_layers * (3 * experts + 16) > MAX_TENSORS:
        raise SourceError(f"the model's configuration makes more than {MAX_TENSORS} tensors")
    hidden = config.hidden_size
    found: Shapes = [("model.embed_tokens.weight", (config.vocab_size, hidden))]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        found += _attention(config, prefix + "self_attn.")
        sparse = (
            experts and layer not in (config.mlp_only_layers or ()) and (layer + 1) % config.decoder_sparse_step == 0
        )
        if sparse:
            found.append((prefix + "mlp.gate.weight", (experts, hidden)))
            for expert in range(experts):
                found += _mlp(prefix + f"mlp.experts.{expert}.", hidden, config.moe_intermediate_size, bias=False)
        else:
            bias = config.mlp_bias and architecture == "LlamaForCausalLM"
            found += _mlp(prefix + "mlp.", hidden, config.intermediate_size, bias=bias)
        found.append((prefix + "input_layernorm.weight", (hidden,)))
        found.append((prefix + "post_attention_layernorm.weight", (hidden,)))
    found.append(("model.norm.weight", (hidden,)))
    if not config.tie_word_embeddings:
        found.append(("lm_head.weight", (config.vocab_size, hidden)))
    return found


def _attention(config: ModelConfig, prefix: str) -> Shapes:
    architecture, hidden = config.architectures[0], config.hidden_size
    width = config.head_dim or hidden // config.num_attention_heads
    queries = config.num_attention_heads * width
    values = (config.num_key_value_heads or config.num_attention_heads) * width
    biased = {
        "Qwen2ForCausalLM": "qkv",
        "MistralForCausalLM": "",
    }.get(architecture, "qkvo" if config.attention_bias else "")
    found: Shapes = []
    for letter, shape in (
        ("q", (queries, hidden)),
        ("k", (values, hidden)),
        ("v", (values, hidden)),
        ("o", (hidden, queries)),
    ):
        found.append((f"{prefix}{letter}_proj.weight", shape))
        if letter in biased:
            found.append((f"{prefix}{letter}_proj.bias", (shape[0],)))
    if architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
        found += [(prefix + "q_norm.weight", (width,)), (prefix + "k_norm.weight", (width,))]
    return found


def _mlp(prefix: str, hidden: int, intermediate: int, bias: bool) -> Shapes:
    found: Shapes = []
    for name, shape in (
        ("gate_proj", (intermediate, hidden)),
        ("up_proj", (intermediate, hidden)),
        ("down_proj", (hidden, intermediate)),
    ):
        found.append((f"{prefix}{name}.weight", shape))
        if bias:
            found.append((f"{prefix}{name}.bias", (shape[0],)))
    return found


def _read(model: str) -> ModelConfig:
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        looks_like_path = "/" in model or model.endswith(".json")
        why = f"{path}: {error.strerror}" if looks_like_path else "no model has this name"
        raise SourceError(
            f"synthetic model {model!r}: {why}; write one of {', '.join(MODELS)} or the path of a config.json"
        ) from None
    if len(text) > MAX_CONFIG_BYTES:
        raise SourceError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes: it is no config.json")
    try:
        return ModelConfig.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        if where.startswith("architectures"):
            raise SourceError(
                f"{path}: its architecture is not one whose shapes are known: {', '.join(get_args(Architecture))}"
            ) from None
        raise SourceError(f"{path} is no configuration of a model: {where}: {first['msg']}") from None
