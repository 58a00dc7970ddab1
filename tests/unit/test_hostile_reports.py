"""Whatever an agent reports, a pass comes to a status that the API server can store."""

from __future__ import annotations

import json
import string
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from operator_samples import START, observed, planned, report, row, step, weightsync
from pydantic import ValidationError
from weightsync_api.reports import Report
from weightsync_api.v1alpha1 import WeightSyncStatus
from weightsync_operator.metrics import OperatorMetrics
from weightsync_operator.plan import Key
from weightsync_operator.reserved import ReservedHistory
from weightsync_operator.resource_tree import status_tree
from weightsync_operator.status import next_status

WS = weightsync(receivers={"replicas": 2})
HONEST = report(WS, [step(number, [row(1), row(2)]) for number in (1, 2, 3)])
HOSTILE: st.SearchStrategy[Any] = st.one_of(
    st.integers(),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([0, -1, 2**63 - 1, -(2**63), 1e308, None, True, [], {}, "", "x" * 5000, "\x00", "\ud83d"]),
    st.sampled_from(
        ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "2026-01-01T00:00:00", "2026-01-01T00:00:00+14:00"]
    ),
    st.text(string.printable, max_size=20),
)


def places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every value of a tree of JSON values."""
    found = [at] if at else []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        found += places(value, (*at, key))
    return found


PLACES = places(json.loads(HONEST.model_dump_json(by_alias=True)))


WIDEST = [
    (("steps", 2, "memory", "reservedAfter"), 2**63 - 1),
    (("steps", 2, "memory", "reservedBefore"), -(2**63)),
]


@settings(max_examples=200, deadline=None)
@example(WIDEST)
@given(st.lists(st.tuples(st.sampled_from(PLACES), HOSTILE), min_size=1, max_size=4))
def test_a_changed_report_is_refused_or_comes_to_a_status_that_can_be_stored(
    changes: list[tuple[tuple[Any, ...], Any]],
) -> None:
    tree = json.loads(HONEST.model_dump_json(by_alias=True))
    for place, value in changes:
        within = tree
        try:
            for key in place[:-1]:
                within = within[key]
            within[place[-1]] = value
        except (TypeError, LookupError):
            continue  # an earlier change took the place away
    try:
        hostile = Report.model_validate_json(json.dumps(tree))
    except ValidationError:
        return
    history = ReservedHistory(WS.spec.memory.window)
    history.record(hostile)
    history.record(HONEST)
    before = next_status(WS, planned(WS), observed(WS), HONEST, START, WeightSyncStatus())
    status = next_status(WS, planned(WS), observed(WS), hostile, START, before, history)
    stored = json.dumps(status_tree(status))
    assert WeightSyncStatus.model_validate_json(stored).step == status.step
    assert len(stored) < 100_000
    assert all(-(2**63) <= number < 2**63 for number in numbers(json.loads(stored)))
    metrics = OperatorMetrics(lambda: 0)
    metrics.know(Key("default", "demo"), status)
    assert list(metrics.collect())


def numbers(tree: Any) -> list[int]:
    if isinstance(tree, dict):
        return [number for value in tree.values() for number in numbers(value)]
    if isinstance(tree, list):
        return [number for value in tree for number in numbers(value)]
    return [tree] if isinstance(tree, int) else []
