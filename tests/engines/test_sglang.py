"""A real SGLang server follows a trainer: its greedy tokens are those of a fresh model on the new weights.

On the CPU and off SGLang's declared pins, so optional: skipped where its environment is not installed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import vllm_models
from judge import chosen, fresh_tokens, judge, read_on
from moved_promises import other_objects
from sglang_server import SGLangServer
from weightsync_agent.deadline import Deadline
from weightsync_agent.engines.sglang import SGLangSender
from weightsync_agent.errors import ConfigError, ManifestMismatch, StepFailed
from weightsync_api.reports import AgentState

pytestmark = pytest.mark.timeout(900)

SHORT = list(range(10, 30))
LONG = [(i * 7) % 400 + 10 for i in range(300)]
"""Beyond a page of the prefix cache: wrong until that is emptied."""
ENDLESS = 4000
"""Tokens: seconds of work for the fastest machine, and a step's pause comes in a few of its milliseconds."""


@pytest.fixture(scope="module", params=["untied", "tied"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    folder = tmp_path_factory.mktemp(kind)
    model = vllm_models.write(folder / "model", kind, 0)
    with SGLangServer(model, folder / "log") as running:
        running.model = model  # type: ignore[attr-defined]
        yield running


def weights_of(kind: str, seed: int) -> dict[str, torch.Tensor]:
    found = vllm_models.weights(kind, seed)
    if kind == "tied":
        found["lm_head.weight"] = found["model.embed_tokens.weight"]  # as a trainer's state_dict has it
    return found


def put(weights: dict[str, torch.Tensor], kind: str, seed: int) -> None:
    for name, tensor in weights_of(kind, seed).items():
        weights[name].copy_(tensor)


def assert_serves(server: SGLangServer, weights: dict[str, torch.Tensor]) -> None:
    for prompt in (SHORT, LONG):
        assert server.tokens(prompt) == fresh_tokens(server.model, weights, prompt)  # type: ignore[attr-defined]


@pytest.mark.parametrize("way", ["distributed", "tensor"])
def test_greedy_tokens_are_a_fresh_models_after_each_of_five_updates(server: SGLangServer, kind: str, way: str) -> None:
    weights = weights_of(kind, 0)
    sender = SGLangSender(weights, server.url, way=way, allow_object_wire=True, bucket_bytes=200_000)  # type: ignore[arg-type]
    with sender:
        for seed in range(1, 6):
            if seed == 3:
                other_objects(weights)  # a trainer may move its tensors
            put(weights, kind, seed)
            report = sender.step()
            assert (report.step, report.complete) == (seed, True)
            assert_serves(server, weights)
            assert sender.client.weight_version(Deadline(30)) == str(seed)


def test_a_model_that_does_not_fit_is_refused_before_anything_is_asked_of_the_engine(
    server: SGLangServer, kind: str
) -> None:
    before = server.tokens(SHORT), server.ask("/model_info")["weight_version"]
    good = weights_of(kind, 9)
    bad = {name: tensor for name, tensor in good.items() if name != "model.layers.1.mlp.down_proj.weight"}
    bad["model.norm.weight"] = torch.zeros(65)
    bad["model.nonsense.weight"] = torch.zeros(3)
    bad["model.layers.0.mlp.up_proj.weight"] = good["model.layers.0.mlp.up_proj.weight"].bfloat16()
    with SGLangSender(bad, server.url) as sender, pytest.raises(ManifestMismatch) as refused:
        sender.step()
    for difference in (
        "model.norm.weight: the sender's shape is [65], the receiver's [64]",
        "model.layers.0.mlp.up_proj.weight: the sender's dtype is bfloat16, the receiver's float32",
        "model.nonsense.weight: sent, but the receiver has no such tensor",
        "model.layers.1.mlp.down_proj.weight: the receiver has it, but it is not sent",
    ):
        assert difference in str(refused.value)
    assert (server.tokens(SHORT), server.ask("/model_info")["weight_version"]) == before


@pytest.mark.parametrize("pause", ["abort", "retract", "in_place"])
def test_a_request_on_its_way_ends_as_the_pause_mode_says(server: SGLangServer, kind: str, pause: str) -> None:
    if kind == "tied":
        pytest.skip("the same as untied")
    weights = weights_of(kind, 21)
    with SGLangSender(weights, server.url, pause=pause) as sender:  # type: ignore[arg-type]
        sender.step()
        # A request that had ended before the step came, as a process may stand still, tells nothing: again then.
        for seed in range(22, 27):
            if pause == "in_place":
                sender.client.flush(Deadline(60))  # such a step does not
            old = judge(server.model, weights)  # type: ignore[attr-defined]
            put(weights, kind, seed)
            with server.stream(SHORT, ENDLESS) as request:
                sender.step()
                made, kept = read_on(request, old, SHORT)
            if request.finish_reason != "length" or kept < len(made):
                break
        if pause == "abort":
            assert (request.finish_reason, kept) == ("abort", len(made))
        else:
            assert 0 < kept < len(made), "no step came while the request ran"
        if pause == "retract":
            assert all(chosen(judge(server.model, weights), SHORT, made)[kept:])  # type: ignore[attr-defined]
        if pause == "in_place":
            sender.client.flush(Deadline(60))
        assert_serves(server, weights)


def test_a_source_that_fails_in_the_middle_leaves_the_engine_paused_until_a_whole_step(
    server: SGLangServer, kind: str
) -> None:
    if kind == "tied":
        pytest.skip("the same as untied")

    class Unreadable(torch.Tensor):
        broken = True

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if cls.broken and func is torch.Tensor.copy_:
                raise RuntimeError("rank 3 is gone")
            return super().__torch_function__(func, types, args, kwargs or {})

    weights = {name: tensor.double() for name, tensor in weights_of(kind, 31).items()}
    weights["lm_head.weight"] = weights["lm_head.weight"].as_subclass(Unreadable)
    with SGLangSender(weights, server.url, bucket_bytes=100_000, dtype=torch.float32) as sender:
        with pytest.raises(StepFailed, match="rank 3 is gone") as failed:
            sender.step()
        assert failed.value.report.receivers[0].state == AgentState.TAINTED
        assert "step 1 broke off" in sender.tainted
        whole = {name: tensor.float() for name, tensor in weights.items()}
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.tokens, SHORT)  # paused: nobody is answered by mixed weights
            Unreadable.broken = False
            sender.step()
            assert sender.tainted == ""
            assert answer.result(100) == fresh_tokens(server.model, whole, SHORT)  # type: ignore[attr-defined]
        assert_serves(server, whole)


def test_a_server_that_is_not_there_or_none_is_said(server: SGLangServer, kind: str) -> None:
    weights = weights_of(kind, 1)
    with pytest.raises(ConfigError, match="no URL of an SGLang server"):
        SGLangSender(weights, "localhost:30000")
    with pytest.raises(ConfigError, match="allow_object_wire"):
        SGLangSender(weights, server.url, way="tensor")
    with SGLangSender(weights, "http://127.0.0.1:9") as sender, pytest.raises(StepFailed, match="is it running"):
        sender.step()
    with (
        SGLangSender(weights, server.url, expect=Path("/absent")) as sender,
        pytest.raises(ConfigError, match="expect="),
    ):
        sender.step()


def test_a_group_that_the_engine_refuses_fails_the_step_at_once_in_its_words_and_the_next_is_whole(
    server: SGLangServer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = weights_of(kind, 3)
    # Hours: who waited for the engine's workers would wait longer than a test may.
    with SGLangSender(weights, server.url, join_timeout_seconds=36_000) as sender:
        post = sender.client.post

        def asking_for_nonsense(path: str, body: dict[str, object], deadline: Deadline) -> dict[str, object]:
            return post(path, body | ({"backend": "nonsense"} if "backend" in body else {}), deadline)

        monkeypatch.setattr(sender.client, "post", asking_for_nonsense)
        with pytest.raises(StepFailed, match=r"Failed to initialize custom process group: .*nonsense"):
            sender.step()
        assert not sender.tainted
        monkeypatch.undo()
        assert sender.step().complete
        assert_serves(server, weights)


def step_on(sender: SGLangSender) -> None:
    while True:  # ended by the engine's end
        sender.step()


def test_an_engine_that_is_killed_fails_the_step_in_time(kind: str, server: SGLangServer) -> None:
    """Last: it kills the module's own server."""
    weights = weights_of(kind, 1)
    with SGLangSender(weights, server.url, step_timeout_seconds=60) as sender:
        sender.step()
        killer = threading.Timer(0.0, server.kill)
        killer.start()
        with pytest.raises(StepFailed):
            step_on(sender)
