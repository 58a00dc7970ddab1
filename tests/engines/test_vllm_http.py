"""A real vLLM server follows a trainer over HTTP: its greedy tokens are a fresh model's on the new weights."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_models
from judge import chosen, fresh_tokens, judge, read_on
from vllm_common import LONG, PROMPTS, SHORT, agent_config
from vllm_server import VllmServer
from weightsync_agent.engines.vllm import StepOptions, VllmEngine
from weightsync_agent.engines.vllm_core import CoreStepRequest
from weightsync_agent.engines.vllm_http import HttpEngine
from weightsync_agent.engines.vllm_worker import STEP
from weightsync_agent.errors import JoinTimeout, StepFailed, TransportError, WeightSyncError
from weightsync_agent.sender import Sender
from weightsync_agent.sources.computed import Computed

pytestmark = pytest.mark.timeout(900)

HERE = Path(__file__).parent


class Trainer:
    """One sender and its server."""

    def __init__(
        self, server: VllmServer, kind: str, at_the_end: Callable[[], object] | None = None, **config: Any
    ) -> None:
        """`at_the_end`: called within each step, when most of it is at the engine."""
        self.kind = kind
        self._folder = tempfile.TemporaryDirectory(prefix="ws-")
        self.folder = Path(self._folder.name)
        self.config = agent_config(self.folder, **config)
        self.server = server
        self.weights = vllm_models.weights(kind, 0)
        if kind == "tied":
            self.weights["lm_head.weight"] = self.weights["model.embed_tokens.weight"]  # as a state_dict has it
        sent: dict[str, torch.Tensor | Computed] = dict(self.weights)
        if at_the_end is not None:
            last = self.weights["model.norm.weight"]

            def read() -> torch.Tensor:
                at_the_end()
                return last

            sent["model.norm.weight"] = Computed(last, read)
        adopt = at_the_end is None and self.config.transport == "IPC"
        self.sender = Sender(sent, config=self.config, adopt=adopt)
        self.engine = VllmEngine(server.url, config=self.config)

    def put(self, seed: int) -> None:
        for name, tensor in vllm_models.weights(self.kind, seed).items():
            self.weights[name].copy_(tensor)

    def step(self, seed: int) -> None:
        self.put(seed)
        assert self.engine.step(self.sender).complete

    def expected(self, prompt: list[int], count: int = 16) -> list[int]:
        return fresh_tokens(self.server.model, self.weights, prompt, count)

    def judge(self) -> Any:
        """Of the weights as they are now."""
        return judge(self.server.model, self.weights)

    def assert_serves(self) -> None:
        for prompt in PROMPTS:
            assert self.server.tokens(prompt) == self.expected(prompt)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.sender.close()
        self._folder.cleanup()


def start(kind: str, folder: Path, *options: str, plain: bool) -> VllmServer:
    model = vllm_models.write(folder / "model", kind, 100)
    return VllmServer(
        model, folder / "log", "--weight-transfer-config", '{"backend": "weightsync"}', *options, plain=plain
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """As on a GPU: the plan's way."""
    with start("tied", tmp_path_factory.mktemp("plain"), plain=True) as server:
        yield server


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """The CPU engine as it is, with packed weights: the loaders' way."""
    with start("tied", tmp_path_factory.mktemp("packed"), plain=False) as server:
        yield server


@pytest.fixture(params=["plain", "packed"])
def server(request: pytest.FixtureRequest) -> VllmServer:
    found: VllmServer = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("transport", ["IPC", "NCCL"])
def test_greedy_tokens_are_those_of_a_fresh_model_after_each_of_five_steps(server: VllmServer, transport: str) -> None:
    with Trainer(server, "tied", transport=transport) as trainer:
        for seed in range(1, 6):
            trainer.step(seed)
            trainer.assert_serves()
            assert server.label() == str(trainer.engine.reports[0].step)
        assert not server.paused()


def test_plain_parameters_are_written_in_place_once_the_plan_is_proven(plain: VllmServer) -> None:
    with Trainer(plain, "tied") as trainer:
        trainer.step(1)
        (report,) = trainer.engine.reports
        assert (report.in_place, report.proven, report.reason) == (True, True, "")
        trainer.assert_serves()


def test_packed_layers_go_through_the_loaders_and_are_named(packed: VllmServer) -> None:
    with Trainer(packed, "tied") as trainer:
        trainer.step(1)
        (report,) = trainer.engine.reports
        assert not report.in_place
        assert "model.layers.0.self_attn.qkv_proj.weight: float32 [256, 64] becomes float32 [0]" in report.reason
        assert "UnquantizedLinearMethod" in report.reason


def test_the_loaders_way_can_be_asked_for_and_gives_the_same_tokens(plain: VllmServer) -> None:
    with Trainer(plain, "tied") as trainer:
        trainer.engine = VllmEngine(plain.url, config=trainer.config, layerwise=True)
        trainer.step(2)
        assert not trainer.engine.reports[0].in_place
        trainer.assert_serves()


def test_without_a_cache_reset_a_long_prompt_keeps_the_old_weights_keys(server: VllmServer) -> None:
    with Trainer(server, "tied") as trainer:
        trainer.step(1)
        trainer.assert_serves()  # its keys and values are cached now
        trainer.engine.options = StepOptions(reset_prefix_cache=False)
        trainer.step(2)
        assert server.tokens(LONG) != trainer.expected(LONG)
        trainer.engine.options = StepOptions()
        trainer.step(2)
        trainer.assert_serves()


ENDLESS = 8000
"""Tokens: seconds of work for the fastest machine, and a step's pause comes in a few of its milliseconds."""
SEEDS = range(2, 7)
"""An attempt each: a request that had ended before the step came, as a process may stand still, tells nothing."""


def test_a_kept_request_goes_on_with_the_new_weights(server: VllmServer) -> None:
    with Trainer(server, "tied") as trainer:
        trainer.step(1)
        for seed in SEEDS:
            old = trainer.judge()
            trainer.put(seed)
            with server.stream(SHORT, ENDLESS) as request:
                assert trainer.engine.step(trainer.sender).complete
                made, kept = read_on(request, old, SHORT)
            if kept < len(made):
                break
        assert 0 < kept < len(made), "no step came while the request ran"
        # From where it was paused, what it had is continued by the new weights alone.
        assert all(chosen(trainer.judge(), SHORT, made)[kept:])
        trainer.assert_serves()


def test_an_aborted_request_says_so_and_the_next_one_is_answered_by_the_new_weights(server: VllmServer) -> None:
    with Trainer(server, "tied") as trainer:
        trainer.step(1)
        trainer.engine.options = StepOptions(pause="abort")
        for seed in SEEDS:
            old = trainer.judge()
            trainer.put(seed)
            with server.stream(SHORT, ENDLESS) as request:
                assert trainer.engine.step(trainer.sender).complete
                made = request.end()
            assert all(chosen(old, SHORT, made))
            if len(made) < ENDLESS:
                break
        assert request.finish_reason == "abort"
        trainer.assert_serves()


def test_waited_for_a_request_ends_with_the_old_weights(server: VllmServer) -> None:
    with Trainer(server, "tied") as trainer, ThreadPoolExecutor(1) as pool:
        trainer.step(1)
        trainer.engine.options = StepOptions(pause="wait")
        for seed, count in zip(SEEDS, (300, 1000, 3000, ENDLESS, ENDLESS), strict=True):
            old = trainer.judge()
            trainer.put(seed)
            waited = False
            with server.stream(SHORT, count) as request:
                step = pool.submit(trainer.engine.step, trainer.sender)
                # Paused, and able to say so: the request is not over. Otherwise this is answered after the step.
                while not waited and not step.done():
                    waited = server.paused()
                made = request.end()
                assert step.result(120).complete
            assert (len(made), request.finish_reason) == (count, "length")
            assert all(chosen(old, SHORT, made))
            if waited:
                break
        assert waited, "no step came while the request ran"
        trainer.assert_serves()


def test_a_call_made_again_while_requests_end_waits_for_them_too(plain: VllmServer) -> None:
    """As by a follower that was started anew. Whoever made the first call does not keep the engine paused."""
    with Trainer(plain, "tied") as trainer, ThreadPoolExecutor(2) as pool:
        trainer.step(1)
        request = CoreStepRequest(pause="wait", timeout=20).model_dump_json()
        for seed in SEEDS:
            old = trainer.judge()
            trainer.put(seed)
            before = pauses(plain)
            calls: list[Future[list[Any]]] = []
            with plain.stream(SHORT, ENDLESS) as running:
                for _ in range(2):
                    calls.append(pool.submit(HttpEngine(plain.url).collective_rpc, STEP, None, (request,)))
                    await_pauses(plain, before + len(calls))
                made = running.tokens
            # Nobody reads the request any more, so it ends.
            report = trainer.sender.step()
            assert report.complete
            assert all(chosen(old, SHORT, made))
            assert calls[1].result(120)[0]["step"] == report.step
            why = str(calls[0].exception(120))
            if "no step began" not in why:  # it had not ended before the second call
                break
        assert "a later call takes the step" in why
        assert not plain.paused()
        trainer.assert_serves()


def pauses(server: VllmServer) -> int:
    """How often the engine has been told to let its requests end."""
    return server.said().count("setting pause state to PAUSED_NEW")


def await_pauses(server: VllmServer, count: int) -> None:
    until = time.monotonic() + 120
    while pauses(server) < count:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("held", [False, True], ids=["running", "paused"])
def test_an_engine_that_was_paused_before_stays_so_whatever_becomes_of_the_step(server: VllmServer, held: bool) -> None:
    failing = False

    def gather() -> None:
        if failing:
            raise RuntimeError("rank 3 is gone")

    with Trainer(server, "tied", gather, bucket_bytes=16384) as trainer:
        trainer.step(1)
        if held:
            server.ask("/pause?mode=abort")
        for seed in (2, 4):
            failing = True
            with pytest.raises(StepFailed, match="rank 3 is gone"):
                trainer.step(seed)
            failing = False
            trainer.step(seed + 1)  # at once: while the engine may still be at the one that broke off
            assert server.paused() == held
        if held:
            server.ask("/resume")
        trainer.assert_serves()


MISFITS = {
    "a wrong shape": ("model.norm.weight", torch.zeros(65), "[65]"),
    "a wrong shape in a fused group": ("model.layers.0.self_attn.k_proj.weight", torch.zeros(64, 65), "[64, 65]"),
    "a wrong dtype": ("model.norm.weight", torch.zeros(64, dtype=torch.float64), "float64"),
    "an unknown name": ("model.layers.7.nothing.weight", torch.zeros(3), "model.layers.7.nothing.weight"),
    "a part of a fused group": ("model.layers.1.self_attn.v_proj.weight", None, "qkv_proj"),
    "a missing tensor": ("model.layers.1.mlp.down_proj.weight", None, "down_proj"),
}


@pytest.mark.parametrize("what", MISFITS)
def test_what_does_not_fit_is_refused_before_a_byte_moved(server: VllmServer, what: str) -> None:
    with Trainer(server, "tied") as trainer:
        trainer.step(1)
        name, tensor, said = MISFITS[what]
        weights = vllm_models.weights("tied", 2)
        weights.pop(name, None)
        if tensor is not None:
            weights[name] = tensor
        # Two at once: all of them are listed.
        weights["model.layers.0.input_layernorm.weight"] = torch.zeros(63)
        with tempfile.TemporaryDirectory(prefix="ws-") as folder:
            config = agent_config(Path(folder))
            with Sender(weights, config=config) as other, VllmEngine(server.url, config=config) as engine:
                with pytest.raises((WeightSyncError, TransportError)) as raised:
                    engine.step(other)
                text = str(raised.value) + "".join(getattr(raised.value, "__notes__", []))
        assert said in text
        assert "model.layers.0.input_layernorm.weight" in text
        trainer.assert_serves()  # step 1's, untouched
        assert not server.paused()


def test_a_trainer_killed_within_a_step_leaves_generation_paused_until_a_whole_one(server: VllmServer) -> None:
    with Trainer(server, "tied") as trainer:
        folder = trainer.folder / "other"
        folder.mkdir()
        config = agent_config(folder, mode="Packed", bucket_bytes=16384)
        (folder / "config.json").write_text(config.model_dump_json())
        words = [sys.executable, str(HERE / "vllm_stuck_trainer.py"), str(folder / "config.json"), "tied"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as stuck:
            assert stuck.stdout is not None
            assert stuck.stdout.readline().strip() == "ready"
            engine = VllmEngine(server.url, config=config)
            engine.join()
            taken = engine.begin()
            assert stuck.stdout.readline().strip() == "within the step"
            stuck.kill()
            with pytest.raises(TransportError, match="generation waits for the next whole step"):
                taken.result(120)
            engine.close()
        assert server.paused()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.tokens, SHORT)  # not before the step
            trainer.step(3)
            assert not server.paused()
            assert answer.result(120) == trainer.expected(SHORT)
        trainer.assert_serves()


def test_a_step_that_never_begins_ends_at_its_deadline_and_changes_nothing(server: VllmServer) -> None:
    with Trainer(server, "tied") as trainer:
        trainer.step(1)
        trainer.engine.options = StepOptions(timeout=1)
        with pytest.raises(TransportError, match="no step began within 1 s"):
            trainer.engine.begin().result(60)
        assert not server.paused()
        trainer.assert_serves()


def test_a_trainer_that_comes_back_is_joined_by_the_running_engine(server: VllmServer) -> None:
    with Trainer(server, "tied") as trainer:
        trainer.step(1)
    with Trainer(server, "tied") as trainer:
        trainer.step(2)
        trainer.assert_serves()


def test_an_engine_killed_within_a_step_ends_it_and_not_the_trainer(tmp_path: Path) -> None:
    doomed = False

    with start("untied", tmp_path, plain=True) as server:

        def gather() -> None:
            if doomed:
                server.kill()

        with Trainer(server, "untied", gather, bucket_bytes=16384) as trainer:
            trainer.step(1)
            trainer.assert_serves()
            doomed = True
            # By its connection's end, not by a deadline.
            with pytest.raises(StepFailed, match=r"rank 1.*its connection is gone"):
                trainer.engine.step(trainer.sender)
            with pytest.raises(JoinTimeout):
                trainer.engine.step(trainer.sender)


@pytest.mark.parametrize("plain_weights", [True, False])
def test_two_workers_take_their_shards(tmp_path: Path, plain_weights: bool) -> None:
    options = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")
    server = start("tied", tmp_path, *options, plain=plain_weights)
    with server, Trainer(server, "tied", receivers=2) as trainer:
        for seed in range(1, 6):
            trainer.step(seed)
            trainer.assert_serves()
        assert [report.rank for report in trainer.engine.reports] == [1, 2]
        assert [(r.in_place, r.proven) for r in trainer.engine.reports] == [(plain_weights, plain_weights)] * 2


def test_experts_are_up_to_date_after_each_of_five_steps(tmp_path: Path) -> None:
    with start("moe", tmp_path, plain=False) as server, Trainer(server, "moe") as trainer:
        for seed in range(1, 6):
            trainer.step(seed)
            trainer.assert_serves()


def test_without_the_plugin_a_worker_extension_does(tmp_path: Path) -> None:
    extension = "weightsync_agent.engines.vllm_worker.WeightSyncExtension"
    model = vllm_models.write(tmp_path / "model", "tied", 100)
    server = VllmServer(model, tmp_path / "log", "--worker-extension-cls", extension, VLLM_PLUGINS="")
    with server, Trainer(server, "tied") as trainer:
        for seed in range(1, 3):
            trainer.step(seed)
            trainer.assert_serves()
        assert not trainer.engine.reports[0].core


def test_without_plugin_and_extension_the_error_says_what_to_install(tmp_path: Path) -> None:
    model = vllm_models.write(tmp_path / "model", "tied", 100)
    server = VllmServer(model, tmp_path / "log", VLLM_PLUGINS="")
    with server, Trainer(server, "tied") as trainer, pytest.raises(TransportError, match="weightsync"):
        trainer.engine.join()
