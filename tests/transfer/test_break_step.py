"""What bad luck and bad peers must not do to a step: tear bytes that a receiver calls whole, hang it, or end it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest
import samples
import torch
import zmq
from peers_by_hand import WAIT, eventually, raw
from step_promises import is_out
from weightsync_agent import protocol
from weightsync_agent.addresses import MANY_TENSORS
from weightsync_agent.deadline import Deadline
from weightsync_agent.digest import tensor_digest
from weightsync_agent.errors import Closed, ConfigError, JoinTimeout, StepFailed, WeightSyncError
from weightsync_agent.host_memory import ControlPage, HostMemory
from weightsync_agent.identity import local_identity
from weightsync_agent.sender import Sender
from weightsync_agent.transport.descriptors import fetch_descriptors

BOTH_MODES = pytest.mark.parametrize("mode", ["Direct", "Packed"])


def state_of(sender: Sender, rank: int) -> str:
    return next((str(agent.state.value) for agent in sender.report().agents if agent.rank == rank), "")


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Runs it; the list gets what it returned or raised."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


@BOTH_MODES
def test_receiver_that_restarts_within_a_step_is_admitted_after_it(mode, make_config, joined) -> None:
    config = make_config(mode=mode, receivers=2)
    slow, dies = joined(config, 1), joined(config, 2)
    with Sender(samples.mixed(0), config=config, adopt=mode == "Direct") as sender:
        assert sender.step().complete
        for receiver in (slow, dies):
            receiver.loader.gate.clear()
            receiver.loader.entered.clear()
        thread, outcome = in_thread(sender.step)
        assert slow.loader.entered.wait(WAIT)
        assert dies.loader.entered.wait(WAIT)
        if mode == "Direct":
            eventually(lambda: is_out(sender), "the step was sent to all")
        dies.die()
        again = joined(config, 2)  # its Hello comes while the step still waits for rank 1
        eventually(lambda: sender._lobby._later, "the Hello came within the step")
        slow.loader.gate.set()
        thread.join(WAIT)
        assert isinstance(outcome[0], StepFailed)
        eventually(lambda: state_of(sender, 2) == "Joined", "the restarted receiver joined")
        assert [part.rank for part in sender.step().receivers] == [1, 2]
        eventually(lambda: again.whole, "it holds a step")


@BOTH_MODES
def test_interrupted_step_is_whole_nowhere_and_the_next_one_is(mode, make_config, joined, monkeypatch) -> None:
    config = make_config(mode=mode)
    receiver = joined(config)
    weights = samples.mixed(0)
    with Sender(weights, config=config, adopt=mode == "Direct") as sender:
        assert sender.step().complete
        receiver.loader.gate.clear()
        receiver.loader.entered.clear()
        poll = sender._router.poll

        def interrupted(timeout: float) -> None:
            if receiver.loader.entered.is_set():
                raise KeyboardInterrupt  # as Ctrl-C does wherever the step happens to wait
            poll(timeout)

        monkeypatch.setattr(sender._router, "poll", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sender.step()
        monkeypatch.undo()
        for tensor in weights.values():
            tensor.zero_()  # the trainer goes on
        receiver.loader.gate.set()
        eventually(lambda: "broken off" in receiver.receiver.state.message, "the receiver dropped the step")
        assert receiver.whole == [1]
        assert not receiver.receiver.ready
        assert state_of(sender, 1) == "Tainted"
        report = sender.step()
        assert report.complete
        eventually(lambda: receiver.whole == [1, report.step], "whole again")
        assert samples.fingerprint(receiver.loader.weights) == samples.fingerprint(weights)


def test_replayed_words_of_joining_change_nothing(make_config, joined) -> None:
    config = make_config(receivers=1)
    with Sender(samples.mixed(0), config=config) as sender, raw(config) as peer:
        peer.hello()
        welcome = peer.until(protocol.Welcome)
        offer, number = welcome.offer, welcome.offer_number
        memories = [
            HostMemory.map(fd, region.nbytes)
            for fd, region in zip(
                fetch_descriptors(offer.socket, offer.token, len(offer.regions), Deadline(WAIT)),
                offer.regions,
                strict=True,
            )
        ]
        read = f"{tensor_digest(memories[1].tensor()):016x}"
        words = protocol.Joined(route="SharedMemory", self_test=read, offer_number=number)
        page = ControlPage(memories[0])
        page[1] = 0
        peer.send(words)
        peer.until(protocol.Admitted)
        owned = sender._transport.owned_bytes
        for _ in range(3):
            peer.send(words)
        page.fill(0xDEADBEEF)  # and garbage on its control page
        peer.send(protocol.Joined(route="SharedMemory", self_test="no", offer_number=number))
        eventually(lambda: sender.errors["protocol"] == 4, "each was counted")
        assert state_of(sender, 1) == "Joined"
        assert sender._transport.owned_bytes == owned
        assert sender._router._service.is_alive()
        for memory in memories:
            memory.close()


def test_receiver_that_changes_its_rank_leaves_no_ghost_in_the_next_step(make_config, joined) -> None:
    config = make_config(receivers=1)
    good = joined(config, 1)
    with Sender(samples.mixed(0), config=config) as sender:
        assert sender.step().complete
        # One connection says Hello with one rank and then with another.
        good.receiver._standing.identity = local_identity(2, torch.device("cpu"))
        good.receiver._dealer.owes_hello = True
        eventually(lambda: state_of(sender, 2) in ("Joined", "Synced"), "it joined with its new rank")
        report = sender.step()
        assert [part.rank for part in report.receivers] == [2]


def test_flood_does_not_hold_a_step_beyond_its_deadline(make_config) -> None:
    class Endless:
        """A socket that always has one message more, as a peer that floods it makes it."""

        taken = 0

        def get(self, option: int) -> int:
            return zmq.POLLIN

        def recv_multipart(self, flags: int) -> list[bytes]:
            self.taken += 1
            assert self.taken < 100_000, "one step takes messages for ever"
            return [b"nobody", b"noise"]

        def send_multipart(self, frames: list[bytes], flags: int) -> None:
            pass

    with Sender(samples.mixed(0), config=make_config(receivers=0)) as sender, sender._router.lock:
        socket, sender._router._socket = sender._router._socket, Endless()
        with pytest.raises(JoinTimeout):
            sender.step()
        sender._router._socket = socket


@BOTH_MODES
def test_parameter_that_shrank_where_it_lies_is_an_error_with_its_name(mode, make_config, joined) -> None:
    config = make_config(mode=mode)
    joined(config)
    weights = samples.mixed(0)
    with Sender(weights, config=config, adopt=mode == "Direct") as sender:
        assert sender.step().complete
        weights["large"].resize_(299, 257)  # same address, and the receivers have more
        with pytest.raises(
            ConfigError, match=r"large \(from 77100 to 76843 elements\) were resized.*the step was broken off"
        ):
            sender.step()


def test_one_of_many_parameters_that_is_another_by_now_makes_the_step_whole_nowhere(make_config, joined) -> None:
    def tensors(value: float) -> dict[str, torch.Tensor]:
        return {f"t{n}": torch.full((5,), value) for n in range(MANY_TENSORS)}

    config, target, weights = make_config(mode="Direct"), tensors(0.0), tensors(1.0)
    receiver = joined(config, target=target)
    with Sender(weights, config=config, adopt=True) as sender:
        assert sender.step().verified
        assert sender.step().complete
        kept = weights["t7"].data
        weights["t7"].data = torch.zeros(5, dtype=torch.float64)
        with pytest.raises(ConfigError, match=r"^t7 .*float64.* changed since the Sender .*the step was broken off"):
            sender.step()
        eventually(lambda: "broken off" in receiver.receiver.state.message, "the receiver dropped the step")
        assert receiver.whole == [1, 2]
        assert not receiver.receiver.ready
        weights["t7"].data = kept.fill_(2)
        report = sender.step()
        assert report.complete
        eventually(lambda: receiver.whole == [1, 2, report.step], "whole again")
        assert samples.fingerprint(target) == samples.fingerprint(weights)


def test_forked_child_neither_steps_nor_closes_its_parents_sender(make_config, joined) -> None:
    config = make_config()
    joined(config)
    with Sender(samples.mixed(0), config=config) as sender:
        assert sender.step().complete
        child = os.fork()
        if child == 0:
            signal.alarm(int(WAIT))  # a child that hangs ends, and not well
            code = 1
            try:
                sender.step()
            except Closed:
                sender.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert sender.step().complete


def test_close_within_a_step_by_a_signal_handler_ends_it_with_a_named_error(make_config, joined, monkeypatch) -> None:
    config = make_config()
    receiver = joined(config)
    sender = Sender(samples.mixed(0), config=config)
    assert sender.step().complete
    receiver.loader.gate.clear()
    receiver.loader.entered.clear()
    poll = sender._router.poll

    def closing(timeout: float) -> None:
        if receiver.loader.entered.is_set():
            receiver.loader.gate.set()
            sender.close("asked to end")
        poll(timeout)

    monkeypatch.setattr(sender._router, "poll", closing)
    with pytest.raises(WeightSyncError):
        sender.step()
    sender.close()
    with pytest.raises(Closed):
        sender.step()
