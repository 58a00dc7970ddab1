"""LoRA of peft: merged on the way, bit for bit as peft merges, with the base untouched; or the adapters alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("transformers", minversion="5")

import peft
from trainer_models import UPDATES, greedy, step, tiny
from weightsync_agent.engines.transformers_model import ModelTarget
from weightsync_agent.errors import ConfigError
from weightsync_agent.receiver import Receiver
from weightsync_agent.sender import Sender
from weightsync_agent.sources import lora
from weightsync_agent.sources.module import gatherer_for
from weightsync_api.agent_config import AgentConfig

pytest_plugins = ["transfer.harness"]


def adapted(seed: int = 1, dtype: torch.dtype = torch.float32, tied: bool = True, **options: Any) -> Any:
    """A tiny model with adapters that say something (peft's B begins as 0)."""
    base = tiny.model(seed, tie_word_embeddings=tied).to(dtype)
    chosen: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": False}
    return peft.get_peft_model(base, peft.LoraConfig(**(chosen | options))).eval()


def train(model: Any, number: int) -> None:
    """Changes what LoRA trains, and nothing else."""
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.3)


def merged_by_peft(model: Any) -> Any:
    return copy.deepcopy(model).merge_and_unload(safe_merge=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dora": True},
        {"use_rslora": True},
        {"target_modules": ["embed_tokens", "o_proj"]},
        {"modules_to_save": ["lm_head"]},
    ],
    ids=lambda options: "-".join(options) or "lora",
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_sent_is_what_peft_merges_bit_for_bit_and_the_base_stays(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    model = adapted(dtype=dtype, tied="modules_to_save" not in options, **options)
    train(model, 1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gatherer = gatherer_for(model)
    sent = {name: gatherer.gather([place])[0].clone() for place, name in enumerate(gatherer.names)}
    expected = merged_by_peft(model).state_dict()
    assert sent.keys() == expected.keys()
    assert [name for name in sent if not torch.equal(sent[name], expected[name])] == []
    assert [name for name, tensor in model.state_dict().items() if not torch.equal(before[name], tensor)] == []
    assert gatherer.renaming == f"'base_layer.' and 'base_model.model.' left out of {len(sent)} names"


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "sent as bfloat16"])
def test_an_engine_of_the_base_generates_as_the_merged_model_after_each_of_five_updates(
    dtype: torch.dtype | None, make_config: Callable[..., AgentConfig]
) -> None:
    model, engine = adapted(), type(tiny.model(2))._from_config(tiny.config(), dtype=dtype or torch.float32).eval()
    config = make_config(bucket_bytes=16384)  # the embedding is larger: it is made once, and sent in pieces
    said = []
    with (
        Sender(model, config=config, dtype=dtype) as sender,
        Receiver(ModelTarget(engine), config=config, rank=1) as receiver,
    ):
        for number in range(UPDATES):
            train(model, number)
            assert step(sender, receiver).complete
            fresh = type(engine)._from_config(tiny.config(), dtype=dtype or torch.float32).eval()
            fresh.load_state_dict(merged_by_peft(model).state_dict())
            said.append(greedy(engine))
            assert said[-1] == greedy(fresh)
            if dtype is None:
                assert said[-1] == greedy(model)  # the trainer's own, adapters and all
    assert len(set(map(tuple, said))) == UPDATES


def test_adapters_alone_bring_an_engine_with_the_same_base_along(make_config: Callable[..., AgentConfig]) -> None:
    trainer, engine = adapted(), adapted()
    train(engine, 77)
    assert greedy(trainer) != greedy(engine)
    base = {name: tensor.clone() for name, tensor in engine.base_model.model.state_dict().items()}
    config = make_config()
    source = lora.adapters(trainer)
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in source
    with (
        Sender(source, config=config) as sender,
        Receiver(lora.adapters(engine), config=config, rank=1) as receiver,
    ):
        for number in range(UPDATES):
            train(trainer, number)
            report = step(sender, receiver)
            assert report.bytes == sum(tensor.nbytes for tensor in source.values())
            assert greedy(engine) == greedy(trainer)
    after = engine.base_model.model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in base.items() if "lora_" not in name)


def test_adapters_that_are_disabled_merged_or_switched_are_seen_at_each_step() -> None:
    model = adapted()
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    gatherer = gatherer_for(model)
    place = gatherer.names.index("model.layers.0.self_attn.q_proj.weight")
    layer = model.base_model.model.model.layers[0].self_attn.q_proj

    def sent() -> torch.Tensor:
        gatherer.conclude()
        return gatherer.gather([place])[0].clone()

    first = sent()
    assert torch.equal(first, layer.base_layer.weight + layer.get_delta_weight("default"))
    model.set_adapter("second")
    assert torch.equal(sent(), layer.base_layer.weight + layer.get_delta_weight("second"))
    with model.disable_adapter():
        assert torch.equal(sent(), layer.base_layer.weight)
    model.set_adapter("default")
    model.merge_adapter()
    assert torch.equal(sent(), first)
    assert torch.equal(sent(), layer.base_layer.weight)


def test_what_cannot_be_merged_on_the_way_is_refused_by_name() -> None:
    other = peft.get_peft_model(
        tiny.model(1), peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    )
    with pytest.raises(ConfigError, match=r"k_proj is adapted by peft's Linear: only LoRA can be merged"):
        gatherer_for(other)
    with pytest.raises(ConfigError, match="no LoRA adapter called 'other'"):
        lora.adapters(adapted(), "other")


def test_adopting_what_is_made_on_the_way_is_refused(make_config: Callable[..., AgentConfig]) -> None:
    with pytest.raises(ConfigError, match="no LoRA"):
        Sender(adapted(), config=make_config(), adopt=True)
