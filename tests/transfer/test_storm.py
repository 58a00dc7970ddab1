"""Kills, stops and restarts at random moments: no bytes that are called whole are torn, and no step outlasts its wait.

The seed is printed; WEIGHTSYNC_STORM_SEED runs one again, though moments are the machine's.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import storm_process
from storm_process import CALM_SECONDS
from weightsync_api.agent_config import AgentConfig

RECEIVERS = 2
STORM_SECONDS = 5.0
JOIN_SECONDS, ACK_SECONDS, STEP_SECONDS = 1.0, 0.5, 1.5
SLACK_SECONDS = 20.0
"""On top of a step's own waits, for a machine that is busy with other things: only a hang takes this long."""

KINDS = {
    "shared memory, Direct": {"transport": "IPC", "mode": "Direct"},
    "shared memory, Packed": {"transport": "IPC", "mode": "Packed"},
    "gloo": {"transport": "NCCL", "mode": "Packed"},
}


@pytest.fixture(scope="module")
def forks() -> multiprocessing.context.ForkServerContext:
    """Forks processes that have torch imported already: a process that starts anew takes seconds for it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["storm_process"])
    return context


class Storm:
    """The processes of one WeightSync, and what befalls them."""

    def __init__(self, context: Any, config: AgentConfig) -> None:
        self._context = context
        self._config = config.model_dump_json()
        self._adopt = config.mode == "Direct"
        self._senders = 0
        self._running: dict[int, BaseProcess] = {}
        """By rank; 0 is the sender."""

    def start(self, rank: int) -> None:
        if rank:
            process = self._context.Process(target=storm_process.run_receiver, args=(self._config, rank), daemon=True)
        else:
            self._senders += 1
            first_version = self._senders * 1_000_000
            process = self._context.Process(
                target=storm_process.run_sender, args=(self._config, self._adopt, first_version), daemon=True
            )
        process.start()
        self._running[rank] = process

    def start_the_dead(self) -> None:
        for rank in range(RECEIVERS + 1):
            if rank not in self._running or not self._running[rank].is_alive():
                self.start(rank)

    def kill(self, rank: int) -> None:
        self._running[rank].kill()
        self._running[rank].join(CALM_SECONDS)

    def signal(self, rank: int, number: int) -> None:
        process = self._running[rank]
        if process.is_alive():
            assert process.pid is not None
            os.kill(process.pid, number)

    def join(self) -> None:
        for process in self._running.values():
            process.join(CALM_SECONDS)
            assert process.exitcode == 0, f"{process} did not end well"

    def end(self) -> None:
        for rank in self._running:
            self.kill(rank)

    def befall(self, dice: random.Random) -> None:
        """One misfortune."""
        rank, hit = dice.randint(1, RECEIVERS), dice.random()
        if hit < 0.25:
            self.kill(rank)
        elif hit < 0.6:
            self.signal(rank, signal.SIGSTOP)
            time.sleep(dice.choice([0.05, 0.3, 0.8, 1.2]))
            self.signal(rank, signal.SIGCONT)
        elif hit < 0.7:
            self.signal(rank, signal.SIGSTOP)
            time.sleep(dice.uniform(0, 0.2))
            self.kill(rank)
        elif hit < 0.8:
            self.kill(0)
        else:
            self.start_the_dead()


@pytest.fixture
def storm(forks, make_config: Callable[..., AgentConfig]) -> Iterator[Callable[..., Storm]]:
    made: list[Storm] = []

    def make(**changes: Any) -> Storm:
        config = make_config(
            receivers=RECEIVERS, join_timeout_seconds=JOIN_SECONDS, ack_timeout_seconds=ACK_SECONDS,
            step_timeout_seconds=STEP_SECONDS, bucket_bytes=65536, **changes,
        )  # fmt: skip
        made.append(Storm(forks, config))
        return made[-1]

    yield make
    for each in made:
        each.end()


def logged(directory: Path, who: str) -> list[dict[str, Any]]:
    """What all processes of this role have said, one that is killed perhaps in the middle of a line."""
    said: list[dict[str, Any]] = []
    for path in sorted(directory.glob(f"{who}-*.log")):
        lines = path.read_text().splitlines(keepends=True)
        said += [json.loads(line) for line in lines if line.endswith("\n")]
    return said


def reached_all(directory: Path) -> int:
    """Steps that reached every receiver."""
    whole = [line for line in logged(directory, "sender") if line["outcome"] == "whole"]
    return sum(line["ranks"] == list(range(1, RECEIVERS + 1)) for line in whole)


@pytest.mark.timeout(3 * CALM_SECONDS + STORM_SECONDS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_torn_is_called_whole_and_no_step_hangs_in_a_storm(kind, storm, run_dir) -> None:
    seed = int(os.environ.get("WEIGHTSYNC_STORM_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"WEIGHTSYNC_STORM_SEED={seed}")
    dice = random.Random(seed)
    blown = storm(**KINDS[kind])

    def calm() -> None:
        """Until a step that began by now reached all, those who gave up being started anew as their operator does."""
        (run_dir / storm_process.CALM).touch()
        # One may be on its way, and have reached a receiver that was killed since.
        enough, deadline = reached_all(run_dir) + 2, time.monotonic() + CALM_SECONDS
        while reached_all(run_dir) < enough:
            assert time.monotonic() < deadline, f"no step reaches all receivers any more (seed {seed})"
            blown.start_the_dead()
            time.sleep(0.1)

    calm()
    (run_dir / storm_process.CALM).unlink()
    until = time.monotonic() + STORM_SECONDS
    while time.monotonic() < until:
        blown.befall(dice)
        time.sleep(dice.uniform(0, 0.3))
    calm()
    (run_dir / storm_process.END).touch()
    blown.join()
    steps, received = logged(run_dir, "sender"), logged(run_dir, "receiver")
    assert [line for line in received if "torn" in line] == [], f"seed {seed}"
    assert sum("whole" in line for line in received) > 0
    longest = max((line["seconds"] for line in steps if not line["calm"]), default=0.0)
    print(f"{len(steps)} steps, {sum(line['outcome'] != 'whole' for line in steps)} not whole, longest {longest:.2f} s")
    assert longest < JOIN_SECONDS + STEP_SECONDS + SLACK_SECONDS, f"seed {seed}"
