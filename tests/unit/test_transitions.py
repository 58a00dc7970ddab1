"""Events tell what turned, once: not what a pass saw again, and not what is on its way anyway."""

from __future__ import annotations

from operator_samples import START
from weightsync_api.v1alpha1 import Condition, ConditionType, WeightSyncStatus
from weightsync_operator.transitions import transitions


def status(**conditions: str) -> WeightSyncStatus:
    """`READY="False/Crashed"`."""
    made = []
    for kind, text in conditions.items():
        state, _, reason = text.partition("/")
        made.append(
            Condition(type=ConditionType[kind], status=state, reason=reason, message="m", last_transition_time=START)
        )
    return WeightSyncStatus(conditions=made)


def told(before: WeightSyncStatus | None, after: WeightSyncStatus) -> list[tuple[str, str]]:
    return [(t.type, t.reason) for t in transitions(before, after)]


def test_a_new_weightsync_that_starts_is_no_event() -> None:
    after = status(READY="False/Starting", MEMORY_STABLE="Unknown/WarmingUp", SUSPENDED="False/NotSuspended")
    assert told(None, after) == []


def test_ready_tells_when_it_comes_and_why_it_goes() -> None:
    starting, synced = status(READY="False/WaitingForFirstStep"), status(READY="True/Synced")
    assert told(starting, synced) == [("Normal", "Synced")]
    assert told(synced, synced) == []
    assert told(synced, status(READY="False/Crashed")) == [("Warning", "Crashed")]
    assert told(status(READY="False/Crashed"), status(READY="False/OOMKilled")) == [("Warning", "OOMKilled")]
    assert told(status(READY="False/Crashed"), status(READY="False/Starting")) == []


def test_an_alarm_tells_when_it_begins_and_when_it_ends() -> None:
    good, bad = status(MEMORY_STABLE="True/WithinLimit"), status(MEMORY_STABLE="False/ReservedGrows")
    assert told(good, bad) == [("Warning", "ReservedGrows")]
    assert told(bad, good) == [("Normal", "WithinLimit")]
    assert told(status(MEMORY_STABLE="Unknown/WarmingUp"), good) == []


def test_a_suspension_tells_its_begin_and_its_end() -> None:
    off, on = status(SUSPENDED="False/NotSuspended"), status(SUSPENDED="True/Suspended")
    assert told(off, on) == [("Normal", "Suspended")]
    assert told(on, off) == [("Normal", "Resumed")]
