"""vLLM in the trainer's own process: `LLM`, `AsyncLLM` and vLLM's own four calls, against engines started fresh."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import vllm_models
from judge import chosen, fresh_tokens, judge, own_tokens
from peer_process import interpreter
from vllm_common import BUCKETS, PROMPTS, SHORT
from vllm_server import environment
from weightsync_agent.manifest import describe, layout

pytestmark = pytest.mark.timeout(900)
SCRIPT = Path(__file__).parent / "vllm_inprocess.py"
SEEDS = [1, 2, 3, 4, 5]


def run(mode: str, model: Path, kind: str, seeds: list[int], plain: bool) -> list[dict[str, Any]]:
    words = [interpreter("vllm"), str(SCRIPT), mode, str(model), kind, ",".join(map(str, seeds))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=850, env=environment(plain), check=False)
    said = [json.loads(line.removeprefix("SAID ")) for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert done.returncode == 0, done.stderr[-4000:]
    return said


def expected(model: Path, kind: str, seed: int) -> list[list[int]]:
    return [fresh_tokens(model, vllm_models.weights(kind, seed), prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("mode", ["llm", "async", "calls"])
def test_greedy_tokens_are_those_of_a_fresh_model_after_each_of_five_steps(tmp_path: Path, mode: str) -> None:
    model = vllm_models.write(tmp_path / "model", "untied", 100)
    said = run(mode, model, "untied", SEEDS, plain=True)
    if mode == "async":
        assert_kept(model, said.pop())
    assert [line["seed"] for line in said] == SEEDS
    for line in said:
        assert line["tokens"] == expected(model, "untied", line["seed"]), line["seed"]
    if mode != "async":
        assert [line["label"] for line in said] == [str(seed) for seed in SEEDS]
    if mode == "llm":
        assert all(line["resumed"] and line["own"] for line in said)


def assert_kept(model: Path, over: dict[str, Any]) -> None:
    """A request that ran when a step came is the old weights' up to there, and the new ones' alone from there on."""
    old, new = (judge(model, vllm_models.weights("untied", over[which])) for which in ("old", "new"))
    kept = own_tokens(old, SHORT, over["made"])
    assert 0 < kept < len(over["made"])
    assert all(chosen(new, SHORT, over["made"])[kept:])


@pytest.mark.parametrize("kind", ["tied", "moe"])
def test_the_running_engine_s_tokens_are_those_of_an_engine_started_on_the_new_weights(
    tmp_path: Path, kind: str
) -> None:
    (after,) = run("llm", vllm_models.write(tmp_path / "old", kind, 100), kind, [7], plain=False)
    (started,) = run("fresh", vllm_models.write(tmp_path / "new", kind, 7), kind, [7], plain=False)
    assert after["tokens"] == started["tokens"]


def test_a_quantised_engine_is_fed_layer_by_layer_and_says_what_one_started_on_the_new_weights_does(
    tmp_path: Path,
) -> None:
    """From the trainer's memory at once, and through slots that are filled again before a layer is complete."""
    assert_layers_lie_across_buckets("int8")
    # `plain`: what is named is named for its quantisation then, not for a CPU's packing.
    said = run("buckets", vllm_models.write(tmp_path / "old", "int8", 100), "int8", [6, 7], plain=True)
    (started,) = run("fresh", vllm_models.write(tmp_path / "new", "int8", 7), "int8", [7], plain=True)
    assert said[0]["tokens"] != said[1]["tokens"] == started["tokens"]
    assert [line["tokens"] for line in said[2:]] == [line["tokens"] for line in said[:2]]
    for line in said:
        assert not line["in_place"]
        for layer in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
            assert f"model.layers.0.{layer}" in line["reason"]
        assert "CompressedTensorsLinearMethod" in line["reason"]
        assert "norm" not in line["reason"]
        assert "embed" not in line["reason"]


def assert_layers_lie_across_buckets(kind: str) -> None:
    """With a slot's being filled again between a layer's first part and its last."""
    manifest = describe(vllm_models.weights(kind, 0))
    found = layout(manifest, BUCKETS["bucket_bytes"])
    where: dict[str, list[int]] = {}
    for bucket, pieces in enumerate(found.buckets):
        for piece in pieces:
            where.setdefault(manifest.tensors[piece.tensor].name, []).append(bucket)
    assert any(len(buckets) > 1 for buckets in where.values())
    for first, last in (("self_attn.q_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        apart = where[f"model.layers.0.{last}.weight"][0] - where[f"model.layers.0.{first}.weight"][0]
        assert apart >= BUCKETS["slots"], first
