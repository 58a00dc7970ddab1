"""What a step promises: every byte at every receiver when step() returns, or a named error in bounded time."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest
import samples
import torch
from harness import START_SECONDS
from step_promises import *  # noqa: F403 - the tests of both places
from step_promises import CPU_PLACES, Place
from weightsync_agent.errors import JoinTimeout
from weightsync_agent.sender import Sender


@pytest.fixture(params=CPU_PLACES, ids=lambda place: place.name)
def place(request: pytest.FixtureRequest) -> Place:
    return request.param


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


def test_no_receiver_is_an_error_within_the_join_timeout(make_config) -> None:
    with (
        Sender(samples.mixed(0), config=make_config(join_timeout_seconds=0.3)) as sender,
        pytest.raises(JoinTimeout, match="no receiver has joined"),
    ):
        sender.step()


def test_mismatch_is_refused_before_any_byte_and_lists_every_difference(make_config, start) -> None:
    config = make_config()
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
    want = samples.change(weights, 9)
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
    assert receiver.process.wait(timeout=START_SECONDS) == 0


def test_exports_are_released_exactly_once(make_config, start) -> None:
    config = make_config(mode="Direct")
    receiver = start(config, 1)
    with Sender(samples.mixed(0), config=config, adopt=True) as sender:
        sender.step()
        transport = sender._transport
        assert transport.exported(1) == 1  # the arena; the self-test's memory is released already
        control = transport._exports[1].control
        receiver.process.send_signal(signal.SIGINT)
        receiver.process.wait(timeout=START_SECONDS)
        assert control.exported(1) == 0


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
            assert noise.poll(START_SECONDS * 1000), "a malformed message got no answer"
            assert b'"Error"' in noise.recv()
        assert sender.errors["protocol"] == len(frames) + 1
        assert sender.step().complete
        noise.close(linger=0)
        context.term()
    receiver.until("closed")
