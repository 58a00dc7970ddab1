"""FSDP2 with two ranks over gloo: one sends what all gather, or each sends it to an engine of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from trainer_models import UPDATES, WAIT_SECONDS, greedy, tiny
from weightsync_agent.engines.transformers_model import ModelTarget
from weightsync_agent.receiver import Receiver
from weightsync_agent.targets import Target
from weightsync_api.agent_config import AgentConfig

pytest_plugins = ["transfer.harness"]
pytestmark = pytest.mark.timeout(400)

HERE = Path(__file__).parent


class Trainer:
    """Two processes of fsdp_rank.py, each with a configuration of its own."""

    def __init__(self, configs: Sequence[AgentConfig], run_dir: Path, options: dict[str, Any]) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.ranks = []
        for rank, config in enumerate(configs):
            path = run_dir / f"config-{rank}.json"
            path.write_text(config.model_dump_json())
            words = [sys.executable, str(HERE / "fsdp_rank.py"), str(path), str(rank), str(run_dir / "store")]
            self.ranks.append(
                subprocess.Popen(
                    [*words, json.dumps(options)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
            )

    def told(self) -> list[dict[str, Any]]:
        """What both say of their next step."""
        found = []
        for number, rank in enumerate(self.ranks):
            assert rank.stdout
            line = rank.stdout.readline()
            assert line, f"rank {number} ended with {rank.wait()}"
            found.append(json.loads(line))
        return found

    def go_on(self, orders: Sequence[str] = ("", "")) -> None:
        for rank, order in zip(self.ranks, orders, strict=True):
            assert rank.stdin
            rank.stdin.write(f"{order}\n")
            rank.stdin.flush()

    def exit_codes(self) -> list[int]:
        return [rank.wait(WAIT_SECONDS) for rank in self.ranks]


@pytest.fixture
def train(run_dir: Path) -> Iterator[Callable[..., Trainer]]:
    started: list[Trainer] = []

    def start(configs: Sequence[AgentConfig], **options: Any) -> Trainer:
        started.append(Trainer(configs, run_dir, options))
        return started[-1]

    yield start
    for trainer in started:
        for rank in trainer.ranks:
            rank.kill()
            rank.communicate()


def engine(dtype: torch.dtype = torch.float32) -> Any:
    """The same architecture with other weights."""
    return type(tiny.model(2))._from_config(tiny.config(tie_word_embeddings=False), dtype=dtype).eval()


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bfloat16"}, {"lora": True}], ids=["float32", "sent as bfloat16", "lora"]
)
def test_one_rank_sends_what_both_gather(
    options: dict[str, Any], make_config: Callable[..., AgentConfig], train: Callable[..., Trainer]
) -> None:
    if "lora" in options:
        pytest.importorskip("peft")
    config = make_config(bucket_bytes=32768)
    model = engine(getattr(torch, options.get("dtype", "float32")))
    trainer = train([config, config], steps=UPDATES, **options)
    said = []
    with Receiver(ModelTarget(model), config=config, rank=1) as receiver:
        for number in range(1, UPDATES + 1):
            assert receiver.wait(WAIT_SECONDS) == number
            first, _ = trainer.told()
            assert (first["step"], first["complete"]) == (number, True)
            said.append(greedy(model))
            assert said[-1] == first["expected"]
            trainer.go_on()
        assert trainer.exit_codes() == [0, 0]
    assert len(set(map(tuple, said))) == UPDATES


def test_each_rank_feeds_an_engine_of_its_own(
    make_config: Callable[..., AgentConfig], train: Callable[..., Trainer], run_dir: Path
) -> None:
    configs = both(make_config, run_dir)
    trainer = train(configs, steps=UPDATES, each_rank=True)
    models = [engine(), engine()]
    receivers = [Receiver(ModelTarget(m), config=c, rank=1) for m, c in zip(models, configs, strict=True)]
    try:
        for number in range(1, UPDATES + 1):
            assert together(receivers) == [number, number]
            told = trainer.told()
            assert [rank["complete"] for rank in told] == [True, True]
            assert greedy(models[0]) == greedy(models[1]) == told[0]["expected"]
            trainer.go_on()
        assert trainer.exit_codes() == [0, 0]
    finally:
        for receiver in receivers:
            receiver.close()


class Breaking(Target):
    """An engine whose loader fails when it is told to, in the middle of a step."""

    in_place = False

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.broken = True

    def load(self, named: list[tuple[str, torch.Tensor]]) -> None:
        if self.broken and self.weights:
            raise RuntimeError("the loader is broken")
        self.weights |= {name: tensor.clone() for name, tensor in named}


def test_a_rank_whose_engine_fails_or_is_missing_does_not_hold_up_the_other(
    make_config: Callable[..., AgentConfig], train: Callable[..., Trainer], run_dir: Path
) -> None:
    configs = both(make_config, run_dir)
    configs[1] = configs[1].model_copy(update={"join_timeout_seconds": 0.2})
    trainer = train(configs, steps=3, each_rank=True)
    model, target = engine(), Breaking()
    with Receiver(ModelTarget(model), config=configs[0], rank=1) as mine:
        assert mine.wait(WAIT_SECONDS) == 1
        told = trainer.told()
        assert told[1]["failed"] == "JoinTimeout"
        assert greedy(model) == told[0]["expected"]
        with Receiver(target, config=configs[1], rank=1) as others:
            join(others)
            trainer.go_on()
            assert together([mine, others]) == [2, None]
            told = trainer.told()
            assert (told[0]["complete"], told[1]["failed"]) == (True, "StepFailed")
            assert greedy(model) == told[0]["expected"]
            target.broken = False
            trainer.go_on()
            assert together([mine, others])[0] == 3
            told = trainer.told()
            assert [rank["complete"] for rank in told] == [True, True]
        whole = engine()
        whole.load_state_dict(target.weights)
        assert greedy(model) == greedy(whole) == told[0]["expected"]
        trainer.go_on()
        assert trainer.exit_codes() == [0, 0]


def test_a_rank_that_dies_ends_the_others_steps_with_what_to_do(
    make_config: Callable[..., AgentConfig], train: Callable[..., Trainer]
) -> None:
    config = make_config(bucket_bytes=32768)
    trainer = train([config, config], steps=3)
    with Receiver(ModelTarget(engine()), config=config, rank=1) as receiver:
        assert receiver.wait(WAIT_SECONDS) == 1
        trainer.told()
        trainer.go_on(["send", "die"])
        left = trainer.ranks[0]
        assert left.stdout
        # The step that a rank died in, and the one after it: with nobody to gather with, it does not wait either.
        for _ in range(2):
            told = json.loads(left.stdout.readline())
            assert told["failed"] == "GatherFailed"
            assert "trainer rank 0: " in told["said"]
            assert "start the trainer from its last checkpoint" in told["said"]
        assert left.wait(WAIT_SECONDS) == 0


def both(make_config: Callable[..., AgentConfig], run_dir: Path) -> list[AgentConfig]:
    """Two WeightSyncs, one a rank."""
    made = []
    for rank in range(2):
        endpoint = f"ipc://{run_dir}/{rank}/control"
        (run_dir / str(rank)).mkdir()
        folder = str(run_dir / str(rank))
        made.append(
            make_config(name=f"rank-{rank}", bind=endpoint, connect=endpoint, runtime_dir=folder, bucket_bytes=32768)
        )
    return made


def join(receiver: Receiver) -> None:
    """Until it is admitted: the sender takes no note of who comes within a step."""
    while receiver.state.state != "Joined":
        receiver.poll(0.05)


def together(receivers: Sequence[Receiver]) -> list[int | None]:
    """The step that each takes in, at the same time; None where one broke off."""
    found: list[int | None] = [None] * len(receivers)

    def take(place: int) -> None:
        receiver = receivers[place]
        before = receiver.state.message
        for _ in range(WAIT_SECONDS * 10):
            found[place] = receiver.poll(0.1)
            if found[place] is not None or (receiver.state.message != before and "broke off" in receiver.state.message):
                return

    threads = [threading.Thread(target=take, args=(place,)) for place in range(len(receivers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    return found
