"""An agent's Prometheus metrics. Names and units: https://prometheus.io/docs/practices/naming/

No series is kept by rank, step or error text: the number of series of an agent is fixed. Everything is read from the
agent's published report, beside the step's thread.
"""

from __future__ import annotations

import threading
from collections import Counter as Count
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, Info
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from weightsync_api.reports import AgentReport, AgentState, Report

from .identity import versions

STEP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 600)
"""Seconds: from a small model on one GPU to the longest step that the defaults allow."""
ACK_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 15, 60)
"""Seconds."""

ERROR_KINDS = ("load", "lost", "protocol", "receiver", "refused", "timeout", "transport", "verify")
"""The kinds that senders and receivers count; they are there from the start, so that `rate()` sees the first error."""


class AgentMetrics(Collector):
    """One agent's metrics, in a registry of their own: a trainer's own metrics stay apart.

    Args:
        report: gives the agent's current report; the agent itself is first in it.
        errors: the agent's errors by kind since it started.
    """

    def __init__(self, report: Callable[[], Report], errors: Count[str]) -> None:
        self.registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._seen = 0
        self._duration = Histogram(
            "weightsync_step_duration_seconds",
            "Time of a whole step, from the call of step() to the last ACK, in seconds (sender).",
            buckets=STEP_BUCKETS,
            registry=self.registry,
        )
        self._ack = Histogram(
            "weightsync_ack_latency_seconds",
            "Time from the end of a step's data to a receiver's ACK, in seconds, over all receivers (sender).",
            buckets=ACK_BUCKETS,
            registry=self.registry,
        )
        self._bytes = Counter(
            "weightsync_step_bytes_total",
            "Weights that complete steps brought to each receiver, in bytes (sender).",
            registry=self.registry,
        )
        self._steps = Counter(
            "weightsync_steps_total",
            "Steps by result: complete, or failed where a receiver did not acknowledge (sender).",
            ["result"],
            registry=self.registry,
        )
        for result in ("complete", "failed"):
            self._steps.labels(result)
        known = versions()
        labels = {"version": known["weightsync"], "torch": known["torch"], "protocol": known["protocol"]}
        Info("weightsync_build", "Versions that this agent runs.", registry=self.registry).info(labels)
        self.registry.register(_State(report, errors))

    def collect(self) -> Iterator[Metric]:
        """What is served: without the `_created` series that the client adds, which nothing here needs."""
        for family in self.registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family

    def observe(self, report: Report) -> None:
        """Counts the report's steps, each once however often it is reported. Any thread."""
        with self._lock:
            for step in report.steps:
                if step.step <= self._seen:
                    continue
                self._seen = step.step
                self._steps.labels("complete" if step.complete else "failed").inc()
                self._duration.observe(step.duration_microseconds / 1e6)
                if step.complete:
                    self._bytes.inc(step.bytes)
                for receiver in step.receivers:
                    if receiver.state == AgentState.SYNCED:
                        self._ack.observe(receiver.ack_microseconds / 1e6)


class _State(Collector):
    """What the agent's report says now; read when it is asked for."""

    def __init__(self, report: Callable[[], Report], errors: Count[str]) -> None:
        self._report = report
        self._errors = errors

    def collect(self) -> Iterator[Metric]:
        report = self._report()
        me = report.agents[0] if report.agents else AgentReport(rank=0)
        yield _gauge(
            "reserved_bytes", "Memory reserved by this agent after its last step, in bytes.", me.memory.reserved_after
        )
        yield _gauge(
            "allocated_bytes",
            "Memory allocated by this agent after its last step, in bytes.",
            me.memory.allocated_after,
        )
        yield _gauge("reserved_peak_bytes", "Most memory reserved within the last step, in bytes.", me.memory.peak)
        yield _gauge(
            "reserved_growth_bytes",
            "Change of this agent's reserved memory over its last step, in bytes; above 0 step after step: a leak.",
            me.memory.delta,
        )
        yield _gauge("last_step", "Number of the last step that this agent holds whole; 0: none yet.", me.step)
        yield _gauge("ready", "1 while this agent is ready as /readyz has it, otherwise 0.", int(not unready(me)))
        if me.rank == 0:
            joined = sum(
                a.state in (AgentState.JOINED, AgentState.SYNCED, AgentState.TAINTED) for a in report.agents[1:]
            )
            yield _gauge("receivers", "Receivers that are joined (sender).", joined)
        errors = CounterMetricFamily("weightsync_errors", "Errors by kind since the agent started.", labels=["kind"])
        counted = dict(self._errors)
        for kind in sorted({*ERROR_KINDS, *counted}):
            errors.add_metric([kind], counted.get(kind, 0))
        yield errors


def unready(agent: AgentReport) -> str:
    """Why an agent must not serve, in a sentence; empty: it may."""
    if agent.rank == 0:
        return "" if agent.step else "no step has reached every receiver yet"
    if agent.state == AgentState.SYNCED:
        return ""
    return f"rank {agent.rank} is {agent.state.value}: {agent.message or 'it holds no whole step yet'}"


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"weightsync_{name}", text, value=value)
