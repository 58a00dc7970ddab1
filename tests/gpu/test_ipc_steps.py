"""Whole steps over CUDA IPC between real processes on one GPU: bytes, memory, failures, and streams that never hang."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from step_promises import *  # noqa: F403 - the tests of both places
from step_promises import GPU_PLACES, next_whole_step
from transfer import samples
from transfer.harness import make_config, run_dir, start  # noqa: F401 - fixtures
from weightsync_agent.errors import JoinTimeout, StepFailed
from weightsync_agent.sender import Sender

GPU = {"device": "cuda"}


@pytest.fixture(params=GPU_PLACES, ids=lambda place: place.name)
def place(request):
    return request.param


@pytest.fixture
def gpu_config(make_config):  # noqa: F811
    def make(**changes):
        return make_config(**({"device": "CUDA", "bucket_bytes": 65536, "push": False} | changes))

    return make


@pytest.mark.parametrize("push", [True, False])
def test_float32_masters_arrive_as_bfloat16(push, gpu_config, start) -> None:  # noqa: F811
    config = gpu_config(mode="Auto", push=push)
    masters = {n: torch.randn(t.shape, device="cuda") for n, t in samples.mixed(0).items() if t.dtype == torch.bfloat16}
    assert masters
    receiver = start(config, 1, only="bfloat16", **GPU)
    with Sender(masters, config=config, dtype=torch.bfloat16) as sender:
        assert sender.step().verified
        want = samples.fingerprint({n: t.bfloat16() for n, t in masters.items()})
        assert receiver.until("step", 1)["fingerprint"] == want
        assert sender.report().mode == "Packed"


@pytest.mark.parametrize("bucket_bytes", [65536, 1 << 20])
@pytest.mark.parametrize("pause", [0.0, 0.002, 0.01])
def test_receiver_killed_at_a_flag_costs_a_step_and_no_hang(pause, bucket_bytes, gpu_config, start) -> None:  # noqa: F811
    """The peer is stopped first, so that this end's stream really waits on a flag, and is then killed."""
    config = gpu_config(mode="Packed", bucket_bytes=bucket_bytes, ack_timeout_seconds=20)
    weights = {"w": torch.randn(16 << 20, device="cuda")}  # 64 MiB: many buckets
    receiver = start(config, 1, blank={"w": 16 << 20}, **GPU)
    with Sender(weights, config=config) as sender:
        assert sender.step().complete

        def strike() -> None:
            time.sleep(pause)
            os.kill(receiver.process.pid, signal.SIGSTOP)
            time.sleep(0.5)
            receiver.kill()

        thread = threading.Thread(target=strike)
        thread.start()
        began = time.monotonic()
        failed = False
        while thread.is_alive() and not failed:
            try:
                sender.step()
            except StepFailed as failure:
                failed, state = True, failure.report.receivers[0].state
        thread.join()
        assert not failed or state == "Lost"
        assert time.monotonic() - began < 15
        # This process' streams are free: torch works at once.
        assert torch.ones(1 << 20, device="cuda").sum().item() == 1 << 20
        again = start(config, 1, blank={"w": 16 << 20}, **GPU)
        again.until("started")
        next_whole_step(sender)


def test_deadline_with_a_waiting_stream_frees_it_and_the_next_step_is_right(gpu_config, start) -> None:  # noqa: F811
    config = gpu_config(mode="Packed", bucket_bytes=65536, ack_timeout_seconds=1, step_timeout_seconds=2)
    receiver = start(config, 1, **GPU)
    weights = samples.mixed(0, "cuda")
    with Sender(weights, config=config) as sender:
        assert sender.step().complete
        receiver.until("step", 1)
        os.kill(receiver.process.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(StepFailed):
            sender.step()
        assert time.monotonic() - began < 8
        assert torch.ones(1 << 20, device="cuda").sum().item() == 1 << 20
        os.kill(receiver.process.pid, signal.SIGCONT)
        want = samples.change(weights, 3)
        step = next_whole_step(sender)
        while (line := receiver.until("step"))["step"] != step:
            assert line["step"] != 2
        assert line["fingerprint"] == want


def test_engine_thread_that_allocates_and_launches_all_the_time_is_no_deadlock(gpu_config, start) -> None:  # noqa: F811
    config = gpu_config(mode="Packed", bucket_bytes=65536)
    receiver = start(config, 1, busy=True, **GPU)
    weights = samples.mixed(0, "cuda")
    with Sender(weights, config=config) as sender:
        for step in range(1, 31):
            want = samples.change(weights, step)
            assert sender.step().complete
        assert receiver.until("step", 30)["fingerprint"] == want


def test_step_returns_the_bucket_at_once(gpu_config, start) -> None:  # noqa: F811
    """ACK after release: right after step() nothing but the model, the slots and 64 MiB is reserved."""
    config = gpu_config(mode="Packed", bucket_bytes=16 << 20)
    weights = {"w": torch.randn(64 << 20, device="cuda")}
    model = torch.cuda.memory_reserved()
    start(config, 1, target="loader", blank={"w": 64 << 20}, **GPU)
    with Sender(weights, config=config) as sender:
        for _ in range(4):
            report = sender.step()
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() <= model + (64 << 20)
            assert report.memory.reserved_after <= model + 2 * (16 << 20) + (64 << 20)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: memory of one is read by the other")
@pytest.mark.parametrize("target", ["dict", "loader"])
@pytest.mark.parametrize("mode", ["Direct", "Packed"])
def test_another_gpu_maps_the_memory_and_reads_it(mode, target, gpu_config, start) -> None:  # noqa: F811
    """Each process sees its own GPU alone, by CUDA_VISIBLE_DEVICES, as in a container with both."""
    if mode == "Direct" and target == "loader":
        pytest.skip("load_weights in Direct mode needs the arena on its own GPU, and says so")
    config = gpu_config(mode=mode)
    receiver = start(config, 1, target=target, environment={"CUDA_VISIBLE_DEVICES": "1"}, **GPU)
    weights = samples.mixed(0, "cuda:0")
    reserved = []
    with Sender(weights, config=config, adopt=mode == "Direct") as sender:
        for step in range(1, 21):
            want = samples.change(weights, step)
            report = sender.step()
            reserved.append(report.receivers[0].memory.reserved_after)
            assert report.complete
        assert receiver.until("step", 20)["fingerprint"] == want
        assert sender.report().route == "P2P/Mapped"
        assert max(reserved[3:]) == min(reserved[3:])
        receiver.kill()
        with pytest.raises((StepFailed, JoinTimeout)):
            sender.step()
        again = start(config, 1, target=target, environment={"CUDA_VISIBLE_DEVICES": "1"}, **GPU)
        again.until("started")
        want = samples.change(weights, 99)
        assert again.until("step", next_whole_step(sender))["fingerprint"] == want
