"""The agent's command in real processes: roles, pace, restarts, signals, and what it says when it can't start."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from loopback import addresses
from safetensors.torch import save_file
from weightsync_api.agent_config import AgentConfig
from weightsync_api.reports import Report

pytestmark = pytest.mark.timeout(300)

WAIT_SECONDS = 120
"""Importing torch on a busy machine takes a while; a wait this long only ends early."""
PATIENT = f"""
from weightsync_agent import parent, stop
from weightsync_agent.main import main
stop.STOP_SECONDS = parent.GRACE_SECONDS = {WAIT_SECONDS}
main()
"""
"""The program, but for the hard end of one that takes longer to end well, as any may whose machine stalls."""


class Agent:
    """One `weightsync-agent` process and the lines of its stderr."""

    def __init__(
        self,
        directory: Path,
        role: str,
        rank: int,
        *arguments: str,
        bound: bool = True,
        under: Sequence[str] = (),
        **env: str,
    ) -> None:
        self.directory, self.rank = directory, rank
        self.process = subprocess.Popen(
            [*under, sys.executable, "-c", PATIENT, *arguments],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "WEIGHTSYNC_CONFIG": str(directory / "config.json"),
                "WEIGHTSYNC_ROLE": role,
                "WEIGHTSYNC_RANK": str(rank),
                "WEIGHTSYNC_EXIT_ON_STDIN_EOF": "1" if bound else "",
                **env,
            },
        )
        self.said: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def until(self, pattern: str) -> str:
        """The next line that matches. Fails at the end of output or the timeout."""
        while True:
            try:
                line = self._lines.get(timeout=WAIT_SECONDS)
            except queue.Empty:
                pytest.fail(f"rank {self.rank} did not say {pattern!r}; it said:\n" + "\n".join(self.said))
            if line is None:
                pytest.fail(f"rank {self.rank} ended before it said {pattern!r}; it said:\n" + "\n".join(self.said))
            self.said.append(line)
            if re.search(pattern, line):
                return line

    def ended(self) -> int:
        code = self.process.wait(WAIT_SECONDS)
        self._reader.join(WAIT_SECONDS)
        while (line := self._lines.get(timeout=WAIT_SECONDS)) is not None:
            self.said.append(line)
        return code

    def term(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def report(self, after: int = 0) -> Report:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(WAIT_SECONDS)
            connection.connect(str(self.directory / f"rank-{self.rank}.http"))
            connection.sendall(f"GET /report?after={after} HTTP/1.0\r\n\r\n".encode())
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        return Report.model_validate_json(answer.partition(b"\r\n\r\n")[2])


@pytest.fixture
def directory() -> Iterator[Path]:
    # Not pytest's tmp_path: a Unix socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ws-") as name:
        yield Path(name)


@pytest.fixture
def configure(directory: Path) -> Callable[..., AgentConfig]:
    model = directory / "tiny.json"
    model.write_text(
        json.dumps(
            {
                "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32,
                "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 100, "tie_word_embeddings": True,
            }
        )
    )  # fmt: skip

    def write(**changes: Any) -> AgentConfig:
        endpoint = f"ipc://{directory}/control"
        values: dict[str, Any] = {
            "namespace": "default", "name": "sample", "device": "CPU", "transport": "IPC", "receivers": 1,
            "joinTimeoutSeconds": WAIT_SECONDS, "source": {"synthetic": {"model": str(model)}},
            "steps": {"intervalSeconds": 0, "count": 3}, "bind": endpoint, "connect": endpoint,
            "runtimeDir": str(directory), "http": f"unix:{directory}",
        }  # fmt: skip
        config = AgentConfig.model_validate(values | changes)
        (directory / "config.json").write_text(config.model_dump_json(by_alias=True))
        return config

    return write


@pytest.fixture
def start(directory: Path) -> Iterator[Callable[..., Agent]]:
    started: list[Agent] = []

    def begin(role: str, rank: int, *arguments: str, **options: Any) -> Agent:
        started.append(Agent(directory, role, rank, *arguments, **options))
        return started[-1]

    yield begin
    for agent in started:
        agent.process.kill()
        agent.process.wait()


Start = Callable[..., Agent]
Configure = Callable[..., AgentConfig]


def test_a_local_sender_does_its_steps_and_ends_and_its_receivers_wait_for_the_next_one(
    configure: Configure, start: Start, directory: Path
) -> None:
    configure(receivers=2)
    first, second = start("receiver", 1), start("receiver", 2)
    sender = start("sender", 0)
    line = sender.until(r"step 1:")
    assert re.search(
        r"to 2 receivers in [0-9.]+ ms \([0-9.]+ GB/s\), slowest ACK .* ms, reserved [+-].*, verified", line
    )
    for receiver in (first, second):
        receiver.until("holds step 3")
        receiver.until("the sender has finished; it waits for the next sender")
    assert sender.report(after=3).finished  # as its runner reads it, for whom it waits
    assert sender.ended() == 0
    assert not (directory / "rank-0.http").exists()

    again = start("sender", 0)  # counts on from what its receivers hold, which is all there was to do but one
    again.until("step 4:")
    first.until("holds step 4")
    assert again.report(after=4).finished
    assert again.ended() == 0

    first.term()
    assert first.ended() == 0
    assert "saying goodbye" in first.said[-1]
    assert not (directory / "rank-1.http").exists()
    second.process.stdin.close()  # type: ignore[union-attr]  # what the death of its runner looks like
    assert second.ended() == 0
    assert not (directory / "rank-2.http").exists()


def test_a_killed_sender_is_followed_by_the_next_at_the_next_step(configure: Configure, start: Start) -> None:
    configure(steps={"intervalSeconds": 0, "count": 0})
    receiver, sender = start("receiver", 1), start("sender", 0)
    receiver.until("holds step 3")
    sender.process.kill()
    held = receiver.report().agents[0].step
    follower = start("sender", 0)
    number = int(re.search(r"step (\d+):", follower.until(r"step \d+:"))[1])  # type: ignore[index]
    assert number > held
    follower.term()
    assert follower.ended() == 0
    receiver.until("the sender was asked to end; it waits for the next sender")


def test_a_killed_receiver_costs_one_step_and_is_whole_again_after_its_return(
    configure: Configure, start: Start
) -> None:
    configure(receivers=2, steps={"intervalSeconds": 0, "count": 0})
    receiver, other, sender = start("receiver", 1), start("receiver", 2), start("sender", 0)
    receiver.until("holds step 3")
    receiver.process.kill()
    back = start("receiver", 1)
    step = int(back.until("rank 1 holds step").rpartition(" ")[2])
    assert step > 3
    sender.until(f"step {step}: .* to 2 receivers")
    assert other.process.poll() is None


def test_a_pods_sender_stays_with_its_last_report_and_serves_receivers_that_come_late(
    configure: Configure, start: Start
) -> None:
    configure()
    receiver, sender = start("receiver", 1), start("sender", 0, bound=False)
    receiver.until("holds step 3")
    assert sender.report(after=2).steps[0].step == 3
    late = start("receiver", 2)
    late.until("rank 2 holds step 4")
    assert sender.report(after=3).finished
    assert sender.process.poll() is None
    sender.term()
    assert sender.ended() == 0


def test_a_receiver_that_joins_between_two_checkpoints_gets_the_last_one(
    configure: Configure, start: Start, directory: Path
) -> None:
    import torch

    save_file({"weight": torch.arange(100.0)}, directory / "model.safetensors")
    configure(
        source={"checkpoint": {"path": str(directory / "model.safetensors")}}, steps={"intervalSeconds": 0, "count": 0}
    )
    receiver, sender = start("receiver", 1), start("sender", 0)
    receiver.until("holds step 1")
    late = start("receiver", 2)
    late.until("rank 2 holds step 2")
    assert sender.process.poll() is None


def test_launch_runs_a_whole_group_in_one_container_with_a_port_each(configure: Configure, start: Start) -> None:
    host, port = next(addresses), 8080
    # No third one: within a step a receiver is not ready.
    configure(http=f"{host}:{port}", steps={"intervalSeconds": 1, "count": 2})
    group = start("", 0, "launch", bound=False, WEIGHTSYNC_AGENTS="sender:0,receiver:1")
    group.until("rank 1 holds step 2")
    for offset in (0, 1):
        with socket.create_connection((host, port + offset), timeout=WAIT_SECONDS) as connection:
            connection.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
            assert b" 200 " in connection.recv(1 << 16)
    group.term()
    assert group.ended() == 0


def test_a_containers_first_process_runs_its_agent_as_a_child(configure: Configure, start: Start) -> None:
    first = ("unshare", "--fork", "--pid", "--mount-proc", "--kill-child")
    if subprocess.run([*first, "true"], capture_output=True).returncode != 0:
        pytest.skip("this user can't make a PID namespace")
    configure()
    receiver, sender = start("receiver", 1), start("sender", 0, under=first, bound=False)
    receiver.until("holds step 3")
    assert sender.report().agents[0].pid > 1


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "env", "sentence"),
    [
        ({}, {"WEIGHTSYNC_ROLE": "trainer"}, "WEIGHTSYNC_ROLE is 'trainer', not sender or receiver"),
        ({}, {"WEIGHTSYNC_CONFIG": ""}, "WEIGHTSYNC_CONFIG is not set"),
        ({}, {"WEIGHTSYNC_CONFIG": "/nowhere/config.json"}, "/nowhere/config.json can't be read"),
        ({"source": {"trainer": {}}}, {}, "the weights are the trainer's: give spec.sender.template a container"),
        ({"source": {"checkpoint": {"path": "/nowhere"}}}, {}, "/nowhere"),
        ({"source": {"synthetic": {"model": "qwen9"}}}, {}, "qwen9"),
        ({"http": "8080"}, {}, "write HOST:PORT"),
        ({"device": "CUDA"}, {"CUDA_VISIBLE_DEVICES": ""}, "this process sees no GPU"),
    ],
)
def test_what_can_t_start_says_why_in_one_sentence_and_exits_2(
    configure: Configure, start: Start, changes: dict[str, Any], env: dict[str, str], sentence: str
) -> None:
    configure(**changes)
    agent = start("sender", 0, **env)
    assert agent.ended() == 2
    assert len(agent.said) == 1
    assert sentence in agent.said[0]


def test_a_second_sender_at_one_place_is_refused_in_a_sentence(configure: Configure, start: Start) -> None:
    configure(steps={"intervalSeconds": 0, "count": 0})
    receiver, _sender = start("receiver", 1), start("sender", 0)
    receiver.until("holds step 1")
    second = start("sender", 0)
    assert second.ended() == 2
    assert len(second.said) == 1
    assert "in use" in second.said[0]
