"""NCCL. On one GPU: communicators of one rank, and both ends with a loop in place of the wire. On two: the wire."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))

from collective import Members, config_for
from weightsync_agent.cuda.arena import bytes_at
from weightsync_agent.cuda.driver import gpu_uuid
from weightsync_agent.cuda.nccl import Communicator, unique_id
from weightsync_agent.deadline import Deadline
from weightsync_agent.digest import tensor_digests
from weightsync_agent.errors import Refused, StepTimeout, TransportError, ViewsRetained
from weightsync_agent.manifest import Manifest, TensorEntry, describe
from weightsync_agent.protocol import Identity, Welcome
from weightsync_agent.targets import target_for
from weightsync_agent.transport.base import SendPlan
from weightsync_agent.transport.nccl import NcclReceiver, NcclSender
from weightsync_agent.transport.nccl_end import AHEAD, Call, End
from weightsync_api.v1alpha1.spec import Device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL has one rank a GPU")

MIB = 1 << 20
GPU = torch.device("cuda", 0)
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
]  # fmt: skip


def tricky(seed: int, device: str) -> dict[str, torch.Tensor]:
    """Every dtype, odd sizes, tied, strided, scalar, empty, large; other values for each seed."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        count = int(torch.Size(shape).numel()) * dtype.itemsize
        data = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
        return data.to(device).view(dtype).view(shape)

    embedding = random(300, 1024)
    found = {f"kind.{dtype}".replace("torch.", ""): random(3, 7, dtype=dtype) for dtype in DTYPES}
    found |= {
        "odd": random(7, dtype=torch.uint8),
        "scalar": random(dtype=torch.float64),
        "nothing": torch.empty(0, 5, device=device),
        "embedding": embedding,
        "head": embedding,
        "transposed": random(40, 90).t(),
        "large.transposed": random(700, 900).t(),
        "exactly.a.bucket": random(MIB, dtype=torch.uint8),
        "a.bucket.and.a.byte": random(MIB + 1, dtype=torch.uint8),
        "large": random(9 * MIB + 12345, dtype=torch.uint8),
        "large.2": random(5 * MIB + 3, dtype=torch.uint8),
    }
    return found | {f"small.{i}": random(257 + i, dtype=torch.bfloat16) for i in range(3000)}


def blank(device: str) -> dict[str, torch.Tensor]:
    """Its own layout: what is strided at the sender is not here and the other way round; the head is apart."""
    fresh = {n: torch.zeros(t.shape, dtype=t.dtype, device=device) for n, t in tricky(0, "cpu").items()}
    fresh["large.2"] = torch.zeros(2 * (5 * MIB + 3), dtype=torch.uint8, device=device)[::2]
    fresh["small.7"] = torch.zeros(264, 2, dtype=torch.bfloat16, device=device)[:, 0]
    return fresh


def blank_second() -> dict[str, torch.Tensor]:
    return blank("cuda:1")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()


def differing(target: dict[str, torch.Tensor], seed: int) -> list[str]:
    wanted = tricky(seed, "cpu")
    assert set(target) == set(wanted)
    return [name for name, tensor in target.items() if not torch.equal(bits(tensor), bits(wanted[name]))]


def change(tensors: dict[str, torch.Tensor], seed: int) -> None:
    for name, tensor in tricky(seed, "cpu").items():
        tensors[name].copy_(tensor)


@dataclass
class Channel:
    """Both ends' channel of a step in which nothing goes wrong."""

    step: int = 1
    deadline: Deadline = field(default_factory=lambda: Deadline(60))
    verify: bool = True
    ranks: tuple[int, ...] = ()

    def alive(self) -> bool:
        return True

    def started(self) -> None:
        pass

    def check(self) -> None:
        return

    def post(self, *_: object) -> None:
        raise AssertionError("a collective posts nothing within a step")

    pump = wait_bucket = drained = post


class Loop:
    """Takes the wire's place: what the sender's end broadcasts is kept, and is what arrives at the receiver's."""

    def __init__(self) -> None:
        self.under_way: list[torch.Tensor] = []

    def join(self, sender: End, receiver: End) -> None:
        def send(_number: int, call: Call, *_: object) -> None:
            with torch.cuda.stream(sender.communication.stream):
                self.under_way += [bytes_at(pointer, nbytes)[0].clone() for pointer, nbytes in call.broadcasts]

        def receive(_number: int, call: Call, *_: object) -> None:
            with torch.cuda.stream(receiver.communication.stream):
                for pointer, nbytes in call.broadcasts:
                    bytes_at(pointer, nbytes)[0].copy_(self.under_way.pop(0))

        sender.queue = send  # type: ignore[method-assign]
        receiver.queue = receive  # type: ignore[method-assign]


class Pair:
    """Both ends in this process on one GPU."""

    def __init__(
        self, tensors: dict[str, torch.Tensor], target: Any, runtime_dir: str, mode: str = "Packed", **more: Any
    ) -> None:
        manifest: Manifest = more.pop("manifest", None) or describe(tensors)
        plan = SendPlan(
            manifest=manifest,
            tensors=list(tensors.values()),
            mode=mode,  # type: ignore[arg-type]
            bucket_bytes=MIB,
            slots=2,
            runtime_dir=runtime_dir,
            device=GPU,
            **more,
        )
        self.sender = NcclSender(plan)
        welcome = Welcome(
            protocol=1, session="s", transport="NCCL", mode=mode,  # type: ignore[arg-type]
            manifest_hash=manifest.hash, bucket_bytes=MIB, slots=2,
        )  # fmt: skip
        bound = target_for(target)
        bound.bind(manifest)
        self.receiver = NcclReceiver(welcome, manifest, bound, config_for(runtime_dir, Device.CUDA), GPU)
        self.receiver.join(Deadline(60))
        self.sender.connect(self.sender.regroup(1, [0], 60), Deadline(60), lambda: None)
        self.receiver._end.connect(unique_id(), 0, 1, 1, Deadline(60), lambda: None)
        Loop().join(self.sender._end, self.receiver._end)

    def step(self) -> None:
        channel = Channel()
        self.sender.send(channel)
        self.receiver.receive(channel)
        assert self.receiver.digests() == self.sender.digests()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.sender.close()
        self.receiver.close()


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
    tensors, target = tricky(1, "cuda:0"), blank("cuda:0")
    with Pair(tensors, target, runtime, mode) as pair:
        for seed in (1, 2, 3):
            change(tensors, seed)
            pair.step()
            assert differing(target, seed) == []
        assert pair.sender.digests() == tensor_digests(list(tricky(3, "cpu").values()))


@pytest.mark.parametrize("mode", ["Direct", "Packed"])
def test_an_engine_is_handed_every_tensor(runtime: str, mode: str) -> None:
    found: dict[str, torch.Tensor] = {}

    def load(named: list[tuple[str, torch.Tensor]]) -> None:
        found.update({name: tensor.clone() for name, tensor in named})

    tensors = tricky(1, "cuda:0")
    with Pair(tensors, load, runtime, mode) as pair:
        for seed in (4, 5):
            change(tensors, seed)
            pair.step()
            assert differing(found, seed) == []


def test_an_engine_that_keeps_a_view_of_staging_memory_fails_the_step(runtime: str) -> None:
    kept: list[torch.Tensor] = []
    with Pair(tricky(1, "cuda:0"), lambda named: kept.append(named[-1][1].view(-1)[:1]), runtime) as pair:
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
    tensors = tricky(1, "cuda:0")
    with Members(tensors, runtime, mode=mode, device=GPU) as members:
        members.join(blank_second, 1, "cuda:1")
        members.regroup()
        assert members.sender.route
        for seed in (1, 2, 3):
            change(tensors, seed)
            members.step(seed, verify=True)
            assert members.ask_all(differing, seed) == [[]]


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
