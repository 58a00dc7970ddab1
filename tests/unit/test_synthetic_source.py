"""Synthetic weights have the very names and shapes of the real models, and change at every step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from weightsync_agent.deadline import Deadline
from weightsync_agent.digest import tensor_digests
from weightsync_agent.errors import ConfigError, SourceError
from weightsync_agent.sources import open_source
from weightsync_agent.sources.shapes import MODELS, ModelConfig, shapes, tensors_of
from weightsync_agent.sources.synthetic import SyntheticSource
from weightsync_api.v1alpha1.spec import Source as SourceSpec
from weightsync_api.v1alpha1.spec import SyntheticSource as SyntheticSpec
from weightsync_api.v1alpha1.spec import TrainerSource


@pytest.mark.parametrize(
    ("model", "tensors", "nbytes"),
    [
        ("qwen3-0.6b", 310, 1_192_099_840),
        ("qwen3-4b", 398, 8_044_936_192),
        ("qwen3-30b-a3b", 18_867, 61_064_245_248),
    ],
)
def test_known_models_have_their_published_size(model: str, tensors: int, nbytes: int) -> None:
    manifest = SyntheticSource(model).manifest
    assert len(manifest.tensors) == tensors
    assert manifest.nbytes == nbytes
    assert ("lm_head.weight" in {entry.name for entry in manifest.tensors}) == (model == "qwen3-30b-a3b")
    assert shapes(model.upper()) == shapes(model)


def _config(model: str) -> dict[str, Any]:
    config = MODELS[model]
    return {key: value for key, value in config.model_dump().items() if key != "architectures"}


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("Qwen2", {}),
        ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
        ("Qwen3", {"head_dim": 24}),
        ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True, "attention_bias": True}),
        ("Llama", {}),
        ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
        ("Mistral", {"head_dim": 16}),
    ],
)
def test_shapes_are_those_of_transformers(tmp_path: Path, kind: str, extra: dict[str, Any]) -> None:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 96,
        "tie_word_embeddings": False,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes | extra)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    config.architectures = [f"{kind}ForCausalLM"]
    config.save_pretrained(tmp_path)
    found = shapes(str(tmp_path / "config.json"))
    assert found == shapes(str(tmp_path))
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert dict(found) == expected
    assert len(found) == len(expected)


def test_the_named_models_are_those_of_transformers() -> None:
    for name in ("qwen3-0.6b", "qwen3-4b"):
        with torch.device("meta"):
            model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_config(name)))
        assert dict(shapes(name)) == {n: tuple(p.shape) for n, p in model.named_parameters()}


def test_a_mixture_has_its_experts_apart_and_dense_layers_where_the_configuration_says() -> None:
    config = MODELS["qwen3-30b-a3b"].model_copy(
        update={"num_hidden_layers": 4, "num_experts": 3, "decoder_sparse_step": 2, "mlp_only_layers": (3,)}
    )
    names = dict(tensors_of(config))
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert names["model.layers.1.mlp.gate.weight"] == (3, 2048)
    assert names["model.layers.1.mlp.experts.2.down_proj.weight"] == (2048, 768)
    assert names["model.layers.3.mlp.up_proj.weight"] == (6144, 2048)
    assert "model.layers.3.mlp.gate.weight" not in names


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "No such file or directory; write one of qwen3-0.6b, qwen3-4b, qwen3-30b-a3b or the path"),
        ("{", "is no configuration of a model"),
        ({"architectures": ["BertModel"]}, "its architecture is not one whose shapes are known: Qwen2ForCausalLM"),
        ({}, "its architecture is not one whose shapes are known"),
        ({"architectures": ["LlamaForCausalLM"], "hidden_size": -1}, "hidden_size"),
        ({"architectures": ["LlamaForCausalLM"], "hidden_size": 10**30}, "hidden_size"),
        ("x" * (5 << 20), "it is no config.json"),
    ],
)
def test_a_wrong_configuration_is_a_sentence(tmp_path: Path, content: object, sentence: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(SourceError, match=sentence):
        shapes(str(path))


def test_an_unknown_model_is_told_the_known_ones() -> None:
    with pytest.raises(SourceError, match=r"'qwen3-5b': no model has this name; write one of qwen3-0.6b"):
        shapes("qwen3-5b")


def test_a_configuration_of_too_many_tensors_is_refused() -> None:
    config = MODELS["qwen3-30b-a3b"].model_copy(update={"num_experts": 65536})
    with pytest.raises(SourceError, match="more than 1000000 tensors"):
        tensors_of(config)


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    config = ModelConfig(
        architectures=("LlamaForCausalLM",),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=2000,
    )
    (tmp_path / "config.json").write_text(config.model_dump_json())
    return str(tmp_path)


def test_each_step_has_other_bytes_in_the_same_place(tiny: str) -> None:
    source = SyntheticSource(tiny)
    named = source.attach(torch.zeros(source.manifest.arena_bytes, dtype=torch.uint8))
    assert list(named) == [entry.name for entry in source.manifest.tensors]
    places = [tensor.data_ptr() for tensor in named.values()]
    seen = set()
    for step in range(1, 6):
        assert source.refresh(step, Deadline(0))
        seen.add(tensor_digests(named.values()))
    assert len(seen) == 5
    assert [tensor.data_ptr() for tensor in named.values()] == places
    assert not source.finished
    for tensor in named.values():
        assert tensor.isfinite().all()
        assert 0.01 < tensor.float().std() < 0.03


def test_every_tensor_changes_in_a_step_of_a_small_model(tiny: str) -> None:
    source = SyntheticSource(tiny)
    named = source.attach(torch.zeros(source.manifest.arena_bytes, dtype=torch.uint8))
    before = {name: tensor.clone() for name, tensor in named.items()}
    source.refresh(2, Deadline(0))
    assert not any(torch.equal(named[name], tensor) for name, tensor in before.items())


def test_the_same_calls_make_the_same_bytes(tiny: str) -> None:
    digests = []
    for _ in range(2):
        source = SyntheticSource(tiny, dtype="float32", seed=3)
        named = source.attach(torch.zeros(source.manifest.arena_bytes, dtype=torch.uint8))
        for step in range(1, 4):
            source.refresh(step, Deadline(0))
        digests.append(tensor_digests(named.values()))
    assert digests[0] == digests[1]


def test_the_resource_opens_its_source(tiny: str) -> None:
    source = open_source(SourceSpec(synthetic=SyntheticSpec(model=tiny)))
    assert {entry.dtype for entry in source.manifest.tensors} == {"bfloat16"}
    with pytest.raises(ConfigError, match=r"the trainer calls Sender\.from_env"):
        open_source(SourceSpec(trainer=TrainerSource()))
    with pytest.raises(SourceError, match="dtype 'int64'"):
        SyntheticSource(tiny, dtype="int64")


def test_an_arena_that_is_too_small_is_refused(tiny: str) -> None:
    source = SyntheticSource(tiny)
    with pytest.raises(ValueError, match="or more"):
        source.attach(torch.zeros(source.manifest.arena_bytes - 1, dtype=torch.uint8))
