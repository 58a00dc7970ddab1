"""Rules for names reach the agents, and what they did to names is in the status. Nothing here needs torch."""

from __future__ import annotations

from operator_samples import START, observed, planned, report, row, step, weightsync
from weightsync_api.v1alpha1 import WeightSyncStatus
from weightsync_operator.cli_show import described
from weightsync_operator.status import next_status

SAID = "'_orig_mod.' left out of 25 names; 1 not sent: v_head.weight"


def test_the_rules_of_the_spec_reach_the_agents() -> None:
    rules = [{"pattern": r"^model\.(.*)$", "replacement": r"\1"}]
    source = {"source": {"trainer": {}}, "names": rules}
    config = planned(weightsync(sender=source)).config
    assert [rule.model_dump() for rule in config.names] == rules
    assert planned(weightsync()).config.names == []


def test_what_was_done_to_names_is_in_the_status_and_in_describe_and_stays_while_nobody_tells() -> None:
    ws = weightsync()
    plan, seen = planned(ws), observed(ws)
    told = report(ws, [step(1, [row(1)])], names=SAID)
    status = next_status(ws, plan, seen, told, START, WeightSyncStatus())
    assert status.names == SAID
    assert next_status(ws, plan, seen, None, START, status).names == SAID
    ws.status = status
    assert f"Names:      {SAID}" in described(ws, START).splitlines()
    ws.status = next_status(ws, plan, seen, report(ws, [step(1, [row(1)])]), START, WeightSyncStatus())
    assert "Names:" not in described(ws, START)
