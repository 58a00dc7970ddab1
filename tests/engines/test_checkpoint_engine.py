"""checkpoint-engine's own worker and ParameterServer, in processes of their own, against ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bucket_peers import judged
from peer_process import PeerProcess
from ports import reserve_port
from samples import blank, mixed
from weightsync_agent.engines.checkpoint_engine import CheckpointEngineReceiver, CheckpointEngineSender
from weightsync_agent.errors import ConfigError, JoinTimeout, ManifestMismatch, StepFailed, TransportError
from weightsync_agent.manifest import describe
from weightsync_api.reports import AgentState

SMALL_BUCKET = 100_000
ODD_GB = "0.0003"
"""A third of a mebibyte, and no multiple of 256 bytes: the second half of the server's buffer is not aligned."""


@pytest.fixture(autouse=True)
def shared_memory_is_clean() -> Iterator[None]:
    yield
    assert not list(Path("/dev/shm").glob("checkpoint_engine_*"))
    for left in Path("/dev/shm").glob("test_ce_*"):
        left.unlink()  # the stand-in of bucket_peers.py never does


class Engine:
    """What has the engine start its worker: an HTTP request in earnest, a process here."""

    def __init__(self, *options: str) -> None:
        self.options = options
        self.peers: list[PeerProcess] = []

    def __call__(self, handles: dict[str, str]) -> None:
        (address,) = handles.values()
        self.peers.append(PeerProcess("worker", address, *self.options))

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self.peers:
            peer.__exit__()


def sender(weights: object, **options: float) -> CheckpointEngineSender:
    return CheckpointEngineSender(weights, "none", allow_object_wire=True, **{"bucket_bytes": SMALL_BUCKET} | options)  # type: ignore[arg-type]


def whole(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a ParameterServer takes: no tensor without bytes."""
    return {name: tensor for name, tensor in weights.items() if tensor.numel()}


def test_the_worker_holds_our_bytes_after_each_of_five_steps() -> None:
    weights = mixed(0)
    with Engine() as engine, sender(weights) as ours:
        for seed in range(1, 6):
            for name, tensor in mixed(seed).items():
                weights[name].copy_(tensor)
            report = ours.step(engine)
            assert (report.step, report.complete) == (seed, True)
            result = engine.peers[-1].result()
            assert (result["result"], result["hooks"]) == ("ok", 1)
            assert result["got"] == judged(mixed(seed))
            assert result["calls"] >= 3


@pytest.mark.parametrize(
    ("at", "said"), [("0", "bucket 0 of 3: .*the loader says no"), ("2", "bucket 2 of 3: .*the loader says no")]
)
def test_an_error_of_the_worker_fails_the_step_the_last_bucket_included(at: str, said: str) -> None:
    weights = mixed(1)
    with Engine("--fail-at", at) as engine, sender(weights) as ours:
        with pytest.raises(StepFailed, match="(?s)" + said) as failed:
            ours.step(engine)
        assert failed.value.report.receivers[0].state == AgentState.TAINTED
        # The worker was told, and ended as its protocol has it, without its post hook.
        assert "RuntimeError: the sender broke this step off" in engine.peers[0].result()["result"]
        engine.options = ()
        ours.step(engine)
        assert engine.peers[1].result()["got"] == judged(weights)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--die-at", "1"], "closed its socket or ended, bucket 1 of"),
        (["--fail-at", "-3"], "closed its socket or ended, its post hook"),
        (["--hang-at", "1"], "did not answer within 20 s, "),
    ],
    ids=["killed", "the post hook raises", "it hangs"],
)
def test_a_worker_that_ends_or_hangs_fails_the_step_in_time(options: list[str], said: str) -> None:
    seconds = 20.0 if "--hang-at" in options else 60.0  # the worker's start is a part of it
    with (
        Engine(*options) as engine,
        sender(mixed(1), step_timeout_seconds=seconds) as ours,
        pytest.raises(StepFailed, match=said),
    ):
        ours.step(engine)


def test_a_request_that_fails_is_the_steps_error_at_once() -> None:
    def refuse(handles: dict[str, str]) -> None:
        raise ConnectionError("HTTP 500")

    said = "the request to the engine failed: ConnectionError: HTTP 500"
    with sender(mixed(1)) as ours, pytest.raises(StepFailed, match=said):
        ours.step(refuse)


def test_a_worker_that_never_comes_is_a_timeout() -> None:
    with sender(mixed(1), join_timeout_seconds=0.3) as ours, pytest.raises(JoinTimeout, match="has not connected"):
        ours.step(lambda handles: None)


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ConfigError, match="'m' is meta"):
        sender({"m": torch.empty(3, device="meta")})


# --- fed by the real server -----------------------------------------------------------------------------------------


def server(*options: str) -> PeerProcess:
    return PeerProcess("server", "-", "--port", str(reserve_port()), *options)


@pytest.mark.parametrize("gb", [str(1 / 1024), ODD_GB], ids=["aligned", "misaligned second half"])
def test_our_tensors_are_the_servers_even_where_its_halves_are_not_aligned(gb: str) -> None:
    target, hooks = whole(blank()), []
    with server("--gb", gb, "--seed", "5") as peer:
        ours = CheckpointEngineReceiver(
            peer.line()["address"], target, post_hook=lambda: hooks.append(1), allow_object_wire=True
        )
        received = ours.receive()
        assert peer.line()["result"] == "ok"
    assert judged(target) == judged(whole(mixed(5)))
    assert (received.tensors, len(hooks), ours.ready) == (len(target), 1, True)
    assert received.buckets == (1 if gb != ODD_GB else 2)


def test_a_loader_gets_aligned_tensors_from_a_misaligned_half() -> None:
    got: dict[str, torch.Tensor] = {}

    def load(weights: list[tuple[str, torch.Tensor]]) -> None:
        got.update((name, tensor.clone()) for name, tensor in weights)

    with server("--gb", ODD_GB) as peer:
        CheckpointEngineReceiver(
            peer.line()["address"], load, expect=describe(whole(blank())), allow_object_wire=True
        ).receive()
        assert peer.line()["result"] == "ok"
    assert judged(got) == judged(whole(mixed(1)))


def test_a_mismatch_in_the_first_bucket_ends_the_server_with_an_error_and_leaves_the_target_alone() -> None:
    target = whole(blank()) | {"bool.odd": torch.zeros(2)}
    before = judged(target)
    with server("--gb", ODD_GB) as peer:
        ours = CheckpointEngineReceiver(peer.line()["address"], target, allow_object_wire=True)
        with pytest.raises(ManifestMismatch, match=r"bool.odd: the sender's shape is \[3\]"):
            ours.receive()
        assert judged(target) == before
        assert "Failed to update weights due to remote errors" in peer.line()["result"]


@pytest.mark.parametrize("atomic", [False, True])
def test_an_error_in_the_last_bucket_is_raised_here_though_the_server_says_ok(atomic: bool) -> None:
    target = whole(blank()) | {"more": torch.zeros(2)}
    hooks: list[int] = []
    before = judged(target)
    with server() as peer:
        ours = CheckpointEngineReceiver(
            peer.line()["address"], target, post_hook=lambda: hooks.append(1), atomic=atomic, allow_object_wire=True
        )
        with pytest.raises(ManifestMismatch, match="more: the receiver has it, but it is not sent"):
            ours.receive()
        assert peer.line()["result"] == "ok"  # it looks at no answer to its last bucket
    assert not hooks
    assert not ours.ready
    assert (judged(target) == before) == atomic


def test_a_server_that_is_killed_ends_our_receiver_in_time() -> None:
    def load(weights: list[tuple[str, torch.Tensor]]) -> None:
        peer.kill()

    with server("--gb", ODD_GB) as peer:
        ours = CheckpointEngineReceiver(peer.line()["address"], load, allow_object_wire=True)
        with pytest.raises(TransportError, match="closed its socket or ended"):
            ours.receive()
        assert not ours.ready
