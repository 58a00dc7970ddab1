"""A real vLLM server of two workers follows a trainer that only calls `step()`: nobody calls the server but its users
and the process beside it, which may be killed, as may the trainer and the server.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import vllm_models
from judge import fresh_tokens
from peer_process import interpreter
from ports import reserve_port
from vllm_common import PROMPTS, SHORT, agent_config
from vllm_server import OPTIONS, START_SECONDS, VllmServer, environment
from weightsync_agent.sender import Sender
from weightsync_agent.sources.computed import Computed
from weightsync_api.agent_config import AgentConfig

pytestmark = pytest.mark.timeout(900)

HERE = Path(__file__).parent
WAIT_SECONDS = 120.0
"""Only ends a wait that would not end."""
FOLLOW = [sys.executable, "-m", "weightsync_agent.engines.vllm_follow", "--workers", "2"]


def eventually(true: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < WAIT_SECONDS
        time.sleep(0.05)


class Unix(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)


class Followed(VllmServer):
    """A server, first as the child of the process that has it follow; later ones find it there."""

    def __init__(self, folder: Path) -> None:
        self.port = reserve_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.model = vllm_models.write(folder / "model", "tied", 100)
        self._log = folder / "log"
        serve = [interpreter("vllm"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model), *OPTIONS]
        serve += ["--tensor-parallel-size", "2", "--distributed-executor-backend", "mp"]
        self.start("--", *serve, "--host", "0.0.0.0", "--port", str(self.port), transport="NCCL")
        self._group = self.process.pid
        self._await_start()
        self.engine = psutil.Process(self.process.pid).children(recursive=True)

    def start(self, *words: str, **config: Any) -> None:
        """A follower with a configuration."""
        http = f"unix:{self.folder}"
        self.config = agent_config(self.folder, receivers=2, http=http, join_timeout_seconds=START_SECONDS, **config)
        path = self.folder / "agent.json"
        path.write_text(self.config.model_dump_json())
        env = environment(False, WEIGHTSYNC_CONFIG=str(path), WEIGHTSYNC_ROLE="receiver", WEIGHTSYNC_RANK="1")
        with self._log.open("ab") as output:
            self.process = subprocess.Popen([*FOLLOW, *words], stdout=output, stderr=output, env=env,
                                            start_new_session=True)  # fmt: skip

    def follow(self) -> None:
        """By another follower than the one that started it, where there is none yet."""
        if self.process.pid == self._group:
            self.kill_follower()
        if self.process.poll() is not None:
            self.start("--url", self.url, transport="IPC", mode="Packed", bucket_bytes=16384)

    def kill_follower(self) -> None:
        """It alone."""
        self.process.kill()
        self.process.wait(WAIT_SECONDS)

    def agent(self, rank: int, path: str) -> tuple[int, str]:
        connection = Unix(self.folder / f"rank-{rank}.http")
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def ready(self) -> list[tuple[bool, int]]:
        """Of both workers' agents: are they ready, and with which step?"""
        found = [json.loads(self.agent(rank, "/readyz")[1]) for rank in (1, 2)]
        return [(one["ready"], one["step"]) for one in found]

    def joined(self) -> bool:
        """Both workers wait for their first step. False while no follower answers."""
        with suppress(OSError):
            return all("is Joined" in self.agent(rank, "/readyz")[1] for rank in (1, 2))
        return False

    def close(self) -> None:
        for pid in {self._group, self.process.pid}:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.process.wait(30)


class Trainer:
    """Knows of no engine."""

    def __init__(self, config: AgentConfig, at_the_end: Callable[[], object] = lambda: None) -> None:
        """`at_the_end`: called within each step, when most of it is at the engine."""
        self.weights = vllm_models.weights("tied", 0)
        last = self.weights["model.norm.weight"]

        def read() -> torch.Tensor:
            at_the_end()
            return last

        sent: dict[str, torch.Tensor | Computed] = {**self.weights, "model.norm.weight": Computed(last, read)}
        self.sender = Sender(sent, config=config)

    def step(self, seed: int) -> int:
        for name, tensor in vllm_models.weights("tied", seed).items():
            self.weights[name].copy_(tensor)
        report = self.sender.step()
        assert report.complete
        assert [one.rank for one in report.receivers] == [1, 2]
        return report.step

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.sender.close()


def assert_serves(server: VllmServer, weights: dict[str, torch.Tensor]) -> None:
    for prompt in PROMPTS:
        assert server.tokens(prompt) == fresh_tokens(server.model, weights, prompt)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Followed]:
    with Followed(tmp_path_factory.mktemp("f")) as made:
        yield made


def test_tokens_are_a_fresh_models_after_each_step_of_a_trainer_and_of_the_next(server: Followed) -> None:
    assert server.ready() == [(False, 0)] * 2
    for seeds in ((1, 2, 3), (4,)):
        with Trainer(server.config) as trainer:
            for seed in seeds:
                step = trainer.step(seed)
                assert_serves(server, trainer.weights)
                eventually(lambda step=step: server.ready() == [(True, step)] * 2)
                assert server.label() == str(step)
        assert server.ready() == [(True, step)] * 2  # without a sender too
    assert server.agent(2, "/healthz")[0] == 200
    report = json.loads(server.agent(2, "/report")[1])
    assert [(agent["rank"], agent["state"]) for agent in report["agents"]] == [(2, "Synced")]
    assert f"weightsync_last_step {step}.0" in server.agent(2, "/metrics")[1]
    assert "POST /v1/completions" in server.said()
    # But where one failed, as a step may that begins late at a worker.
    assert not re.search(r"POST /collective_rpc.* 200", server.said())


def test_from_elsewhere_the_engine_can_be_asked_and_not_changed(server: Followed) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with suppress(OSError):
            probe.connect(("192.0.2.1", 9))  # nothing is sent: the address that this machine would use
        address = probe.getsockname()[0]
    if address.startswith(("127.", "0.")):
        pytest.skip("this machine has no address but its own")
    outside = f"http://{address}:{server.port}"
    with urllib.request.urlopen(f"{outside}/v1/models", timeout=30) as answer:
        assert answer.status == 200
    for path in ("/collective_rpc", "/pause", "/sleep", "/update_weights"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(outside + path, b"{}"), timeout=30)
        assert refused.value.code == 403
    assert not server.paused()


def test_when_the_follower_was_killed_the_next_one_goes_on(server: Followed) -> None:
    server.follow()  # kills the one that has followed so far
    doomed = False

    def gather() -> None:
        if doomed:
            server.kill_follower()

    with Trainer(server.config, gather) as trainer:
        trainer.step(6)
        assert_serves(server, trainer.weights)
        doomed = True
        trainer.step(7)  # which it had the engine take: that goes on without it
        doomed = False
        assert_serves(server, trainer.weights)
        server.follow()
        eventually(server.joined)
        step = trainer.step(8)
        assert_serves(server, trainer.weights)
        eventually(lambda: server.ready() == [(True, step)] * 2)


def test_a_broken_step_makes_the_pod_unready_until_a_whole_one(server: Followed) -> None:
    server.follow()
    words = [sys.executable, str(HERE / "vllm_stuck_trainer.py"), str(server.folder / "agent.json"), "tied"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as stuck:
        assert stuck.stdout is not None
        assert [stuck.stdout.readline().strip() for _ in range(2)] == ["ready", "within the step"]
        stuck.kill()
    eventually(lambda: "broke off" in server.agent(1, "/readyz")[1])
    eventually(lambda: [ready for ready, _ in server.ready()] == [False, False])
    assert server.paused()
    with Trainer(server.config) as trainer:
        step = trainer.step(8)
        assert_serves(server, trainer.weights)
        eventually(lambda: server.ready() == [(True, step)] * 2)


def test_a_model_that_does_not_fit_ends_it_with_the_reason(server: Followed) -> None:
    server.follow()
    weights = vllm_models.weights("tied", 1)
    weights["model.norm.weight"] = torch.zeros(65)
    before = server.tokens(SHORT)
    with Sender(weights, config=server.config) as other:
        assert server.process.wait(WAIT_SECONDS) == 1
        other.close()
    assert "model.norm.weight" in server.said().rpartition("Refused: rank")[2]
    assert server.tokens(SHORT) == before


def test_asked_to_end_it_says_goodbye_and_leaves_the_server(server: Followed) -> None:
    server.follow()
    with Trainer(server.config) as trainer:
        trainer.step(9)
        server.process.terminate()
        assert server.process.wait(WAIT_SECONDS) == 0
        eventually(lambda: {agent.state for agent in trainer.sender.report().agents[1:]} == {"Lost"})
        assert_serves(server, trainer.weights)


def test_it_ends_with_its_server_and_says_so(server: Followed) -> None:
    server.follow()
    with Trainer(server.config) as trainer:
        trainer.step(10)
        before = len(server.said())
        for process in server.engine:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        assert server.process.wait(WAIT_SECONDS) == 1
    assert "TransportError" in server.said()[before:]
