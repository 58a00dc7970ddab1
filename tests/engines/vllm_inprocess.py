"""A trainer with vLLM in its own process: llm|buckets|async|calls|fresh MODEL KIND SEED[,SEED...]. Runs in vLLM's
environment.

Says a JSON object a line: {"seed": N, "tokens": [[...], ...]} after each step, and what the workers said. `buckets`:
the steps of `llm`, and then once more through staging buckets, to the same engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import vllm_models
from driver_end import run_driver
from vllm_common import BUCKETS, PROMPTS, SHORT, agent_config
from weightsync_agent.engines.vllm import AsyncVllmEngine, VllmEngine
from weightsync_agent.sender import Sender

OPTIONS: dict[str, Any] = {
    "enforce_eager": True, "dtype": "float32", "max_model_len": 8192, "max_num_seqs": 4, "seed": 0,
    "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 64 << 20,
}  # fmt: skip


def say(**what: Any) -> None:
    print("SAID " + json.dumps(what), flush=True)


def greedy(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    return [
        list(llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0].outputs[0].token_ids)
        for prompt in PROMPTS
    ]


def in_process(model: Path, kind: str, seeds: list[int], ways: Sequence[dict[str, Any]] = ({},)) -> None:
    from vllm import LLM

    llm = LLM(model=str(model), weight_transfer_config={"backend": "weightsync"}, **OPTIONS)
    for way in ways:
        follow(llm, kind, seeds, way)


def follow(llm: Any, kind: str, seeds: list[int], way: dict[str, Any]) -> None:
    """`way`: what differs from the configuration of vllm_common.py."""
    with trainer(kind, way) as (weights, sender):
        engine = VllmEngine(llm, config=sender.config)
        for seed in seeds:
            put(weights, kind, seed)
            taken = engine.step(sender)
            (report,) = engine.reports
            told = {"in_place": report.in_place, "reason": report.reason, "own": report.step == taken.step}
            told["resumed"] = engine._word is not None  # an engine that can't write it has it taken away
            say(seed=seed, tokens=greedy(llm), label=llm.get_weight_version(), **told)
        engine.close()


def by_calls(model: Path, kind: str, seeds: list[int]) -> None:
    """vLLM's own four calls, as its own trainers make them."""
    from vllm import LLM

    llm = LLM(model=str(model), weight_transfer_config={"backend": "weightsync"}, **OPTIONS)
    with trainer(kind) as (weights, sender), ThreadPoolExecutor(1) as pool:
        given = {"config": sender.config.model_dump(mode="json"), "first_rank": 1}
        llm.init_weight_transfer_engine({"init_info": given})
        for seed in seeds:
            put(weights, kind, seed)
            sent = pool.submit(sender.step)
            llm.start_weight_update()
            llm.update_weights({"update_info": {"timeout": 60.0}})
            llm.finish_weight_update(str(seed))
            sent.result(60)
            llm.reset_prefix_cache()
            say(seed=seed, tokens=greedy(llm), label=llm.get_weight_version())


async def asynchronous(model: Path, kind: str, seeds: list[int]) -> None:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=str(model), weight_transfer_config={"backend": "weightsync"}, **OPTIONS)
    )
    count = 0

    async def tokens(prompt: list[int]) -> list[int]:
        nonlocal count
        count += 1
        sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        found: list[int] = []
        async for output in llm.generate({"prompt_token_ids": prompt}, sampling, request_id=str(count)):
            found = list(output.outputs[0].token_ids)
        return found

    with trainer(kind) as (weights, sender):
        engine = AsyncVllmEngine(llm, config=sender.config)
        for seed in seeds:
            put(weights, kind, seed)
            await engine.step(sender)
            say(seed=seed, tokens=[await tokens(prompt) for prompt in PROMPTS])
        for seed in range(seeds[-1] + 1, seeds[-1] + 6):
            put(weights, kind, seed)
            if made := await over_a_step(llm, engine, sender, seed):
                say(old=seed - 1, new=seed, made=made)
                break
        await engine.close()


async def over_a_step(llm: Any, engine: AsyncVllmEngine, sender: Sender, seed: int) -> list[int]:
    """What a request says that runs when a step comes, and a while after it; nothing where it ended before."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=8000, ignore_eos=True)
    made: list[int] = []
    step: asyncio.Future[Any] | None = None
    enough = 0
    request = llm.generate({"prompt_token_ids": SHORT}, sampling, request_id=f"over-{seed}")
    async with contextlib.aclosing(request):
        async for output in request:
            made = list(output.outputs[0].token_ids)
            if step is None:
                step = asyncio.ensure_future(engine.step(sender))
            elif step.done():
                enough = enough or len(made) + 100
                if len(made) >= enough:
                    break
    assert step is not None
    await step
    return made if enough else []


def fresh(model: Path, kind: str, seeds: list[int]) -> None:
    from vllm import LLM

    del kind
    say(seed=seeds[0], tokens=greedy(LLM(model=str(model), **OPTIONS)))


@contextlib.contextmanager
def trainer(kind: str, way: dict[str, Any] | None = None) -> Any:
    weights = vllm_models.weights(kind, 0)
    with tempfile.TemporaryDirectory(prefix="ws-") as folder:
        config = agent_config(Path(folder), **(way or {}))
        with Sender(weights, config=config, adopt=config.mode != "Packed") as sender:
            yield weights, sender


def put(weights: dict[str, torch.Tensor], kind: str, seed: int) -> None:
    for name, tensor in vllm_models.weights(kind, seed).items():
        weights[name].copy_(tensor)


def main(mode: str, model: str, kind: str, seeds: str) -> None:
    numbers = [int(seed) for seed in seeds.split(",")]
    if mode == "async":
        asyncio.run(asynchronous(Path(model), kind, numbers))
    elif mode == "buckets":
        in_process(Path(model), kind, numbers, [{}, BUCKETS])
    else:
        {"llm": in_process, "calls": by_calls, "fresh": fresh}[mode](Path(model), kind, numbers)


if __name__ == "__main__":
    run_driver(main)
