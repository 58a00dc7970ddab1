"""Gloo between real processes: the same bytes for every kind of tensor, bounded failures, memory that stays flat."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from collective import Members, anonymous_bytes
from transfer.collective_weights import MIB, blank_like, differing, randomly, tricky
from weightsync_agent.deadline import Deadline
from weightsync_agent.errors import StepTimeout, TransportError
from weightsync_agent.manifest import describe
from weightsync_agent.transport.gloo_group import CHUNK_BYTES


def sent(seed: int) -> dict[str, torch.Tensor]:
    random = randomly(seed)
    also = {
        "strided": random(64, 33)[::3],
        "conjugated": random(9, dtype=torch.complex64).conj(),
        "several.chunks": random(2 * CHUNK_BYTES + 12345, dtype=torch.uint8),
    }
    return tricky(random, also)


def blank_untied() -> dict[str, torch.Tensor]:
    """The head apart from the embedding."""
    return blank_like(sent(0), strided="several.chunks")


def blank_twin() -> dict[str, torch.Tensor]:
    """Tied as the sender's."""
    fresh = blank_untied()
    fresh["head"] = fresh["embedding"]
    return fresh


class CopyingLoader:
    """An engine that copies what it is given."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def __call__(self, named: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            self.tensors[name] = tensor.clone()


class KeepingLoader:
    """An engine that keeps a view: a fault that must be found."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def __call__(self, named: list[tuple[str, torch.Tensor]]) -> None:
        self.kept.append(named[-1][1].view(-1)[:1])


class RaisingLoader:
    def __call__(self, named: list[tuple[str, torch.Tensor]]) -> None:
        if any(name == "several.chunks" for name, _ in named):
            raise RuntimeError("the engine has no room")


def wrong_in_dict(target: dict[str, torch.Tensor], seed: int) -> list[str]:
    return differing(target, sent(seed))


def wrong_in_loader(target: CopyingLoader, seed: int) -> list[str]:
    return differing(target.tensors, sent(seed))


def change(tensors: dict[str, torch.Tensor], seed: int) -> None:
    for name, tensor in sent(seed).items():
        tensors[name].copy_(tensor)


def large() -> dict[str, torch.Tensor]:
    return {"w": torch.full((256 * MIB,), 7, dtype=torch.uint8), "small": torch.ones(1000)}


def blank_large() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in large().items()}


def first_and_last(target: dict[str, torch.Tensor]) -> tuple[int, int, float]:
    return int(target["w"][0]), int(target["w"][-1]), float(target["small"].sum())


@pytest.fixture
def runtime(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.mark.parametrize("mode", ["Direct", "Packed"])
def test_every_kind_of_tensor_arrives_bit_for_bit_at_every_receiver(runtime: str, mode: str) -> None:
    tensors = sent(1)
    with Members(tensors, runtime, mode=mode) as members:
        members.join(blank_twin, 1)
        members.join(blank_untied, 2)
        members.regroup()
        for seed in (1, 2, 3):
            change(tensors, seed)
            members.step(seed, verify=True)
            assert members.ask_all(wrong_in_dict, seed) == [[], []]
        assert members.sender.route == "Gloo/TCP"


@pytest.mark.parametrize("mode", ["Direct", "Packed"])
def test_an_engine_is_handed_every_tensor_in_every_step(runtime: str, mode: str) -> None:
    tensors = sent(1)
    with Members(tensors, runtime, mode=mode) as members:
        members.join(CopyingLoader, 1)
        members.regroup()
        for seed in (4, 5):
            change(tensors, seed)
            members.step(seed, verify=True)
            assert members.ask_all(wrong_in_loader, seed) == [[]]


def test_an_engine_that_keeps_a_view_of_staging_memory_fails_the_step(runtime: str) -> None:
    with Members(sent(1), runtime) as members:
        keeper = members.join(KeepingLoader, 1)
        members.regroup()
        channel = members.begin(1)
        with pytest.raises(TransportError):
            members.sender.send(channel)
        _, kind, text = keeper.answer()
        assert kind == "ViewsRetained"
        assert "clone()" in text


def test_a_receiver_that_raises_frees_the_others_and_the_next_step_is_whole(runtime: str) -> None:
    tensors = sent(1)
    with Members(tensors, runtime) as members:
        good = members.join(blank_twin, 1)
        bad = members.join(RaisingLoader, 2)
        members.regroup()
        with pytest.raises(TransportError):
            members.sender.send(members.begin(1))
        assert members.sender.needs_regroup
        assert bad.answer()[1] == "RuntimeError"
        assert good.answer()[0] == "error"
        members.members.remove(bad)
        bad.kill()
        members.regroup()
        assert not members.sender.needs_regroup
        members.step(2, verify=True)
        assert members.ask_all(wrong_in_dict, 1) == [[]]


def test_a_member_killed_in_mid_broadcast_ends_the_step_at_once_and_the_group_is_made_anew(runtime: str) -> None:
    with Members(large(), runtime) as members:
        first, second = members.join(blank_large, 1), members.join(blank_large, 2)
        members.regroup()
        channel = members.begin(1, seconds=100)
        assert second.process.pid is not None
        os.kill(second.process.pid, signal.SIGSTOP)  # the broadcast can't be over before it is killed
        threading.Timer(0.05, os.kill, (second.process.pid, signal.SIGKILL)).start()
        began = time.monotonic()
        with pytest.raises(TransportError):
            members.sender.send(channel)
        assert first.answer()[0] == "error"
        assert time.monotonic() - began < 50, "it waited for the deadline instead of seeing the death"
        second.process.join()
        members.members.remove(second)
        members.join(blank_large, 3)
        members.regroup()
        members.step(2, verify=True)
        assert members.ask_all(first_and_last) == [(7, 7, 1000.0)] * 2


def test_a_silent_member_ends_the_step_at_the_deadline(runtime: str) -> None:
    with Members(large(), runtime) as members:
        first, silent = members.join(blank_large, 1), members.join(blank_large, 2)
        members.regroup()
        assert silent.process.pid is not None
        os.kill(silent.process.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(StepTimeout, match="3 s"):
            members.sender.send(members.begin(1, seconds=3))
        assert time.monotonic() - began >= 2.9
        assert first.answer()[0] in ("error", "acknowledged")
        members.members.remove(silent)
        silent.kill()
        members.regroup()
        members.step(2, verify=True)


def test_a_member_that_does_not_come_is_named(runtime: str) -> None:
    with Members({"a": torch.ones(3)}, runtime) as members:
        members.join(blank_a, 1)
        gone = members.join(blank_a, 5)
        gone.kill()
        with pytest.raises((TransportError, OSError), match=r"rank 5|Broken pipe"):
            members.regroup(3)


def blank_a() -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(3)}


def test_a_sender_without_a_group_says_so(runtime: str) -> None:
    with Members({"a": torch.ones(3)}, runtime) as members, pytest.raises(TransportError, match="no group"):
        members.sender.send(members.begin(1))


@pytest.mark.parametrize("rendezvous", ["127.0.0.1:80", "x", "127.0.0.1:1/zz", "a b:1/0123456789abcdef"])
def test_an_invitation_that_is_none_is_refused_without_a_connection(runtime: str, rendezvous: str) -> None:
    with Members({"a": torch.ones(3)}, runtime) as members:
        member = members.join(blank_a, 1)
        invitation = members.sender.regroup(1, [0, 1], 5).model_copy(update={"rendezvous": rendezvous})
        member.ask("regroup", invitation.model_dump_json())
        kind, error, text = member.answer()
        assert (kind, error) == ("error", "TransportError")
        assert "invitation" in text


def test_memory_stays_flat_over_50_steps(runtime: str) -> None:
    tensors: dict[str, torch.Tensor] = {f"t{i}": torch.ones(100_000) for i in range(100)}
    tensors["strided"] = torch.ones(3000, 4000).t()
    with Members(tensors, runtime, bucket_bytes=8 * MIB) as members:
        members.join(flat_target, 1)
        members.join(CopyNothing, 2)
        members.regroup()
        for step in range(1, 6):
            members.step(step)
        before = [anonymous_bytes(), *members.ask_all(anonymous_bytes)]
        owned = members.sender.owned_bytes
        for step in range(6, 56):
            members.step(step)
        after = [anonymous_bytes(), *members.ask_all(anonymous_bytes)]
        # A single bucket or bounce buffer left behind a step would be 400 MiB and more.
        assert all(b - a < 24 * MIB for a, b in zip(before, after, strict=True)), (before, after)
        assert members.sender.owned_bytes == owned


def flat_target() -> dict[str, torch.Tensor]:
    fresh = {f"t{i}": torch.zeros(100_000) for i in range(100)}
    fresh["strided"] = torch.zeros(3000, 4000).t()
    return fresh


class CopyNothing:
    def __call__(self, named: list[tuple[str, torch.Tensor]]) -> Any:
        return None


def test_a_sharded_source_is_gathered_once_a_step_into_memory_that_is_used_again(runtime: str) -> None:
    whole = {f"t{i}": torch.full((400_000,), float(i)) for i in range(6)}
    whole["small"] = torch.full((10,), 6.0)
    scratch = torch.empty(400_000)
    asked: list[int] = []

    def gather(indices: Sequence[int]) -> list[torch.Tensor]:
        asked.extend(indices)
        scratch.fill_(-1)
        found = list(whole.values())[indices[0]]
        assert len(indices) == 1
        return [scratch[: found.numel()].copy_(found)]

    shards = {name: tensor[:1] for name, tensor in whole.items()}
    with Members(shards, runtime, gather=gather, manifest=describe(whole)) as members:
        members.join(gathered_target, 1)
        members.regroup()
        members.step(1, verify=True)
        assert members.ask_all(values) == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]
        assert sorted(asked) == list(range(7))


def gathered_target() -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.zeros(400_000) for i in range(6)} | {"small": torch.zeros(10)}


def values(target: dict[str, torch.Tensor]) -> list[float]:
    return [float(tensor.unique().item()) for tensor in target.values()]


def test_the_deadline_bounds_the_wait_for_a_group(runtime: str) -> None:
    with Members({"a": torch.ones(3)}, runtime) as members:
        members.join(blank_a, 1)
        invitation = members.sender.regroup(1, [0, 1], 1)
        with pytest.raises(TransportError, match="rank 1 did not come"):
            members.sender.connect(invitation, Deadline(1), lambda: None)
