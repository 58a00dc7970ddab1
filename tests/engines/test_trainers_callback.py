"""WeightSyncCallback in real trainers: before a trainer generates, the engine has its weights."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("accelerate")

from ports import reserve_port
from trainer_models import PROMPT, UPDATES, WAIT_SECONDS, fresh, greedy, tiny, update
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from weightsync_agent.engines.completion_server import CompletionServer
from weightsync_agent.engines.generation import Generator
from weightsync_agent.engines.transformers import TransformersEngine
from weightsync_agent.engines.transformers_model import ModelTarget
from weightsync_agent.errors import ConfigError, JoinTimeout, StepFailed, StepTimeout, TransportError
from weightsync_agent.receiver import Receiver
from weightsync_agent.sources.lora import adapters
from weightsync_agent.targets import Target, TensorTarget
from weightsync_agent.trainers import EngineRollout, WeightSyncCallback
from weightsync_api.agent_config import AgentConfig

pytest_plugins = ["transfer.harness"]
pytestmark = [pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")]


@contextmanager
def serving(target: Target, model: Any, config: AgentConfig) -> Iterator[str]:
    """An engine in a thread of this process; gives its URL."""
    over = threading.Event()
    with Receiver(target, config=config, rank=1) as receiver:
        engine = TransformersEngine(Generator(model, tiny.tokenizer(), "tiny", 64), receiver)
        server = CompletionServer(engine, "127.0.0.1", 0)
        thread = threading.Thread(target=engine.run, args=(over.is_set,))
        thread.start()
        try:
            yield f"http://{server.address}"
        finally:
            over.set()
            thread.join()
            server.close()


def by_http(url: str, count: int = 12) -> list[int]:
    """What the engine says greedily after PROMPT."""
    options = {"max_tokens": count, "temperature": 0}
    (choice,) = EngineRollout(url, ignore_eos=True, timeout=60).complete([PROMPT[0].tolist()], options)
    return choice.token_ids


def dataset(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(2, 200, (16,), generator=generator) for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    chosen: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": UPDATES, "per_device_train_batch_size": 2, "learning_rate": 0.05,
        "lr_scheduler_type": "constant", "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True,
        "logging_strategy": "no",
    }  # fmt: skip
    return TrainingArguments(**(chosen | changes))


class Comparing(TrainerCallback):
    """After WeightSyncCallback: the running engine's tokens against a fresh model's."""

    def __init__(self, say: Callable[[], list[int]], dtype: torch.dtype | None = None) -> None:
        self.say, self.dtype = say, dtype
        self.said: list[list[int]] = []

    def compare(self, model: Any) -> None:
        self.said.append(self.say())
        assert self.said[-1] == greedy(fresh(model, self.dtype))

    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        self.compare(kwargs["model"])

    def on_step_end(self, *_: Any, **kwargs: Any) -> None:
        self.compare(kwargs["model"])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "sent as bfloat16"])
def test_transformers_trainer_brings_an_engine_along_from_before_the_first_step_to_the_last(
    dtype: torch.dtype | None, make_config: Callable[..., AgentConfig], tmp_path: Path
) -> None:
    config = make_config(bucket_bytes=65536)
    engine = type(tiny.model(2))._from_config(tiny.config(), dtype=dtype or torch.float32).eval()
    callback = WeightSyncCallback(config=config, dtype=dtype)
    with serving(ModelTarget(engine), engine, config) as url:
        comparing = Comparing(lambda: by_http(url), dtype)
        Trainer(tiny.model(1), arguments(tmp_path), train_dataset=dataset(16), callbacks=[callback, comparing]).train()  # type: ignore[no-untyped-call]
    assert len(comparing.said) == UPDATES + 1
    assert len(set(map(tuple, comparing.said))) > UPDATES // 2  # it learns, and so the tokens change
    assert callback.last
    assert callback.last.step == UPDATES + 1
    assert callback.sender is None


def test_two_ranks_of_a_trainer_send_as_one_and_neither_goes_on_before_the_engine_has_the_weights(
    make_config: Callable[..., AgentConfig], run_dir: Path
) -> None:
    config = make_config(bucket_bytes=65536)
    (run_dir / "config.json").write_text(config.model_dump_json())
    port = reserve_port()
    engine = tiny.model(2)
    with serving(ModelTarget(engine), engine, config) as url:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("trainer_rank.py")), str(run_dir / "config.json"), url,
                 str(run_dir / "out")],
                env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
                     "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            outputs = [rank.communicate(timeout=WAIT_SECONDS * 2)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert [rank.returncode for rank in ranks] == [0, 0]
    for output in outputs:
        told = [json.loads(line) for line in output.splitlines() if line.startswith('{"said"')]
        assert len(told) == UPDATES
        assert [row["said"] for row in told] == [row["expected"] for row in told]


def test_only_every_nth_step_is_sent_and_the_last(make_config: Callable[..., AgentConfig], tmp_path: Path) -> None:
    config, engine = make_config(bucket_bytes=65536), tiny.model(2)
    callback = WeightSyncCallback(config=config, every_steps=2, adopt=True)
    steps: list[int] = []

    class Counting(TrainerCallback):
        def on_step_end(self, *_: Any, **kwargs: Any) -> None:
            assert callback.last
            steps.append(callback.last.step)

    model = tiny.model(1)
    with serving(ModelTarget(engine), engine, config) as url:
        trainer = Trainer(model, arguments(tmp_path), train_dataset=dataset(16), callbacks=[callback, Counting()])
        trainer.train()  # type: ignore[no-untyped-call]
        assert by_http(url) == greedy(fresh(model))
    assert steps == [1, 2, 2, 3, 3]
    assert callback.last
    assert callback.last.step == 4


@pytest.mark.parametrize("failures", [2, 3])
def test_a_step_that_fails_is_tried_again_before_training_goes_on(failures: int) -> None:
    """With a sender that fails by order: how a step comes to fail is tests/transfer's."""
    callback = WeightSyncCallback(attempts=3, config=None)
    left = [failures]

    def step() -> Any:
        if left[0]:
            left[0] -= 1
            raise StepFailed("it reached 0 of 1 receivers", SimpleNamespace(step=1))
        return SimpleNamespace(step=2)

    callback._sender = SimpleNamespace(step=step)
    if failures < 3:
        callback._send(1)
        assert callback.last
        assert callback.last.step == 2
    else:
        with pytest.raises(StepFailed):
            callback._send(1)


def test_training_does_not_begin_without_engines(make_config: Callable[..., AgentConfig], tmp_path: Path) -> None:
    callback = WeightSyncCallback(config=make_config(join_timeout_seconds=0.2))
    trainer = Trainer(tiny.model(1), arguments(tmp_path), train_dataset=dataset(2), callbacks=[callback])
    with pytest.raises(JoinTimeout, match="no receiver has joined"):
        trainer.train()  # type: ignore[no-untyped-call]


def begin(callback: WeightSyncCallback, model: Any, folder: Path) -> tuple[TrainingArguments, TrainerState]:
    """What a Trainer does before its first step."""
    args, state = arguments(folder), TrainerState()
    callback.on_train_begin(args, state, TrainerControl(), model=model)
    return args, state


def begin_before_the_engine_dies(
    callback: WeightSyncCallback, model: Any, config: AgentConfig, folder: Path
) -> tuple[TrainingArguments, TrainerState]:
    engine = tiny.model(2)
    with serving(ModelTarget(engine), engine, config):
        return begin(callback, model, folder)


def test_an_engine_that_comes_back_within_a_rollout_gets_the_weights_then(
    make_config: Callable[..., AgentConfig], tmp_path: Path
) -> None:
    """The next step comes only after the rollout, which waits for the engine."""
    config, model = make_config(bucket_bytes=65536), tiny.model(1)
    callback = WeightSyncCallback(config=config)
    args, state = begin_before_the_engine_dies(callback, model, config, tmp_path)
    engine = tiny.model(3)
    with serving(ModelTarget(engine), engine, config) as url:
        trainer = SimpleNamespace(
            callback_handler=SimpleNamespace(callbacks=[callback]),
            processing_class=tiny.tokenizer(),
            args=SimpleNamespace(max_completion_length=4, temperature=1.0, top_p=1.0, top_k=0),
        )
        found = EngineRollout(url, timeout=WAIT_SECONDS)(["one "], trainer)
        assert len(found["completion_ids"]) == 1
        assert callback.last
        assert callback.last.step > 1
        assert by_http(url) == greedy(fresh(model))
        callback.on_train_end(args, state, TrainerControl())


def test_training_waits_for_an_engine_that_comes_back_and_ends_where_none_does(
    make_config: Callable[..., AgentConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, model = make_config(bucket_bytes=65536), tiny.model(1)
    callback = WeightSyncCallback(config=config)
    args, state = begin_before_the_engine_dies(callback, model, config, tmp_path)
    update(model, 1)
    with ThreadPoolExecutor(1) as pool:
        state.global_step = 1
        step = pool.submit(callback.on_step_end, args, state, TrainerControl())
        while "waiting up to" not in caplog.text:
            assert not step.done(), step.exception()
            time.sleep(0.05)
        engine = tiny.model(3)
        with serving(ModelTarget(engine), engine, config) as url:
            step.result(WAIT_SECONDS)
            assert by_http(url) == greedy(fresh(model))
    assert callback.sender
    callback.sender.config = config.model_copy(update={"join_timeout_seconds": 0.2})
    with pytest.raises(JoinTimeout, match="no receiver has joined"):
        callback.on_step_end(args, state, TrainerControl())
    callback.sender.close()


def test_training_goes_on_from_a_checkpoint_with_the_next_step_and_the_best_weights_are_sent_at_the_end(
    make_config: Callable[..., AgentConfig], tmp_path: Path
) -> None:
    config, engine = make_config(bucket_bytes=65536), tiny.model(2)
    callback = WeightSyncCallback(config=config)

    class Ending(TrainerCallback):
        def on_save(self, *_: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    with serving(ModelTarget(engine), engine, config) as url:
        first = Trainer(
            tiny.model(1), arguments(tmp_path, **saving), train_dataset=dataset(16), callbacks=[callback, Ending()]
        )
        with pytest.raises(KeyboardInterrupt):
            first.train()  # type: ignore[no-untyped-call]
        assert callback.last
        assert callback.last.step == 2
        model = tiny.model(4)
        best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "learning_rate": 0.5}
        again = Trainer(
            model, arguments(tmp_path, **saving, **best), train_dataset=dataset(16), eval_dataset=dataset(4),
            callbacks=[callback],
        )  # fmt: skip
        again.train(resume_from_checkpoint=True)  # type: ignore[no-untyped-call]
        # At its beginning 3, after its two steps 4 and 5, and the best ones: 6.
        assert callback.last.step == 6
        assert by_http(url) == greedy(fresh(model))


def test_what_the_callback_cannot_do_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        WeightSyncCallback(every_steps=0)
    callback = WeightSyncCallback(lora="Adapters")
    trainer = Trainer(tiny.model(1), arguments(tmp_path), train_dataset=dataset(2), callbacks=[callback])
    with pytest.raises(ConfigError, match="lora is Adapters, and the trainer's model has none"):
        trainer.train()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_grpo_generates_each_batch_with_the_weights_that_it_has_by_then(
    lora: bool, make_config: Callable[..., AgentConfig], tmp_path: Path
) -> None:
    pytest.importorskip("trl")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config, engine = make_config(bucket_bytes=65536), tiny.model(2)
    options = {}
    if lora:
        from peft import LoraConfig

        options["peft_config"] = LoraConfig(r=8, target_modules="all-linear")
    with serving(ModelTarget(engine), engine, config) as url:
        rollout = EngineRollout(url, timeout=60)
        said: list[list[int]] = []
        asked: list[int] = []

        def rolled_out(prompts: list[Any], trainer: Any) -> dict[str, Any]:
            said.append(by_http(url))
            model = trainer.accelerator.unwrap_model(trainer.model)
            plain = merged(model) if lora else model
            assert said[-1] == greedy(fresh(plain))
            found = rollout(prompts, trainer)
            asked.append(len(found["completion_ids"]))
            return found

        trainer = GRPOTrainer(
            tiny.model(1),
            reward_funcs=lambda completions, **_: [float(sum(map(str.isalpha, text))) for text in completions],
            args=GRPOConfig(
                output_dir=str(tmp_path), max_steps=UPDATES, per_device_train_batch_size=4, num_generations=4,
                max_completion_length=12, learning_rate=0.05, lr_scheduler_type="constant", report_to=[], use_cpu=True,
                bf16=False, save_strategy="no", disable_tqdm=True, logging_steps=1, beta=0.0,
                dataloader_pin_memory=False,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["one ", "two ", "three ", "four "] * 8}),
            processing_class=tiny.tokenizer(),
            rollout_func=rolled_out,
            callbacks=[WeightSyncCallback(config=config)],
            **options,
        )  # fmt: skip
        trainer.train()
        model = trainer.accelerator.unwrap_model(trainer.model)
        said.append(by_http(url))
        assert said[-1] == greedy(fresh(merged(model) if lora else model))
    assert len(said) == UPDATES + 1
    assert asked == [4] * UPDATES
    assert len(set(map(tuple, said))) > 1
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == UPDATES
    assert all(map(math.isfinite, losses))


def test_adapters_alone_are_those_that_the_model_has_by_now(
    make_config: Callable[..., AgentConfig], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model, engine = (peft.get_peft_model(tiny.model(1), options).eval() for _ in range(2))
    config = make_config()
    callback = WeightSyncCallback(config=config, lora="Adapters")
    with serving(TensorTarget(adapters(engine)), engine, config) as url:
        args, state = begin(callback, model, tmp_path)
        assert by_http(url) == greedy(model)
        model.delete_adapter("default")
        model.add_adapter("default", options)
        model.set_adapter("default")
        state.global_step = 1
        callback.on_step_end(args, state, TrainerControl())
        assert by_http(url) == greedy(model)
        callback.on_train_end(args, state, TrainerControl())


def merged(model: Any) -> Any:
    return copy.deepcopy(model).merge_and_unload(safe_merge=True)


def test_a_rollout_waits_for_an_engine_that_is_not_ready_and_ends_in_time(
    make_config: Callable[..., AgentConfig],
) -> None:
    engine = tiny.model(2)
    with serving(ModelTarget(engine), engine, make_config()) as url:
        with pytest.raises(StepTimeout, match=r"no engine gave a rollout within 5 s; the last: .* 503 .*not_ready"):
            EngineRollout(url, timeout=5).complete([[7]], {"max_tokens": 4})
        with pytest.raises(TransportError, match=r"refused the rollout: 400 .*beyond the model's vocabulary"):
            EngineRollout(url, timeout=60).complete([[9999]], {"max_tokens": 4})
    with pytest.raises(StepTimeout, match="no engine gave a rollout within 1 s"):
        EngineRollout(url, timeout=1).complete([[7]], {"max_tokens": 4})
    with pytest.raises(ConfigError, match="http://engine:8000"):
        EngineRollout("engine:8000")
