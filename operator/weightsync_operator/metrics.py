"""The operator's metrics. Series of a WeightSync have its namespace and name, and end with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client import Counter as CounterMetric
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from weightsync_api.v1alpha1 import WeightSyncStatus

from .plan import Key


class OperatorMetrics(Collector):
    """Counts what happens, and describes the newest status of each WeightSync whenever it is scraped.

    Args:
        waiting: how many WeightSyncs have a pass due.
    """

    def __init__(self, waiting: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self._waiting = waiting
        self._statuses: dict[Key, WeightSyncStatus] = {}
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
            self._statuses.pop(key, None)
        else:
            self._statuses[key] = status

    def collect(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily("weightsync_operator_queue_depth", "WeightSyncs whose pass is due.")
        waiting.add_metric([], self._waiting())
        yield waiting
        states = Counter((c.type.value, c.status) for status in self._statuses.values() for c in status.conditions)
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
        for key, status in sorted(self._statuses.items()):
            step.add_metric([*key], status.step)
            if (last := status.last_step) is not None:
                reserved.add_metric([*key], max(last.reserved_bytes.sender, last.reserved_bytes.receiver_max))
                delta.add_metric([*key], last.reserved_bytes.delta)
                ack.add_metric([*key], last.ack_microseconds.max / 1e6)
        yield from (step, reserved, delta, ack)
