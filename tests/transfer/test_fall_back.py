"""One receiver that can't map the sender's own memory puts all on staging buckets, whatever state each is in."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import samples
from peers_by_hand import eventually, raw
from weightsync_agent import protocol, sender
from weightsync_agent.errors import FallBack
from weightsync_agent.sender import Sender
from weightsync_agent.transport.shared_memory import SharedMemorySender

BLIND = 3
"""The rank that can't map the arena."""


class Choosy(SharedMemorySender):
    """Falls back as the transport of a GPU does: memory of this machine can always be mapped."""

    def offer(self, identity: protocol.Identity) -> protocol.Offer:
        if self.plan.mode == "Direct" and identity.rank == BLIND:
            raise FallBack("its container has another /dev/shm")
        return super().offer(identity)

    def fall_back(self, reason: str) -> None:
        for rank in list(self._exports):
            self.forget(rank)
        self.plan = replace(self.plan, mode="Packed")
        self._make_slots()


@pytest.fixture
def choosy(monkeypatch) -> None:
    monkeypatch.setattr(sender, "sender_transport", lambda transport, plan: Choosy(plan))


def test_receivers_that_joined_and_one_that_comes_fall_back_to_packed(choosy, make_config, joined) -> None:
    config = make_config(mode="Auto", receivers=2)
    first, second = joined(config, 1), joined(config, 2)
    weights = samples.mixed(0)
    with Sender(weights, config=config, adopt=True) as sender:
        assert sender.step().complete
        assert sender.report().mode == "Direct"
        third = joined(config, BLIND)
        eventually(lambda: len(sender._lobby.present()) == 3, "all joined anew")
        weights["large"].add_(1)
        report = sender.step()
        assert report.complete
        assert [part.rank for part in report.receivers] == [1, 2, BLIND]
        assert sender.report().mode == "Packed"
        for receiver in (first, second, third):
            eventually(lambda receiver=receiver: receiver.receiver.step == report.step, "it holds the step")
            assert samples.fingerprint(receiver.loader.weights) == samples.fingerprint(weights)


def test_receiver_between_its_offer_and_its_answer_gets_a_new_offer_and_its_old_answer_is_none(
    choosy, make_config, joined
) -> None:
    config = make_config(mode="Auto", receivers=2)
    with Sender(samples.mixed(0), config=config, adopt=True) as sender, raw(config) as slow:
        slow.hello(rank=1)
        before = slow.until(protocol.Welcome)
        assert before.mode == "Direct"
        third = joined(config, BLIND)
        after = slow.until(protocol.Welcome)
        assert after.mode == "Packed"
        assert after.offer.token != before.offer.token
        eventually(lambda: third.receiver.state.state == "Joined", "the one that can't map joined")
        slow.send(protocol.Joined(route="SharedMemory", self_test="0" * 16, offer_number=before.offer_number))
        slow.send(protocol.Differs(differences="the descriptors were gone", offer_number=before.offer_number))
        slow.send(protocol.Joined(route="SharedMemory", self_test="0" * 16, offer_number=after.offer_number))
        # Only the last of the three is judged.
        assert "1 MiB self-test" in slow.until(protocol.Refuse).reason
        assert sender.errors == {"refused": 1}


class Pushy(Choosy):
    """Pushes first: what a GPU's transport does before it lets receivers copy."""

    pushing = True
    apart = False

    @property
    def pushes(self) -> bool:
        return self.pushing

    def offer(self, identity: protocol.Identity) -> protocol.Offer:
        if self.pushing and identity.rank == BLIND:
            raise FallBack("its weights go through load_weights", apart=self.apart)
        return super().offer(identity)

    def fall_back(self, reason: str) -> None:
        if not self.pushing:
            super().fall_back(reason)
            return
        self.pushing = False
        for rank in list(self._exports):
            self.forget(rank)


@pytest.fixture
def pushy(monkeypatch) -> None:
    monkeypatch.setattr(sender, "sender_transport", lambda transport, plan: Pushy(plan))


def test_all_fall_from_pushing_to_direct_to_packed_as_far_as_one_needs_it(pushy, make_config, joined, caplog) -> None:
    caplog.set_level(logging.INFO)
    config = make_config(mode="Auto", receivers=1)
    weights = samples.mixed(0)
    with Sender(weights, config=config, adopt=True) as sender:
        first = joined(config, 1)
        assert sender.step().complete
        assert sender._transport.pushes
        third = joined(config, BLIND)
        eventually(lambda: len(sender._lobby.present()) == 2, "both joined anew")
        report = sender.step()
        assert report.complete
        assert (sender._transport.pushes, sender.report().mode) == (False, "Packed")
        for receiver in (first, third):
            eventually(lambda receiver=receiver: receiver.receiver.step == report.step, "it holds the step")
            assert samples.fingerprint(receiver.loader.weights) == samples.fingerprint(weights)
    told = [(line.levelname, line.getMessage()) for line in caplog.records if " so " in line.getMessage()]
    assert [level for level, _ in told] == ["INFO", "WARNING"]
    assert "each receiver copies for itself" in told[0][1]
    assert "staging buckets" in told[1][1]


def test_who_is_apart_from_the_sender_is_refused_in_mode_direct_and_takes_pushing_from_nobody(
    pushy, make_config, joined, monkeypatch
) -> None:
    monkeypatch.setattr(Pushy, "apart", True)
    config = make_config(mode="Direct", receivers=1)
    with Sender(samples.mixed(0), config=config, adopt=True) as sender:
        joined(config, 1)
        assert sender.step().complete
        with raw(config) as other:
            other.hello(rank=BLIND)
            assert "transfer.mode is Direct, and its weights go through" in other.until(protocol.Refuse).reason
        assert sender._transport.pushes
        assert sender.step().complete
