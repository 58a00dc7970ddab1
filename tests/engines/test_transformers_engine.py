"""The engine's process: ready only with a whole step, never a mixture, and every request answered or refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from ports import reserve_port
from trainer_models import PROMPT, UPDATES, WAIT_SECONDS, fresh, greedy, tiny, update
from transformers import DynamicCache
from weightsync_agent.engines.completions import CompletionRequest, Refusal
from weightsync_agent.engines.generation import Generator
from weightsync_agent.engines.transformers import TransformersEngine
from weightsync_agent.engines.transformers_model import ModelTarget
from weightsync_agent.errors import StepFailed
from weightsync_agent.receiver import Receiver
from weightsync_agent.sender import Sender
from weightsync_agent.sources.computed import Computed
from weightsync_api.agent_config import ENV_CONFIG, ENV_RANK, AgentConfig

pytest_plugins = ["transfer.harness"]
pytestmark = pytest.mark.timeout(400)


class Engine:
    """`python -m weightsync_agent.engines.transformers` as a receiver, and its endpoint."""

    def __init__(self, folder: Path, config_path: Path, *options: str) -> None:
        port = reserve_port()
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "weightsync_agent.engines.transformers", "--model", str(folder), "--port", str(port),
             "--host", "127.0.0.1", "--device", "cpu", *options],
            env={**os.environ, ENV_CONFIG: str(config_path), ENV_RANK: "1", "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data), timeout=WAIT_SECONDS) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def until_listening(self) -> None:
        until = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < until:
            assert self.process.poll() is None, self.process.communicate()[1]
            try:
                self.ask("/healthz")
            except urllib.error.URLError:
                time.sleep(0.1)
            else:
                return
        pytest.fail("the engine does not listen")

    def until_health(self, key: str, value: object) -> dict[str, Any]:
        until = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < until:
            _, health = self.ask("/healthz")
            if health[key] == value:
                return dict(health)
            time.sleep(0.05)
        pytest.fail(f"{key} is never {value!r}: {health}")

    def greedy(self) -> list[int]:
        status, said = self.ask("/v1/completions", GREEDY)
        assert status == 200, said
        tokens: list[int] = said["choices"][0]["token_ids"]
        return tokens


GREEDY = {
    "prompt": PROMPT[0].tolist(),
    "max_tokens": 12,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


@pytest.fixture
def engine_of(run_dir: Path) -> Iterator[Callable[..., Engine]]:
    started: list[Engine] = []

    def start(config: AgentConfig, folder: Path, *options: str) -> Engine:
        path = run_dir / "engine.json"
        path.write_text(config.model_dump_json())
        started.append(Engine(folder, path, *options))
        return started[-1]

    yield start
    for engine in started:
        engine.process.kill()
        engine.process.communicate()


def test_an_engine_serves_whole_steps_only_and_a_fresh_models_tokens_after_each(
    make_config: Callable[..., AgentConfig], engine_of: Callable[..., Engine], tmp_path: Path
) -> None:
    config = make_config(bucket_bytes=65536)
    trainer = tiny.model(1)
    breaks = False

    def last() -> torch.Tensor:
        if breaks:
            raise RuntimeError("the trainer's weights can't be read")
        return trainer.model.norm.weight

    # One that is made when it is sent: it can fail in the middle of a step, when others are at the engine already.
    weights = {**trainer.state_dict(keep_vars=True), "model.norm.weight": Computed(trainer.model.norm.weight, last)}
    engine = engine_of(config, tiny.save(tmp_path / "model", 2), "--name", "tiny")
    engine.until_listening()
    assert engine.ask("/readyz")[0] == 503
    status, refused = engine.ask("/v1/completions", GREEDY)
    assert (status, refused["error"]["type"]) == (503, "not_ready")
    assert engine.ask("/v1/models")[1]["data"] == [{"id": "tiny", "object": "model"}]

    with Sender(weights, config=config) as sender:
        for number in range(1, UPDATES + 1):
            update(trainer, number)
            assert sender.step().complete
            engine.until_health("step", number)
            assert engine.greedy() == greedy(fresh(trainer))
            assert engine.ask("/readyz")[0] == 200

        breaks = True
        with pytest.raises((StepFailed, RuntimeError)):
            sender.step()
        health = engine.until_health("ready", False)
        assert (health["state"], health["step"], health["alive"]) == ("Tainted", UPDATES, True)
        assert engine.ask("/readyz")[0] == 503
        status, refused = engine.ask("/v1/completions", GREEDY)
        assert status == 503
        assert "broke off" in refused["error"]["message"]

        breaks = False
        update(trainer, 99)
        assert sender.step().complete
        engine.until_health("ready", True)
        assert engine.greedy() == greedy(fresh(trainer))

    # The sender is gone, and the engine keeps what is whole.
    assert engine.greedy() == greedy(fresh(trainer))
    status, said = engine.ask("/v1/completions", {"prompt": "abc", "n": 3, "seed": 5, "logprobs": 0, "max_tokens": 4})
    assert status == 200
    assert [choice["index"] for choice in said["choices"]] == [0, 1, 2]
    assert said["system_fingerprint"] == f"step-{UPDATES + 2}"
    assert said["usage"]["prompt_tokens"] == 3
    for choice in said["choices"]:
        assert len(choice["logprobs"]["token_logprobs"]) <= 4
        assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"])
    for body, sentence in (
        (b"{", "body: Invalid JSON"),
        ({"prompt": [999]}, "token 999 of the prompt is beyond the model's vocabulary of 272"),
        ({"prompt": "a", "stream": True, "best_of": 2}, "stream: Input should be False; best_of: is not known here"),
    ):
        status, refused = engine.ask("/v1/completions", body)
        assert status == 400
        assert sentence in refused["error"]["message"]
    assert engine.ask("/nowhere")[0] == 404
    engine.process.terminate()
    _, log = engine.process.communicate(timeout=WAIT_SECONDS)
    assert engine.process.returncode == 0, log
    assert "serves nothing until the next whole step" in log


def test_an_engine_whose_model_differs_ends_and_says_all_differences(
    make_config: Callable[..., AgentConfig], engine_of: Callable[..., Engine], tmp_path: Path
) -> None:
    config = make_config(join_timeout_seconds=5)
    with Sender(tiny.model(1, intermediate_size=80), config=config):
        engine = engine_of(config, tiny.save(tmp_path / "model", 2))
        _, log = engine.process.communicate(timeout=WAIT_SECONDS)
    assert engine.process.returncode == 1
    assert "ManifestMismatch: model.layers.0.mlp.gate_proj.weight: the sender's shape is [80, 48]" in log


def old_then_new(old: Any, new: Any, count: int, keep_cache: bool) -> list[int]:
    """Greedy: `count` tokens of `old`, then `new` up to 12; over the old keys and values, or over new ones."""
    tokens, cache, made = PROMPT, DynamicCache(), []
    with torch.no_grad():
        for place in range(12):
            model = old if place < count else new
            if not keep_cache and place == count:
                cache = DynamicCache()
                tokens = torch.cat([PROMPT, torch.tensor([made])], dim=1)
            logits = model(tokens, past_key_values=cache, use_cache=True).logits
            made.append(int(logits[0, -1].argmax()))
            tokens = torch.tensor([[made[-1]]])
    return made


@pytest.mark.parametrize("pause", ["Keep", "Abort", "Wait", "None"])
def test_what_becomes_of_a_request_that_runs_when_a_step_comes(
    pause: str, make_config: Callable[..., AgentConfig]
) -> None:
    config = make_config(bucket_bytes=65536, engine={"pause": pause})
    trainer, model = tiny.model(1), tiny.model(2)
    over, fifth = threading.Event(), threading.Event()
    calls: list[int] = []
    with Sender(trainer, config=config) as sender, Receiver(ModelTarget(model), config=config, rank=1) as receiver:
        engine = TransformersEngine(Generator(model, None, "tiny", 64), receiver)

        def hook(*_: object) -> None:
            """In the middle of a request, waits for the step to come: no clock decides what is seen."""
            calls.append(1)
            if len(calls) == 5:
                fifth.set()
                until = time.monotonic() + WAIT_SECONDS
                while not receiver.pending and time.monotonic() < until:
                    time.sleep(0.005)

        thread = threading.Thread(target=engine.run, args=(over.is_set,))
        thread.start()
        try:
            assert sender.step().complete
            old = fresh(trainer)
            handle = model.register_forward_pre_hook(hook)
            while not engine.health().ready:
                time.sleep(0.01)
            answer = engine.submit(CompletionRequest(**GREEDY))
            assert fifth.wait(WAIT_SECONDS)
            update(trainer, 1)
            assert sender.step().complete
            said = answer.result(WAIT_SECONDS)
            handle.remove()
        finally:
            over.set()
            thread.join()
    (choice,) = said.choices
    assert old_then_new(old, trainer, 12, False) == greedy(old)
    expected = {
        "Keep": old_then_new(old, trainer, 5, keep_cache=False),
        "Abort": greedy(old)[:5],
        "Wait": greedy(old),
        "None": old_then_new(old, trainer, 5, keep_cache=True),
    }
    assert choice.token_ids == expected[pause]
    assert choice.finish_reason == ("abort" if pause == "Abort" else "length")
    assert said.system_fingerprint == ("step-1,2" if pause in ("Keep", "None") else "step-1")
    assert greedy(model) == greedy(fresh(trainer))
    assert len(set(map(tuple, expected.values()))) == 4


@pytest.fixture(scope="module")
def generator() -> Generator:
    return Generator(tiny.model(1), tiny.tokenizer(), "tiny", max_tokens=64)


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({"prompt": "a", "model": "other"}, 404, "model is 'other', and this engine serves 'tiny'"),
        ({"prompt": "a", "max_tokens": 65}, 400, "max_tokens is 65, and this engine was started with 64"),
        ({"prompt": "a" * 200, "max_tokens": 64}, 400, "beyond the model's context of 256"),
        ({"prompt": [-1]}, 400, "token -1 of the prompt is beyond the model's vocabulary of 272"),
        ({"prompt": ["a"] * 300}, 400, "300 prompts, n 1: at most 256"),
        ({"prompt": "a", "n": 2, "temperature": 0}, 400, "n is 2 at temperature 0"),
    ],
)
def test_a_request_that_the_model_cannot_take_never_reaches_it(
    generator: Generator, body: dict[str, Any], status: int, sentence: str
) -> None:
    with pytest.raises(Refusal) as caught:
        generator.check(CompletionRequest(**body))
    assert caught.value.status == status
    assert sentence in str(caught.value)


def test_prompts_of_several_lengths_in_one_request_are_answered_as_alone(generator: Generator) -> None:
    prompts = [[7, 80, 81], [99], [120, 33, 45, 46, 47, 48]]
    together = CompletionRequest(prompt=prompts, max_tokens=8, temperature=0, ignore_eos=True, return_token_ids=True)
    found = generator.complete(together, generator.check(together), 1).choices
    for prompt, choice in zip(prompts, found, strict=True):
        alone = together.model_copy(update={"prompt": prompt})
        assert generator.complete(alone, generator.check(alone), 1).choices[0].token_ids == choice.token_ids
        assert choice.prompt_token_ids == prompt


def test_a_seed_gives_the_same_sample_and_leaves_the_others_alone(generator: Generator) -> None:
    asked = CompletionRequest(prompt="abc", max_tokens=12, seed=3, n=2, return_token_ids=True, ignore_eos=True)
    state = torch.get_rng_state()
    first, second = (generator.complete(asked, generator.check(asked), 1).choices for _ in range(2))
    assert [choice.token_ids for choice in first] == [choice.token_ids for choice in second]
    assert first[0].token_ids != first[1].token_ids
    assert torch.equal(state, torch.get_rng_state())


def test_logprobs_are_the_models_own_and_a_stop_text_ends_the_answer(generator: Generator) -> None:
    asked = CompletionRequest(prompt="abc", max_tokens=6, temperature=0, logprobs=0, return_token_ids=True)
    choice = generator.complete(asked, generator.check(asked), 1).choices[0]
    assert choice.logprobs
    assert choice.token_ids
    assert choice.prompt_token_ids
    with torch.no_grad():
        logits = generator._model(torch.tensor([choice.prompt_token_ids + choice.token_ids])).logits[0]
    start = len(choice.prompt_token_ids) - 1
    for place, token in enumerate(choice.token_ids):
        expected = logits[start + place].log_softmax(-1)[token].item()
        assert choice.logprobs.token_logprobs[place] == pytest.approx(expected, abs=1e-3)
    text = choice.text
    assert len(text) > 2
    stopping = asked.model_copy(update={"stop": text[1:3], "logprobs": None})
    stopped = generator.complete(stopping, generator.check(stopping), 1).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.find(text[1:3])], "stop")
