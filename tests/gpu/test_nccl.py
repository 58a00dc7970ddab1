"""NCCL. On one GPU: communicators of one rank, and both ends with a loop in place of the wire. On two: the wire."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nccl_pair import Channel, Pair
from transfer.collective import Members
from transfer.collective_weights import MIB, blank_like, differing, randomly, tricky
from weightsync_agent.cuda.driver import gpu_uuid
from weightsync_agent.cuda.nccl import Communicator, unique_id
from weightsync_agent.deadline import Deadline
from weightsync_agent.digest import tensor_digests
from weightsync_agent.errors import Refused, StepTimeout, TransportError, ViewsRetained
from weightsync_agent.manifest import Manifest, TensorEntry, describe
from weightsync_agent.protocol import Identity
from weightsync_agent.transport.base import SendPlan
from weightsync_agent.transport.nccl_end import AHEAD
from weightsync_agent.transport.nccl_sender import NcclSender

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL has one rank a GPU")

GPU = torch.device("cuda", 0)


def sent(seed: int, device: str) -> dict[str, torch.Tensor]:
    random = randomly(seed, device)
    sizes = {"large": 9 * MIB + 12345, "large.2": 5 * MIB + 3}
    return tricky(random, {name: random(size, dtype=torch.uint8) for name, size in sizes.items()})


def blank(device: str) -> dict[str, torch.Tensor]:
    return blank_like(sent(0, "cpu"), strided="large.2", device=device)


def blank_second() -> dict[str, torch.Tensor]:
    return blank("cuda:1")


def wrong(target: dict[str, torch.Tensor], seed: int) -> list[str]:
    return differing(target, sent(seed, "cpu"))


def change(tensors: dict[str, torch.Tensor], seed: int) -> None:
    for name, tensor in sent(seed, "cpu").items():
        tensors[name].copy_(tensor)


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path)
    torch.cuda.synchronize()


def alone(**more: Any) -> Communicator:
    return Communicator(unique_id(), 0, 1, GPU, Deadline(60), **more)


def test_a_group_of_one_joins_broadcasts_and_leaves() -> None:
    communicator = alone()
    assert communicator.route == "Local"
    data = torch.arange(1000, device=GPU)
    with communicator.group():
        communicator.broadcast(data.data_ptr(), 8000, torch.cuda.current_stream().cuda_stream)
        communicator.broadcast(data.data_ptr(), 100, torch.cuda.current_stream().cuda_stream)
    assert communicator.poll()
    assert torch.equal(data.cpu(), torch.arange(1000))
    communicator.close()
    communicator.close()
    communicator.abort()
    with pytest.raises(TransportError, match="given up"):
        communicator.poll()


def test_joining_alone_a_group_of_two_ends_at_the_deadline(capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    with pytest.raises(StepTimeout, match="joining the group was not done on rank 0 of 2 within 3 s"):
        Communicator(unique_id(), 0, 2, GPU, Deadline(3))
    assert time.monotonic() - began >= 2.9
    assert "NCCL" not in capfd.readouterr().err
    alone().close()  # the process can still make groups


def test_a_lost_peer_ends_the_joining_at_once() -> None:
    def gone() -> None:
        raise TransportError("the peer is gone")

    began = time.monotonic()
    with pytest.raises(TransportError, match="the peer is gone"):
        Communicator(unique_id(), 0, 2, GPU, Deadline(100), check=gone)
    assert time.monotonic() - began < 50


def test_the_users_own_nccl_log_settings_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    alone().close()
    assert os.environ["NCCL_DEBUG"] == "WARN"
    assert "NCCL_DEBUG_FILE" not in os.environ


@pytest.mark.parametrize("mode", ["Direct", "Packed"])
def test_every_kind_of_tensor_is_packed_sent_and_unpacked_bit_for_bit(runtime: str, mode: str) -> None:
    tensors, target = sent(1, "cuda:0"), blank("cuda:0")
    with Pair(tensors, target, runtime, mode) as pair:
        for seed in (1, 2, 3):
            change(tensors, seed)
            pair.step()
            assert wrong(target, seed) == []
        assert pair.sender.digests() == tensor_digests(list(sent(3, "cpu").values()))


@pytest.mark.parametrize("mode", ["Direct", "Packed"])
def test_an_engine_is_handed_every_tensor(runtime: str, mode: str) -> None:
    found: dict[str, torch.Tensor] = {}

    def load(named: list[tuple[str, torch.Tensor]]) -> None:
        found.update({name: tensor.clone() for name, tensor in named})

    tensors = sent(1, "cuda:0")
    with Pair(tensors, load, runtime, mode) as pair:
        for seed in (4, 5):
            change(tensors, seed)
            pair.step()
            assert wrong(found, seed) == []


def test_an_engine_that_keeps_a_view_of_staging_memory_fails_the_step(runtime: str) -> None:
    kept: list[torch.Tensor] = []
    with Pair(sent(1, "cuda:0"), lambda named: kept.append(named[-1][1].view(-1)[:1]), runtime) as pair:
        with pytest.raises(ViewsRetained, match="outlived the load"):
            pair.step()
        kept.clear()


def test_float32_masters_arrive_as_bfloat16_rounded_to_nearest(runtime: str) -> None:
    masters = {"large": torch.randn(3 * MIB, device=GPU), "small": torch.randn(1001, device=GPU)}
    masters["strided"] = torch.randn(100, 33, device=GPU).t()
    masters["large.strided"] = torch.randn(3000, 1000, device=GPU).t()
    target = {name: torch.zeros(t.shape, dtype=torch.bfloat16, device=GPU) for name, t in masters.items()}
    entries = [TensorEntry(name=n, dtype="bfloat16", shape=tuple(t.shape)) for n, t in masters.items()]

    def never(_: object) -> list[torch.Tensor]:
        raise AssertionError("plain tensors are converted while they are packed")

    with Pair(masters, target, runtime, manifest=Manifest(tensors=tuple(entries)), gather=never) as pair:
        for _ in range(2):
            for master in masters.values():
                master.mul_(1.5)
            pair.step()
            for name, master in masters.items():
                assert torch.equal(target[name], master.bfloat16()), name


def test_a_step_sees_what_the_trainer_queued_before_it_and_the_engine_what_arrived(runtime: str) -> None:
    tensors = {"a": torch.zeros(8 * MIB, device=GPU), "b": torch.zeros(1000, device=GPU)}
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    busy = torch.randn(4096, 4096, device=GPU)
    with Pair(tensors, target, runtime) as pair:
        for step in range(1, 6):
            trainer = torch.cuda.Stream()
            with torch.cuda.stream(trainer):
                for _ in range(20):
                    busy = (busy @ busy).clamp_(-1, 1)
                for tensor in tensors.values():
                    tensor.fill_(step)
                pair.sender.fence()
                pair.sender.send(Channel(step))
            pair.receiver.receive(Channel(step))
            assert [float(t.max()) for t in target.values()] == [step, step]
            assert [float(t.min()) for t in target.values()] == [step, step]


def test_packed_calls_through_a_communicator_keep_reserved_memory_flat(runtime: str) -> None:
    tensors = {f"t{i}": torch.randn(200_000, device=GPU) for i in range(200)}
    tensors["large"] = torch.randn(8 * MIB, device=GPU)
    plan = SendPlan(
        manifest=describe(tensors), tensors=list(tensors.values()), mode="Packed", bucket_bytes=8 * MIB, slots=2,
        runtime_dir=runtime, device=GPU,
    )  # fmt: skip
    sender = NcclSender(plan)
    sender.connect(sender.regroup(1, [0], 60), Deadline(60), lambda: None)
    assert sender.moves.buckets > AHEAD
    reserved = []
    for step in range(1, 51):
        sender.send(Channel(step))
        reserved.append(torch.cuda.memory_reserved(GPU))
    assert reserved[1] == reserved[-1]
    assert max(reserved) == reserved[1]
    sender.close()


@pytest.mark.parametrize("fresh_streams", [False, True])
def test_staging_on_fresh_streams_grows_and_on_one_stream_it_does_not(fresh_streams: bool) -> None:
    """The fault of vLLM issue 52950, switched on: what the flatness above is measured by can see it."""
    torch.cuda.empty_cache()
    communicator = alone()
    tensors = [torch.randn(1 << 20, device=GPU) for _ in range(8)]
    one = torch.cuda.Stream()
    reserved = []
    for _ in range(10):
        stream = torch.cuda.Stream() if fresh_streams else one
        with torch.cuda.stream(stream):
            packed = torch.cat(tensors)
            communicator.broadcast(packed.data_ptr(), packed.nbytes, stream.cuda_stream)
        stream.synchronize()
        del packed
        reserved.append(torch.cuda.memory_reserved(GPU))
    communicator.close()
    assert (reserved[-1] > reserved[1]) == fresh_streams


def test_two_ranks_on_one_gpu_are_refused_with_the_way_out(runtime: str) -> None:
    tensors = {"a": torch.ones(3, device=GPU)}
    plan = SendPlan(
        manifest=describe(tensors), tensors=list(tensors.values()), mode="Packed", bucket_bytes=MIB, slots=2,
        runtime_dir=runtime, device=GPU,
    )  # fmt: skip
    sender = NcclSender(plan)

    def receiver(rank: int, gpu: str) -> Identity:
        return Identity(rank=rank, pod="p", node="n", pid=1, uid=1, gpu=gpu)

    with pytest.raises(Refused, match="use IPC"):
        sender.offer(receiver(1, "GPU-" + gpu_uuid(GPU).upper()))
    sender.offer(receiver(1, "11111111-2222-3333-4444-555555555555"))
    sender.offer(receiver(1, "11111111-2222-3333-4444-555555555555"))
    with pytest.raises(Refused, match=r"as rank 1 is.*use IPC"):
        sender.offer(receiver(2, "11111111-2222-3333-4444-555555555555"))
    sender.forget(1)
    sender.offer(receiver(2, "11111111-2222-3333-4444-555555555555"))
    with pytest.raises(Refused, match="has no GPU"):
        sender.offer(receiver(3, ""))
    sender.close()


# --- two GPUs -------------------------------------------------------------------------------------------------------


@TWO_GPUS
@pytest.mark.parametrize("mode", ["Direct", "Packed"])
def test_every_kind_of_tensor_arrives_on_the_other_gpu(runtime: str, mode: str) -> None:
    tensors = sent(1, "cuda:0")
    with Members(tensors, runtime, mode=mode, device=GPU) as members:
        members.join(blank_second, 1, "cuda:1")
        members.regroup()
        assert members.sender.route
        for seed in (1, 2, 3):
            change(tensors, seed)
            members.step(seed, verify=True)
            assert members.ask_all(wrong, seed) == [[]]


def large(device: str) -> dict[str, torch.Tensor]:
    found = {f"w{i}": torch.full((256 * MIB,), 7, dtype=torch.uint8, device=device) for i in range(16)}
    return found | {f"s{i}": torch.full((MIB,), 7, dtype=torch.uint8, device=device) for i in range(2000)}


def blank_large() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in large("cuda:1").items()}


def all_sevens(target: dict[str, torch.Tensor]) -> bool:
    return all(bool((tensor == 7).all()) for tensor in target.values())


@TWO_GPUS
def test_a_receiver_killed_in_mid_broadcast_ends_the_step_and_a_new_one_joins_whole(runtime: str) -> None:
    with Members(large("cuda:0"), runtime, device=GPU, bucket_bytes=64 * MIB) as members:
        victim = members.join(blank_large, 1, "cuda:1")
        members.regroup()
        members.step(1)
        channel = members.begin(2, seconds=100)
        # The sender looks whether its receivers live while its broadcasts are under way.
        looks = channel.alive

        def kill_and_look() -> bool:
            victim.kill()
            return looks()

        channel.alive = kill_and_look  # type: ignore[method-assign]
        began = time.monotonic()
        with pytest.raises(TransportError):
            members.sender.send(channel)
        assert time.monotonic() - began < 60
        assert members.sender.needs_regroup
        members.members.remove(victim)
        members.join(blank_large, 2, "cuda:1")
        members.regroup()
        members.step(3, verify=True)
        assert members.ask_all(all_sevens) == [True]


@TWO_GPUS
def test_a_silent_receiver_ends_the_step_at_the_deadline(runtime: str) -> None:
    with Members(large("cuda:0"), runtime, device=GPU, bucket_bytes=64 * MIB) as members:
        silent = members.join(blank_large, 1, "cuda:1")
        members.regroup()
        assert silent.process.pid is not None
        os.kill(silent.process.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(StepTimeout, match="3 s"):
            members.sender.send(members.begin(1, seconds=3))
        assert 2.9 <= time.monotonic() - began < 60
        silent.kill()


def reserved(_: object) -> int:
    return torch.cuda.memory_reserved()


@TWO_GPUS
def test_reserved_memory_is_flat_over_50_steps_on_both_gpus(runtime: str) -> None:
    tensors = large("cuda:0")
    with Members(tensors, runtime, device=GPU, bucket_bytes=64 * MIB) as members:
        members.join(blank_large, 1, "cuda:1")
        members.regroup()
        for step in (1, 2):
            members.step(step)
        before = [torch.cuda.memory_reserved(GPU), *members.ask_all(reserved)]
        for step in range(3, 51):
            members.step(step)
        assert [torch.cuda.memory_reserved(GPU), *members.ask_all(reserved)] == before
