"""`weightsync run` and `weightsync get` draw the columns of `kubectl get weightsyncs` from the resource alone."""

from __future__ import annotations

import io
from datetime import timedelta

import pytest
from operator_samples import START, observed, planned, report, row, step, weightsync
from rich.console import Console
from weightsync_api.v1alpha1 import WeightSync, WeightSyncStatus
from weightsync_operator.status import next_status
from weightsync_operator.table import columns, drawn, header, plain
from weightsync_operator.table import row as cells_of
from weightsync_operator.text import age, latency, percentile, rate


def resource() -> WeightSync:
    ws = weightsync("qwen3-grpo", receivers={"replicas": 2})
    told = report(ws, [step(128, [row(1), row(2)])])
    status = next_status(ws, planned(ws), observed(ws), told, START, WeightSyncStatus())
    metadata = ws.metadata.model_copy(update={"creationTimestamp": "2026-01-02T03:04:05Z"})
    return ws.model_copy(update={"status": status, "metadata": metadata})


def test_the_columns_are_those_of_kubectl() -> None:
    shown = columns()
    text = plain([header(shown), cells_of(resource(), shown, START + timedelta(minutes=12))])
    assert text.splitlines() == [
        "NAME         READY   STATUS    TRANSPORT   RECEIVERS   STEP   RESERVED   DELTA   ACK     RATE      AGE",
        "qwen3-grpo   True    Syncing   NCCL        2/2         128    2GiB       +0B     0.8ms   348GB/s   12m",
    ]


def test_every_wide_column_finds_its_value() -> None:
    shown = columns(wide=True, namespace=True)
    ws = resource()
    assert ws.status is not None
    ws.status.summary.verified = "100"
    cells = dict(zip(header(shown), cells_of(ws, shown, START), strict=True))
    assert [name for name, cell in cells.items() if not cell] == []
    assert (cells["NAMESPACE"], cells["REASON"], cells["ROUTE"], cells["ACK-P99"]) == (
        "default",
        "Synced",
        "P2P/CUMEM",
        "0.8ms",
    )


def test_a_resource_without_a_status_has_empty_cells() -> None:
    shown = columns(wide=True)
    assert set(cells_of(weightsync(), shown, START)) == {"demo", ""}


def test_a_terminal_shows_the_same_cells() -> None:
    shown = columns()
    out = io.StringIO()
    Console(file=out, width=200).print(drawn([cells_of(resource(), shown, START)], shown, 200))
    first, second = out.getvalue().splitlines()
    assert first.split() == header(shown)
    assert second.split() == cells_of(resource(), shown, START)


def test_a_narrow_terminal_shows_fewer_columns_and_cuts_none() -> None:
    shown = columns()
    cells = cells_of(resource(), shown, START + timedelta(minutes=12))
    for width, missing in ((104, 0), (80, 2), (60, 4)):
        out = io.StringIO()
        Console(file=out, width=width).print(drawn([cells], shown, width))
        first, second = out.getvalue().splitlines()
        assert len(first.split()) == len(second.split()) == len(shown) - missing
        assert set(first.split()) <= set(header(shown))
        assert set(second.split()) <= set(cells)
        assert first.split()[:3] == ["NAME", "READY", "STATUS"]


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [(0, "0us"), (85, "85us"), (800, "0.8ms"), (12_300, "12ms"), (999_999, "1000ms"), (1_200_000, "1.2s")],
)
def test_latencies_read_at_a_glance(microseconds: int, text: str) -> None:
    assert latency(microseconds) == text


@pytest.mark.parametrize(
    ("nbytes", "microseconds", "text"),
    [
        (8_044_936_192, 23_100, "348GB/s"),
        (4_001_200, 9_700, "412MB/s"),
        (1_500_000_000, 1_000_000, "1.5GB/s"),
        (0, 10, "0B/s"),
        (10, 0, ""),
    ],
)
def test_rates_are_in_powers_of_1000(nbytes: int, microseconds: int, text: str) -> None:
    assert rate(nbytes, microseconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0s"), (119, "119s"), (200, "3m20s"), (720, "12m"), (5 * 3600, "5h"), (3 * 86400, "3d")]
)
def test_ages_are_written_as_kubectl_does(seconds: int, text: str) -> None:
    assert age(timedelta(seconds=seconds)) == text


def test_percentiles_are_values_that_were_measured() -> None:
    assert (percentile([], 99), percentile([5], 50), percentile([1, 2, 3, 4], 50)) == (0, 5, 2)
    assert percentile(range(1, 101), 99) == 99
