"""What a Sender reports is what is so when it is asked, whatever its service thread is at."""

from __future__ import annotations

import threading

import samples
from peers_by_hand import WAIT
from weightsync_agent.sender import Sender
from weightsync_api.reports import Report


def test_last_step_is_in_a_report_that_is_asked_for_while_the_service_thread_is_at_work(
    make_config, joined, monkeypatch
) -> None:
    config = make_config()
    joined(config)
    at_work, go_on = threading.Event(), threading.Event()
    found: list[Report] = []
    with Sender(samples.mixed(0), config=config) as sender:
        take_all = sender._router.take_all

        def held_up() -> None:
            at_work.set()
            assert go_on.wait(WAIT)
            take_all()

        with sender._router.lock:  # so the service thread has no turn between the step and the patch
            sender.step()
            monkeypatch.setattr(sender._router, "take_all", held_up)
        assert at_work.wait(WAIT)
        asking = threading.Thread(target=lambda: found.append(sender.report()))
        asking.start()
        asking.join(0.1)  # who gives up at once has by now
        go_on.set()
        asking.join(WAIT)
        monkeypatch.undo()
    assert [step.step for step in found[0].steps] == [1]
    assert [(agent.rank, agent.state) for agent in found[0].agents] == [(0, "Synced"), (1, "Synced")]


def test_report_does_not_wait_for_a_step_that_is_at_work(make_config, joined) -> None:
    config = make_config()
    receiver = joined(config)
    with Sender(samples.mixed(0), config=config) as sender:
        assert sender.step().complete
        receiver.loader.gate.clear()
        receiver.loader.entered.clear()
        stepping = threading.Thread(target=sender.step)
        stepping.start()
        assert receiver.loader.entered.wait(WAIT)
        assert sender.report().steps[-1:] in ([], [sender._log.last])
        assert stepping.is_alive()
        receiver.loader.gate.set()
        stepping.join(WAIT)
        assert [step.step for step in sender.report().steps] == [1, 2]
