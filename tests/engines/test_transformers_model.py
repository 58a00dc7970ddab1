"""A live transformers model takes every step in, and generates in between what a fresh one would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from trainer_models import UPDATES, fresh, greedy, step, tiny, update
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from weightsync_agent.engines.transformers_model import ModelTarget, checkpoint_views, live_model
from weightsync_agent.errors import ConfigError, ManifestMismatch
from weightsync_agent.manifest import describe
from weightsync_agent.receiver import Receiver
from weightsync_agent.sender import Sender
from weightsync_api.agent_config import AgentConfig

pytest_plugins = ["transfer.harness"]


def moe(seed: int) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    dense = tiny.config().to_dict()
    sizes = {key: dense[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
                                         "num_key_value_heads", "head_dim", "initializer_range")}  # fmt: skip
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**sizes, intermediate_size=96, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2)
    ).eval()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("mode", ["Packed", "Direct"])
def test_greedy_tokens_are_those_of_a_fresh_model_after_each_of_five_updates(
    tied: bool, mode: str, make_config: Callable[..., AgentConfig], tmp_path: Path
) -> None:
    trainer = tiny.model(1, tie_word_embeddings=tied)
    engine = live_model(tiny.save(tmp_path, 2, tie_word_embeddings=tied), torch.float32, torch.device("cpu"))
    config = make_config(mode=mode, bucket_bytes=65536)
    said = [greedy(engine)]
    with (
        Sender(trainer, config=config, adopt=mode == "Direct") as sender,
        Receiver(ModelTarget(engine), config=config, rank=1) as receiver,
    ):
        for number in range(UPDATES):
            update(trainer, number)
            assert step(sender, receiver).complete
            said.append(greedy(engine))
            assert said[-1] == greedy(fresh(trainer))
    assert len(set(map(tuple, said))) == UPDATES + 1  # else the test could not fail


@pytest.mark.parametrize("source", ["state_dict", "named_parameters", "named_modules' head alone"])
def test_a_tied_head_may_come_under_either_name(source: str, make_config: Callable[..., AgentConfig]) -> None:
    trainer, engine = tiny.model(1), tiny.model(2)
    weights = dict(trainer.named_parameters() if source == "named_parameters" else trainer.state_dict(keep_vars=True))
    assert ("lm_head.weight" in weights) == (source != "named_parameters")
    if source.endswith("alone"):
        del weights["model.embed_tokens.weight"]
    config = make_config(bucket_bytes=65536)
    with (
        Sender(weights, config=config) as sender,
        Receiver(ModelTarget(engine), config=config, rank=1) as receiver,
    ):
        assert step(sender, receiver).complete
    assert greedy(engine) == greedy(trainer)
    assert engine.lm_head.weight is engine.model.embed_tokens.weight


@pytest.mark.parametrize(("sent", "held"), [("live", "live"), ("checkpoint", "live"), ("checkpoint", "checkpoint")])
def test_stacked_experts_come_under_the_live_names_and_the_checkpoints(
    sent: str, held: str, make_config: Callable[..., AgentConfig]
) -> None:
    trainer, engine = moe(1), moe(2)
    views = checkpoint_views(trainer)
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in views
    assert "model.layers.0.mlp.experts.gate_up_proj" in trainer.state_dict()
    config = make_config(bucket_bytes=65536)
    target = ModelTarget(engine) if held == "live" else checkpoint_views(engine)
    with (
        Sender(trainer if sent == "live" else views, config=config) as sender,
        Receiver(target, config=config, rank=1) as receiver,
    ):
        for number in range(UPDATES):
            update(trainer, number)
            assert step(sender, receiver).complete
            assert greedy(engine) == greedy(fresh(trainer))


def test_a_checkpoints_names_are_those_that_save_pretrained_writes(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = moe(1)
    model.save_pretrained(tmp_path)
    written, views = load_file(tmp_path / "model.safetensors"), checkpoint_views(model)
    assert views.keys() == written.keys()
    assert all(torch.equal(views[name], tensor) for name, tensor in written.items())


def test_float32_masters_feed_a_bfloat16_engine(make_config: Callable[..., AgentConfig], tmp_path: Path) -> None:
    trainer = tiny.model(1)
    engine = live_model(tiny.save(tmp_path), torch.bfloat16, torch.device("cpu"))
    assert {p.dtype for p in engine.parameters()} == {torch.bfloat16}
    config = make_config(bucket_bytes=65536)
    with (
        Sender(trainer, config=config, dtype=torch.bfloat16) as sender,
        Receiver(ModelTarget(engine), config=config, rank=1) as receiver,
    ):
        for number in range(UPDATES):
            update(trainer, number)
            assert step(sender, receiver).complete
            assert greedy(engine) == greedy(fresh(trainer, torch.bfloat16))
    assert {p.dtype for p in trainer.parameters()} == {torch.float32}


def test_a_model_that_differs_is_refused_with_all_differences_before_any_byte() -> None:
    engine = tiny.model(2)
    before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    sent = dict(tiny.model(1, intermediate_size=80, tie_word_embeddings=False).state_dict())
    sent["model.extra.weight"] = torch.zeros(1)
    del sent["model.norm.weight"]
    with pytest.raises(ManifestMismatch) as caught:
        ModelTarget(engine).bind(describe(sent))
    for sentence in (
        "model.layers.0.mlp.up_proj.weight: the sender's shape is [80, 48], the receiver's [96, 48]",
        "model.extra.weight: sent, but the receiver has no such tensor",
        "model.norm.weight: the receiver has it, but it is not sent",
    ):
        assert sentence in str(caught.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.state_dict().items())


def test_what_cannot_be_written_in_place_is_refused() -> None:
    model = tiny.model(1)
    model.hf_quantizer = object()
    with pytest.raises(ConfigError, match="is quantised by object"):
        ModelTarget(model)
    with pytest.raises(ConfigError, match="are offloaded to disk"):
        ModelTarget(tiny.model(1).to("meta"))


def test_a_folder_without_a_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no model that transformers can make"):
        live_model(tmp_path, torch.float32, torch.device("cpu"))
