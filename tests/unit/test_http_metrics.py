"""The agent's metrics, of a real sender and a real receiver, as they are served."""

from __future__ import annotations

import prometheus_client
import pytest
import torch
from http_group import *  # noqa: F403 - the fixtures
from http_group import WAIT_SECONDS, Group, ask, until
from prometheus_client.parser import text_string_to_metric_families
from weightsync_agent.errors import StepFailed
from weightsync_agent.http import AgentServer


def samples(server: AgentServer) -> dict[str, float]:
    """Metrics by name and labels, as Prometheus reads them."""
    status, body = ask(server, "/metrics")
    assert status == 200
    found = {}
    for family in text_string_to_metric_families(body):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_metrics_count_each_step_once_however_often_they_are_read(group: Group) -> None:
    for _ in range(3):
        group.sender.step()
        samples(group.sending)
    found = samples(group.sending)
    assert found["weightsync_steps_total{result=complete}"] == 3
    assert found["weightsync_steps_total{result=failed}"] == 0
    assert found["weightsync_step_duration_seconds_count"] == 3
    assert 0 < found["weightsync_step_duration_seconds_sum"] < WAIT_SECONDS
    assert found["weightsync_ack_latency_seconds_count"] == 3
    assert found["weightsync_step_bytes_total"] == 3 * 4040
    assert found["weightsync_last_step"] == 3
    assert found["weightsync_ready"] == 1
    assert found["weightsync_receivers"] == 1


def test_metrics_tell_more_steps_than_a_report_keeps(group: Group) -> None:
    for number in range(150):
        group.sender.step()
        if number % 50 == 0:  # nobody does 64 steps within a look at them
            until(lambda told=number + 1: group.sending.metrics._seen == told)
    assert samples(group.sending)["weightsync_steps_total{result=complete}"] == 150


def test_a_failed_step_and_its_error_are_counted_on_both_sides(group: Group) -> None:
    group.sender.step()
    group.engine.fail.set()
    with pytest.raises(StepFailed):
        group.sender.step()
    sender, receiver = samples(group.sending), samples(group.receiving)
    assert sender["weightsync_steps_total{result=failed}"] == 1
    assert sender["weightsync_errors_total{kind=receiver}"] == 1
    assert receiver["weightsync_errors_total{kind=load}"] == 1
    assert receiver["weightsync_ready"] == 0
    assert receiver["weightsync_last_step"] == 1


def test_memory_metrics_are_those_of_the_report(group: Group) -> None:
    group.sender.step()
    me, found = group.sender.report().agents[0].memory, samples(group.sending)
    assert found["weightsync_reserved_bytes"] == me.reserved_after > 0
    assert found["weightsync_allocated_bytes"] == me.allocated_after
    assert found["weightsync_reserved_growth_bytes"] == me.reserved_after - me.reserved_before
    assert samples(group.receiving)["weightsync_reserved_bytes"] > 0


def test_build_info_names_the_versions(group: Group) -> None:
    info = next(name for name in samples(group.sending) if name.startswith("weightsync_build_info{"))
    assert f"torch={torch.__version__}" in info
    assert "protocol=1" in info
    assert "version=" in info


def test_metrics_follow_the_conventions_and_their_number_is_bounded(group: Group) -> None:
    group.sender.step()
    text = ask(group.sending, "/metrics")[1]
    names = set()
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("weightsync_")
        assert family.documentation.endswith(".")
        for unit in ("bytes", "seconds"):
            if unit in family.name:
                assert f"in {unit}" in family.documentation, f"{family.name}: the help text has no unit"
        for sample in family.samples:
            assert not sample.name.endswith("_created")
            names |= set(sample.labels)
    assert names == {"result", "kind", "le", "version", "torch", "protocol"}


def test_a_trainers_own_metrics_stay_its_own(group: Group) -> None:
    assert not any("weightsync" in family.name for family in prometheus_client.REGISTRY.collect())


def test_metrics_come_in_the_format_that_is_asked_for(group: Group) -> None:
    text = ask(group.sending, "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})[1]
    assert text.endswith("# EOF\n")
