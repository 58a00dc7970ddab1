"""What a step promises: every byte at every receiver when step() returns, or a named error in bounded time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import samples
import torch
from weightsync_agent.errors import JoinTimeout, StepFailed
from weightsync_agent.sender import Sender

BOTH_MODES = pytest.mark.parametrize("mode", ["Direct", "Packed"])
BOTH_TARGETS = pytest.mark.parametrize("target", ["dict", "loader"])


def change(weights: dict[str, torch.Tensor], seed: int) -> dict[str, str]:
    """Trains, so to say: new bytes in place. Gives their fingerprint."""
    for name, tensor in samples.mixed(seed).items():
        weights[name].copy_(tensor)
    return samples.fingerprint(weights)


@BOTH_MODES
@BOTH_TARGETS
def test_every_receiver_holds_every_byte_after_each_step(mode, target, make_config, start) -> None:
    config = make_config(mode=mode, receivers=2)
    receivers = [start(config, rank, target=target) for rank in (1, 2)]
    weights = samples.mixed(0)
    with Sender(weights, config=config, adopt=mode == "Direct") as sender:
        for step in range(1, 4):
            want = change(weights, step)
            report = sender.step()
            assert report.complete
            assert report.verified == (step == 1)  # the first step is, then each hundredth
            assert [part.rank for part in report.receivers] == [1, 2]
            for receiver in receivers:
                line = receiver.until("step", step)
                assert line["fingerprint"] == want
                assert line["ready"]
        assert sender.report().mode == mode
        assert sender.report().self_tested


def test_adopted_parameters_stay_the_same_objects_with_the_same_values(make_config) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 3))
    model[1].weight = model[0].weight  # tied
    model[1].bias = torch.nn.Parameter(torch.randn(5))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objects = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    with Sender(model, config=make_config(mode="Direct"), adopt=True):
        assert {name: id(p) for name, p in model.named_parameters()} == {n: id(p) for n, p in objects.items()}
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert model[1].weight.data_ptr() == model[0].weight.data_ptr()
        assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
            id(p) for p in model.parameters()
        }
    # The parameters outlive the sender.
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("fault", [{"raise_in_load": True}, {"keep_views": True}])
@BOTH_MODES
def test_receiver_that_fails_is_named_tainted_and_whole_one_step_later(mode, fault, make_config, start) -> None:
    config = make_config(mode=mode, receivers=2)
    good = start(config, 1)
    bad = start(config, 2, target="loader", fault_steps=[2], **fault)
    weights = samples.mixed(0)
    with Sender(weights, config=config, adopt=mode == "Direct") as sender:
        assert sender.step().complete
        bad.until("step", 1)
        change(weights, 2)
        with pytest.raises(StepFailed) as failure:
            sender.step()
        report = failure.value.report
        assert not report.complete
        assert [(part.rank, part.state) for part in report.receivers] == [(1, "Synced"), (2, "Tainted")]
        cause = "the engine's loader is broken" if "raise_in_load" in fault else "outlived the load"
        assert cause in report.receivers[1].error
        assert "rank 2" in str(failure.value)
        assert "step 2" in str(failure.value)
        tainted = bad.until("tainted")
        assert cause in tainted["tainted"]
        assert not tainted["ready"]
        want = change(weights, 3)
        assert sender.step().complete
        assert bad.until("step", 3)["fingerprint"] == want
        assert good.until("step", 3)["fingerprint"] == want


@BOTH_MODES
def test_killed_receiver_is_dropped_and_returns_whole(mode, make_config, start) -> None:
    config = make_config(mode=mode, receivers=2)
    stays, dies = start(config, 1), start(config, 2, target="loader", fault_steps=[2], sleep_in_load=60)
    weights = samples.mixed(0)
    with Sender(weights, config=config, adopt=mode == "Direct") as sender:
        assert sender.step().complete
        dies.until("step", 1)
        # It is in the middle of step 2 (its loader sleeps) when it is killed.
        killer = threading.Timer(1.0, dies.kill)
        killer.start()
        began = time.monotonic()
        with pytest.raises(StepFailed, match=r"rank 2.*connection is gone") as failure:
            sender.step()
        killer.join()
        assert time.monotonic() - began < 20  # long before the ACK's deadline of 30 s
        assert failure.value.report.receivers[1].state == "Lost"
        want = change(weights, 3)
        report = sender.step()
        assert report.complete
        assert [part.rank for part in report.receivers] == [1]
        assert stays.until("step", 3)["fingerprint"] == want
        again = start(config, 2)
        again.until("started")
        deadline = time.monotonic() + 60
        want = change(weights, 4)
        while len(sender.step().receivers) < 2:
            assert time.monotonic() < deadline, "the restarted receiver did not join"
            time.sleep(0.05)
        assert again.until("step")["fingerprint"] == want


@BOTH_MODES
def test_silent_receiver_costs_the_ack_timeout_and_is_whole_later(mode, make_config, start) -> None:
    config = make_config(mode=mode, ack_timeout_seconds=1, step_timeout_seconds=3)
    receiver = start(config, 1)
    weights = samples.mixed(0)
    with Sender(weights, config=config, adopt=mode == "Direct") as sender:
        assert sender.step().complete
        receiver.until("step", 1)
        os.kill(receiver.process.pid, signal.SIGSTOP)  # alive, connected, and deaf
        began = time.monotonic()
        with pytest.raises(StepFailed, match="rank 1"):
            sender.step()
        assert time.monotonic() - began < 10
        os.kill(receiver.process.pid, signal.SIGCONT)
        want = change(weights, 3)
        for _ in range(50):
            try:
                step = sender.step().step
                break
            except StepFailed:
                continue
        # Whatever it made of the step that was broken off, it never called that one whole.
        while (line := receiver.until("step"))["step"] != step:
            assert line["step"] != 2
        assert line["fingerprint"] == want


def test_no_receiver_is_an_error_within_the_join_timeout(make_config) -> None:
    with (
        Sender(samples.mixed(0), config=make_config(join_timeout_seconds=0.3)) as sender,
        pytest.raises(JoinTimeout, match="no receiver has joined"),
    ):
        sender.step()


def test_mismatch_is_refused_before_any_byte_and_lists_every_difference(make_config, start) -> None:
    config = make_config(join_timeout_seconds=60)
    receiver = start(config, 1, names={"scalar": "module.scalar", "empty": "module.empty"})
    with Sender(samples.mixed(0), config=config) as sender:
        with pytest.raises(JoinTimeout, match=r"module\.scalar"):
            sender.step()
        line = receiver.until("error")
        assert line["error"] == "ManifestMismatch"
        assert "scalar: sent, but the receiver has no such tensor" in line["message"]
        assert "module.empty: the receiver has it, but it is not sent" in line["message"]
        assert "the receiver's names have the prefix 'module.'" in line["message"]


def test_restarted_sender_goes_on_after_the_last_step(make_config, start) -> None:
    config = make_config()
    receiver = start(config, 1)
    weights = samples.mixed(0)
    first = Sender(weights, config=config)
    for step in (1, 2):
        assert first.step().step == step
    receiver.until("step", 2)
    # As a crash would: the socket goes without a goodbye.
    first._lobby.peers.clear()
    first.close()
    want = change(weights, 9)
    with Sender(weights, config=config) as second:
        report = second.step()
        assert report.step == 3
        assert report.verified  # a receiver's first step with a sender is
        assert receiver.until("step", 3)["fingerprint"] == want


def test_goodbye_reaches_the_receiver(make_config, start) -> None:
    config = make_config()
    receiver = start(config, 1)
    with Sender(samples.mixed(0), config=config) as sender:
        sender.step()
    assert "finished" in receiver.until("closed")["closed"]
    assert receiver.process.wait(timeout=20) == 0


def test_exports_are_released_exactly_once(make_config, start) -> None:
    config = make_config(mode="Direct", join_timeout_seconds=60)
    receiver = start(config, 1)
    with Sender(samples.mixed(0), config=config, adopt=True) as sender:
        sender.step()
        transport = sender._transport
        assert transport.exported(1) == 1  # the arena; the self-test's memory is released already
        page = transport._exports[1].page
        receiver.process.send_signal(signal.SIGINT)
        receiver.process.wait(timeout=20)
        assert page[2] == 0


def test_second_receiver_of_a_rank_is_refused_while_the_first_lives(make_config, start) -> None:
    config = make_config()
    first = start(config, 1)
    with Sender(samples.mixed(0), config=config) as sender:
        sender.step()
        first.until("step", 1)
        second = start(config, 1)
        second.until("started")
        deadline = time.monotonic() + 60
        refused: Callable[[], bool] = lambda: sender.errors["refused"] > 0  # noqa: E731
        while not refused():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        line = second.until("error")
        assert line["error"] == "Refused"
        assert "rank 1 is taken" in line["message"]
        assert sender.step().complete


def test_noise_on_the_wire_is_answered_counted_and_harmless(make_config, start) -> None:
    import zmq

    config = make_config()
    receiver = start(config, 1)
    with Sender(samples.mixed(0), config=config) as sender:
        sender.step()
        context = zmq.Context()
        noise = context.socket(zmq.DEALER)
        noise.connect(config.connect)
        frames = [b"", b"{}", b"\x00\xff" * 100, b'{"kind":"Ack","step":2}', b'{"kind":"Begin"}', b"[" * 10_000]
        for frame in frames:
            noise.send(frame)
        noise.send_multipart([b"{}", b"{}"])
        for _ in range(len(frames) + 1):
            assert noise.poll(20_000), "a malformed message got no answer"
            assert b'"Error"' in noise.recv()
        assert sender.errors["protocol"] == len(frames) + 1
        assert sender.step().complete
        noise.close(linger=0)
        context.term()
    receiver.until("closed")


def test_memory_stays_flat_over_many_steps(make_config, start) -> None:
    config = make_config()
    receiver = start(config, 1)
    with Sender(samples.mixed(0), config=config) as sender:
        reports = [sender.step() for _ in range(60)]
        receiver.until("step", 60)
    for of in (lambda r: r.memory, lambda r: r.receivers[0].memory):
        assert of(reports[-1]).reserved_after > 0
        assert of(reports[-1]).reserved_after - of(reports[10]).reserved_after < 8 << 20
