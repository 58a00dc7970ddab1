"""The operator's metrics. Series of a WeightSync have its namespace and name, and end with it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client import Counter as CounterMetric
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from weightsync_api.v1alpha1 import WeightSyncStatus

from .plan import Key


@dataclass(frozen=True, slots=True)
class _Figures:
    """What is told of one WeightSync: its status itself is some 50 objects large."""

    conditions: tuple[tuple[str, str], ...]
    step: int
    last: tuple[int, int, float] | None
    """Reserved bytes, their change, and seconds of the slowest ACK, of the last step."""

    @classmethod
    def of(cls, status: WeightSyncStatus) -> Self:
        last = status.last_step
        reserved = last.reserved_bytes if last else None
        return cls(
            tuple((sys.intern(c.type.value), sys.intern(c.status)) for c in status.conditions),
            status.step,
            (max(reserved.sender, reserved.receiver_max), reserved.delta, last.ack_microseconds.max / 1e6)
            if last and reserved
            else None,
        )


class OperatorMetrics(Collector):
    """Counts what happens, and describes the newest status of each WeightSync whenever it is scraped.

    Args:
        waiting: how many WeightSyncs have a pass due.
    """

    def __init__(self, waiting: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self._waiting = waiting
        self._figures: dict[Key, _Figures] = {}
        self._passes = Histogram(
            "weightsync_operator_reconcile_seconds",
            "Duration of a pass.",
            ["result"],
            buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 30),
            registry=self.registry,
        )
        self._requests = CounterMetric(
            "weightsync_operator_api_requests",
            "Requests to the API server besides watches; code 0: no answer.",
            ["verb", "code"],
            registry=self.registry,
        )
        self.registry.register(self)

    def passed(self, result: str, seconds: float) -> None:
        """A pass ended: `written`, `unchanged`, `gone` or `failed`."""
        self._passes.labels(result).observe(seconds)

    def requested(self, verb: str, code: int, seconds: float) -> None:
        """A request to the API server was answered."""
        self._requests.labels(verb, str(code)).inc()

    def know(self, key: Key, status: WeightSyncStatus | None) -> None:
        """The newest status of a WeightSync; None: it is gone."""
        if status is None:
            self._figures.pop(key, None)
        else:
            self._figures[key] = _Figures.of(status)

    def collect(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily("weightsync_operator_queue_depth", "WeightSyncs whose pass is due.")
        waiting.add_metric([], self._waiting())
        yield waiting
        states = Counter(condition for figures in self._figures.values() for condition in figures.conditions)
        conditions = GaugeMetricFamily(
            "weightsync_operator_weightsyncs", "WeightSyncs by condition.", labels=["condition", "status"]
        )
        for (kind, state), count in sorted(states.items()):
            conditions.add_metric([kind, state], count)
        yield conditions
        yield from self._steps()

    def _steps(self) -> Iterator[Metric]:
        labels = ["namespace", "name"]
        step = GaugeMetricFamily("weightsync_step", "Last complete step.", labels=labels)
        reserved = GaugeMetricFamily("weightsync_reserved_bytes", "Most reserved memory of any agent.", labels=labels)
        delta = GaugeMetricFamily(
            "weightsync_reserved_delta_bytes", "Largest change of reserved memory over the last step.", labels=labels
        )
        ack = GaugeMetricFamily("weightsync_ack_seconds", "Slowest ACK of the last step.", labels=labels)
        for key, figures in sorted(self._figures.items()):
            step.add_metric([*key], figures.step)
            if figures.last is not None:
                for family, value in zip((reserved, delta, ack), figures.last, strict=True):
                    family.add_metric([*key], value)
        yield from (step, reserved, delta, ack)
