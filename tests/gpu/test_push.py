"""A sender that writes into its receivers' tensors may do so within a step and never after it, and needs no slots."""

from __future__ import annotations

import time

import pytest
import torch
from transfer import samples
from transfer.harness import make_config, run_dir, start  # noqa: F401 - fixtures
from weightsync_agent.cuda.copy_plan import DeviceCopyPlan
from weightsync_agent.errors import StepFailed
from weightsync_agent.sender import Sender
from weightsync_agent.transport.push import SETTLE_SECONDS, Pushed

GPU = {"device": "cuda"}


@pytest.fixture
def push_config(make_config):  # noqa: F811
    def make(**changes):
        return make_config(**({"device": "CUDA", "mode": "Packed", "bucket_bytes": 65536} | changes))

    return make


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("converts", [False, True])
def test_a_plan_without_its_permission_writes_nothing(device, recorded, converts) -> None:
    permit = torch.ones(1, dtype=torch.int32, device=device)
    source = torch.randn(3_000_001, device=device)
    target = torch.zeros_like(source, dtype=torch.bfloat16 if converts else torch.float32)
    plan = DeviceCopyPlan.of_tensors([(source, target)], device, recorded=recorded, permit=permit)
    stream = torch.cuda.Stream(device)
    for allowed in (0, 1, 0):
        target.zero_()
        permit.fill_(allowed)
        torch.cuda.synchronize(device)
        plan.run(stream)
        stream.synchronize()
        assert torch.equal(target, source.to(target.dtype) if allowed else torch.zeros_like(target))


@pytest.mark.parametrize("mode", ["Auto", "Direct", "Packed"])
def test_nothing_is_staged_and_nothing_stays_exported(mode, push_config, start) -> None:  # noqa: F811
    config = push_config(receivers=2, mode=mode)
    receivers = [start(config, rank, **GPU) for rank in (1, 2)]
    weights = samples.mixed(0, "cuda")
    with Sender(weights, config=config) as sender:
        for step in (1, 2, 3):
            for name, tensor in samples.mixed(step, "cuda").items():
                weights[name].copy_(tensor)
            assert sender.step().complete
            for receiver in receivers:
                assert receiver.until("step", step)["fingerprint"] == samples.fingerprint(weights)
        assert sender._transport.owned_bytes == 0
        assert sender.report().route == "IPC/Push"
        assert sender.report().mode == ("Packed" if mode == "Packed" else "Direct")
    for receiver in receivers:
        receiver.until("closed")


def test_a_receiver_that_can_not_export_its_tensors_is_served_through_buckets(push_config, start) -> None:  # noqa: F811
    config = push_config(receivers=2)
    plain = start(config, 1, **GPU)
    loader = start(config, 2, target="loader", **GPU)
    weights = samples.mixed(0, "cuda")
    with Sender(weights, config=config) as sender:
        assert sender.step().complete
        assert sender.report().route == "IPC/Descriptor"
        for receiver in (plain, loader):
            assert receiver.until("step", 1)["fingerprint"] == samples.fingerprint(weights)


def test_direct_mode_falls_back_to_copies_by_the_receivers(push_config, start) -> None:  # noqa: F811
    """One can't be written, so the other is not either; the arena is mapped by both."""
    config = push_config(receivers=2, mode="Direct")
    plain = start(config, 1, **GPU)
    loader = start(config, 2, target="loader", **GPU)
    weights = samples.mixed(0, "cuda")
    with Sender(weights, config=config, adopt=True) as sender:
        for step in (1, 2):
            assert sender.step().complete
            for receiver in (plain, loader):
                assert receiver.until("step", step)["fingerprint"] == samples.fingerprint(weights)
        assert (sender.report().route, sender.report().mode) == ("IPC/Descriptor", "Direct")


def test_expandable_segments_at_the_receiver_are_served_through_buckets(push_config, start) -> None:  # noqa: F811
    config = push_config()
    receiver = start(config, 1, environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, **GPU)
    weights = samples.mixed(0, "cuda")
    with Sender(weights, config=config) as sender:
        assert sender.step().complete
        assert sender.report().route == "IPC/Descriptor"
        assert receiver.until("step", 1)["fingerprint"] == samples.fingerprint(weights)


def test_a_receiver_that_left_is_written_no_more_though_its_memory_is_still_mapped(push_config, start) -> None:  # noqa: F811
    config = push_config(step_timeout_seconds=5)
    receiver = start(config, 1, leaves_after=2, **GPU)
    weights = samples.mixed(0, "cuda")
    with Sender(weights, config=config) as sender:
        assert sender.step().complete
        pushed, _ = sender._transport._push._pushed[1]
        assert sender.step().complete
        with sender._router.lock:  # as if it had not heard the goodbye
            receiver.until("left")
            before = pushed.digests(torch.cuda.current_stream())
            for name, tensor in samples.mixed(5, "cuda").items():
                weights[name].copy_(tensor)
            pushed.run(torch.cuda.current_stream())
            torch.cuda.synchronize()
            assert pushed.digests(torch.cuda.current_stream()) == before


@pytest.mark.alone
def test_what_is_written_to_a_killed_receiver_reaches_nobody_else(push_config, start) -> None:  # noqa: F811
    config = push_config()
    receiver = start(config, 1, **GPU)
    weights = samples.mixed(0, "cuda")
    with Sender(weights, config=config) as sender:
        assert sender.step().complete
        pushed, _ = sender._transport._push._pushed[1]
        receiver.kill()
        # All that anybody could have been given of what was the receiver's.
        free = torch.cuda.mem_get_info()[0] - (1 << 30)
        theirs = [
            torch.zeros(min(8 << 30, free - at), dtype=torch.uint8, device="cuda") for at in range(0, free, 8 << 30)
        ]
        for tensor in weights.values():
            tensor.copy_(torch.ones_like(tensor))
        for _ in range(10):
            pushed.run(torch.cuda.current_stream())
        torch.cuda.synchronize()
        assert not any(bool(part.view(torch.int64).any()) for part in theirs)
        del theirs
        torch.cuda.empty_cache()


def test_a_sender_that_was_held_up_beyond_the_step_writes_nothing_any_more(push_config, start, monkeypatch) -> None:  # noqa: F811
    """As if it had been stopped right before its launch, and ran on after the receiver had given the step up."""
    config = push_config(step_timeout_seconds=2, ack_timeout_seconds=2)
    receiver = start(config, 1, **GPU)
    weights = samples.mixed(0, "cuda")
    held: list[tuple[bytes, bytes]] = []
    run = Pushed.run

    def late(self: Pushed, stream: torch.cuda.Stream) -> None:
        receiver.until("tainted")  # its own deadline is over: it has let go of the step
        before = self.digests(stream)
        run(self, stream)
        stream.synchronize()
        held.append((before, self.digests(stream)))

    with Sender(weights, config=config) as sender:
        assert sender.step().complete
        receiver.until("step", 1)
        for name, tensor in samples.mixed(5, "cuda").items():
            weights[name].copy_(tensor)
        with monkeypatch.context() as patch:
            patch.setattr(Pushed, "run", late)
            with pytest.raises(StepFailed):
                sender.step()
        assert len(held) == 1
        before, after = held[0]
        assert before == after
        began = time.monotonic()
        step = sender.step().step
        assert time.monotonic() - began < SETTLE_SECONDS + 2
        while (line := receiver.until("step"))["step"] != step:
            pass
        assert line["fingerprint"] == samples.fingerprint(weights)
