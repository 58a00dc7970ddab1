"""A trainer of two FSDP2 ranks sends whole weights, gathered bucket by bucket, and never waits for itself."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_process
from weightsync_agent.receiver import Receiver
from weightsync_api.agent_config import AgentConfig

WAIT_SECONDS = 200


class Trainer:
    """Two processes of trainer_process.py."""

    def __init__(self, config: AgentConfig, run_dir: Path, dtype: str, steps: int) -> None:
        (run_dir / "config.json").write_text(config.model_dump_json())
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        script = str(Path(trainer_process.__file__))
        self.ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    script,
                    str(run_dir / "config.json"),
                    str(rank),
                    str(run_dir / "s"),
                    dtype,
                    str(steps),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(2)
        ]

    def told(self) -> dict[str, Any]:
        """What rank 0 said of its next step; ends with the trainer, never hangs beyond the test's own timeout."""
        assert self.ranks[0].stdout is not None
        line = self.ranks[0].stdout.readline()
        assert line, f"rank 0 ended with {self.ranks[0].wait()}"
        found: dict[str, Any] = json.loads(line)
        return found

    def go_on(self) -> None:
        assert self.ranks[0].stdin is not None
        self.ranks[0].stdin.write("\n")
        self.ranks[0].stdin.flush()

    def exit_codes(self) -> list[int]:
        return [rank.wait(WAIT_SECONDS) for rank in self.ranks]

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()


@pytest.fixture
def train(run_dir: Path) -> Iterator[Callable[..., Trainer]]:
    started: list[Trainer] = []

    def start(config: AgentConfig, dtype: str = "none", steps: int = 3) -> Trainer:
        started.append(Trainer(config, run_dir, dtype, steps))
        return started[-1]

    yield start
    for trainer in started:
        trainer.kill()


def held(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("transport", ["IPC", "NCCL"])
@pytest.mark.parametrize("dtype", ["none", "bfloat16"])
def test_shards_arrive_whole_and_bit_for_bit(
    transport: str, dtype: str, make_config: Callable[..., AgentConfig], train: Callable[..., Trainer]
) -> None:
    config = make_config(transport=transport, mode="Packed", bucket_bytes=16384)
    trainer = train(config, dtype)
    target = trainer_process.build().to(getattr(torch, dtype, None)).state_dict()
    target["3.weight"] = target["0.weight"]
    with Receiver(target, config=config, rank=1) as receiver:
        for step in range(1, 4):
            assert receiver.wait(timeout=WAIT_SECONDS) == step
            told = trainer.told()
            assert (told["step"], told["complete"], told["verified"]) == (step, True, step == 1)
            assert held(target) == told["sent"]
            trainer.go_on()
        assert trainer.exit_codes() == [0, 0]


def test_a_step_that_fails_at_rank_0_lets_the_other_rank_go_on(
    make_config: Callable[..., AgentConfig], train: Callable[..., Trainer]
) -> None:
    config = make_config(mode="Packed", receivers=1, join_timeout_seconds=0.2)
    trainer = train(config, steps=2)
    assert trainer.told()["failed"] == "JoinTimeout"  # nobody is there: nothing was gathered
    trainer.go_on()
    assert trainer.told()["failed"] == "JoinTimeout"
    trainer.go_on()
    assert trainer.exit_codes() == [0, 0]
