"""verl's own sender and receiver, in processes of their own, against ours: every byte, and every way to fail.

Each of verl's ends waits without end for the other; ours must never.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bucket_peers import judged
from peer_process import PeerProcess
from samples import blank, mixed
from weightsync_agent.engines.verl import VerlReceiver, VerlSender
from weightsync_agent.errors import (
    ConfigError,
    JoinTimeout,
    ManifestMismatch,
    StepFailed,
    StepTimeout,
    TransportError,
    ViewsRetained,
)
from weightsync_agent.manifest import describe
from weightsync_api.reports import AgentState

SMALL_BUCKET = 100_000
"""Bytes: the sample takes several."""


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/w.sock"


@pytest.fixture(autouse=True)
def nothing_is_left_in_shared_memory() -> Iterator[None]:
    before = set(Path("/dev/shm").glob("verl_weights_*"))
    yield
    assert set(Path("/dev/shm").glob("verl_weights_*")) <= before


def sender(weights: object, address: str, **options: float) -> VerlSender:
    return VerlSender(weights, address, allow_object_wire=True, **{"bucket_bytes": SMALL_BUCKET} | options)  # type: ignore[arg-type]


def receiver(address: str, target: object, **options: object) -> VerlReceiver:
    return VerlReceiver(address, target, allow_object_wire=True, **options)  # type: ignore[arg-type]


# --- ours feeds verl's receiver ---------------------------------------------------------------------------------------


def test_verls_receiver_holds_our_bytes_after_each_of_five_steps(address: str) -> None:
    weights = mixed(0)
    with PeerProcess("verl-receive", address, "--steps", "5") as peer, sender(weights, address) as ours:
        for seed in range(1, 6):
            for name, tensor in mixed(seed).items():
                weights[name].copy_(tensor)
            report = ours.step()
            assert (report.step, report.complete) == (seed, True)
            assert report.bytes == describe(weights).nbytes
        peer.line()
        result = peer.line()
        assert result["result"] == "ok"
        assert result["got"] == judged(mixed(5))
        assert result["calls"] >= 5 * 3


def test_weights_are_converted_on_the_way(address: str) -> None:
    model = torch.nn.Linear(300, 200)
    with PeerProcess("verl-receive", address) as peer, sender(model, address, dtype=torch.bfloat16) as ours:  # type: ignore[arg-type]
        ours.step()
        peer.line()
        assert peer.line()["got"] == judged({name: t.bfloat16() for name, t in model.state_dict().items()})


@pytest.mark.parametrize("weights", [{"empty": torch.empty(0, 4)}, {"one": torch.ones(())}], ids=str)
def test_a_step_of_next_to_nothing_is_a_step(address: str, weights: dict[str, torch.Tensor]) -> None:
    with PeerProcess("verl-receive", address) as peer, sender(weights, address) as ours:
        ours.step()
        peer.line()
        assert peer.line()["got"] == judged(weights)


def test_a_tensor_beyond_the_bucket_makes_our_bucket_larger(address: str) -> None:
    weights = {"a": torch.ones(3), "large": torch.randn(300_000), "b": torch.ones(5)}
    with PeerProcess("verl-receive", address) as peer, sender(weights, address, bucket_bytes=1 << 16) as ours:
        ours.step()
        peer.line()
        assert peer.line()["got"] == judged(weights)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([("a", torch.ones(3)), ("m", torch.empty(3, device="meta"))], "'m' is meta"),
        ([("s", torch.eye(3).to_sparse())], "'s' is sparse"),
        ([("twice", torch.ones(3)), ("twice", torch.zeros(3))], "two tensors are named 'twice'"),
        ([], "no weights"),
    ],
    ids=["meta", "sparse", "twice", "none"],
)
def test_what_breaks_verls_sender_is_refused_by_ours_before_anything_is_sent(
    address: str, weights: list[tuple[str, torch.Tensor]], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        sender(weights, address)


@pytest.mark.parametrize(
    ("options", "state", "said"),
    [
        (["--fail-at", "1"], AgentState.LOST, "closed its socket or ended, bucket 1 of"),
        (["--die-at", "1"], AgentState.LOST, "closed its socket or ended, bucket 1 of"),
        (["--fail-at", "-2"], AgentState.LOST, "closed its socket or ended, bucket"),
        (["--hang-at", "1"], AgentState.TAINTED, "did not answer within 10 s, "),
    ],
    ids=["it raises", "it is killed", "it raises at the last bucket", "it hangs"],
)
def test_a_receiver_that_fails_fails_the_step_in_time_and_the_next_one_gets_everything(
    address: str, options: list[str], state: AgentState, said: str
) -> None:
    weights = mixed(4)
    with sender(weights, address, step_timeout_seconds=10.0 if "--hang-at" in options else 60.0) as ours:
        with PeerProcess("verl-receive", address, *options) as peer:
            peer.line()
            with pytest.raises(StepFailed, match=said) as failed:
                ours.step()
            assert [r.state for r in failed.value.report.receivers] == [state]
            assert not failed.value.report.complete
        with PeerProcess("verl-receive", address) as peer:
            peer.line()
            assert ours.step().complete
            assert peer.line()["got"] == judged(weights)


def test_views_that_its_loader_keeps_are_an_error_at_both_ends_and_not_a_hang(address: str) -> None:
    with PeerProcess("verl-receive", address, "--keep-views") as peer:
        peer.line()
        # verl's receiver raises at the end, and leaves its socket open as long as it lives.
        with sender(mixed(1), address, step_timeout_seconds=10.0) as ours, pytest.raises(StepFailed):
            ours.step()
        assert "BufferError" in peer.line()["result"]


class Unreadable(torch.Tensor):
    """A weight whose reading fails, as a shard's does when another rank has died."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            raise RuntimeError("rank 3 is gone")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_step_that_our_side_breaks_off_makes_verls_receiver_raise_and_not_hang(address: str) -> None:
    weights = {"a": torch.ones(40_000), "b": torch.ones(40_000).as_subclass(Unreadable)}
    with PeerProcess("verl-receive", address) as peer:
        peer.line()
        ours = sender(weights, address, dtype=torch.bfloat16)  # type: ignore[arg-type]
        with ours, pytest.raises(StepFailed, match="rank 3 is gone"):
            ours.step()
        assert peer.line()["result"] == "KeyError: 'bucket_meta'"


def test_without_a_receiver_our_sender_ends_in_time(address: str) -> None:
    with sender(mixed(1), address, join_timeout_seconds=0.3) as ours:
        with pytest.raises(JoinTimeout, match="verl's receiver has not connected to ipc:"):
            ours.step()
        with PeerProcess("verl-receive", address) as peer:
            peer.line()
            ours._join_timeout = 60.0
            assert ours.step().step == 1


# --- ours is fed by verl's sender -------------------------------------------------------------------------------------


@pytest.mark.parametrize("atomic", [False, True])
def test_our_tensors_are_verls_after_each_of_five_steps(address: str, atomic: bool) -> None:
    target = blank()
    with PeerProcess("verl-send", address, "--steps", "5") as peer:
        ours = receiver(address, target, atomic=atomic)
        for step in range(1, 6):
            received = ours.receive()
            assert (received.step, received.tensors, ours.ready) == (step, len(target), True)
            assert judged(target) == judged(mixed(step))
        peer.line()
        assert peer.line()["result"] == "ok"


def test_a_loader_gets_every_tensor_of_verls_and_must_copy(address: str) -> None:
    got: dict[str, torch.Tensor] = {}

    def load(weights: list[tuple[str, torch.Tensor]]) -> None:
        got.update((name, tensor.clone()) for name, tensor in weights)

    with PeerProcess("verl-send", address) as peer:
        ours = receiver(address, load, expect=describe(blank()))
        assert ours.receive().buckets == 1
        assert judged(got) == judged(mixed(1))
        peer.line()
        assert peer.line()["result"] == "ok"
    kept: list[torch.Tensor] = []
    with PeerProcess("verl-send", address) as peer:
        ours = receiver(address, lambda weights: kept.extend(t for _, t in weights))
        with pytest.raises(ViewsRetained, match="copy the tensors that load_weights keeps"):
            ours.receive()
        assert not ours.ready
        assert "ViewsRetained" in ours.message
        peer.line()
        assert peer.line()["result"] == "ok"  # verl's sender does not hang over it


@pytest.mark.parametrize(
    ("case", "error", "said"),
    [
        ("large", TransportError, "closed its socket or ended"),
        ("meta", TransportError, "closed its socket or ended"),
        ("sparse", TransportError, "closed its socket or ended"),
        ("killed", TransportError, "closed its socket or ended"),
        ("silent", StepTimeout, "did not answer within 5 s, "),
        ("twice", ManifestMismatch, "one name twice"),
        ("twice-apart", ManifestMismatch, "a: sent twice in one step"),
    ],
)
def test_whatever_breaks_verls_sender_ends_our_receiver_in_time(
    address: str, case: str, error: type[Exception], said: str
) -> None:
    seconds = 5.0 if case == "silent" else 60.0
    with PeerProcess("verl-send", address, "--case", case) as peer:
        ours = receiver(address, lambda weights: None, step_timeout_seconds=seconds)
        peer.line()
        with pytest.raises(error, match=said):
            ours.receive()
        assert not ours.ready
        if case.startswith("twice"):
            assert peer.line()["result"] == "ok"
    for left in Path("/dev/shm").glob("verl_weights_*"):
        left.unlink()  # by verl's sender that was killed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scalar": torch.zeros(2)}, r"scalar: the sender's shape is \[\], the receiver's \[2\]"),
        (
            {"scalar": torch.zeros((), dtype=torch.float64)},
            "scalar: the sender's dtype is float32, the receiver's float64",
        ),
        ({"scalar": None}, "scalar: sent, but the receiver has no such tensor"),
        ({"more": torch.zeros(2)}, "more: the receiver has it, but it is not sent"),
    ],
    ids=["shape", "dtype", "unknown", "missing"],
)
def test_a_model_that_does_not_fit_is_refused_before_its_bytes_and_verls_sender_ends(
    address: str, change: dict[str, torch.Tensor | None], said: str
) -> None:
    target = {name: tensor for name, tensor in (blank() | change).items() if tensor is not None}
    before = judged(target)
    with PeerProcess("verl-send", address) as peer:
        ours = receiver(address, target, atomic=True)
        with pytest.raises(ManifestMismatch, match=said):
            ours.receive()
        assert judged(target) == before
        peer.line()
        assert peer.line()["result"] == "ok"
    if "more" not in change:
        with PeerProcess("verl-send", address) as peer:
            with pytest.raises(ManifestMismatch, match=said):
                receiver(address, target).receive()
            assert judged(target) == before  # it was the first bucket


def test_a_tainted_target_says_so_until_a_whole_step_comes(address: str) -> None:
    target = {"a": torch.ones(3), "filling": torch.ones(1 << 20, dtype=torch.uint8), "more": torch.ones(1)}
    ours = receiver(address, target)
    with PeerProcess("verl-send", address, "--case", "twice-apart"), pytest.raises(ManifestMismatch):
        ours.receive()
    assert not ours.ready
    assert "step 1 broke off: ManifestMismatch" in ours.message
    assert bool((target["a"] == 0).all())  # the first bucket is in


def test_without_a_sender_our_receiver_ends_in_time(address: str) -> None:
    target = blank()
    with pytest.raises(JoinTimeout, match="verl's sender has not spoken at ipc:"):
        receiver(address, target, join_timeout_seconds=0.3).receive()
    assert judged(target) == judged(blank())


def test_every_fsdp_rank_feeds_the_receiver_of_its_own(tmp_path: Path) -> None:
    addresses = [f"ipc://{tmp_path}/{rank}.sock" for rank in range(2)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (
        PeerProcess("verl-receive", addresses[0], "--steps", "3") as first,
        PeerProcess("verl-receive", addresses[1], "--steps", "3") as second,
    ):
        script = str(Path(__file__).parent / "verl_rank.py")
        ranks = [
            subprocess.Popen(
                [sys.executable, script, str(tmp_path / "store"), str(rank), address, "3"],
                stdout=subprocess.PIPE,
                env=environment,
            )
            for rank, address in enumerate(addresses)
        ]
        try:
            sent = [json.loads(rank.communicate(timeout=250)[0]) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        for peer in (first, second):
            peer.line()
            assert peer.line()["got"] == sent[0]
        assert [rank.returncode for rank in ranks] == [0, 0]
