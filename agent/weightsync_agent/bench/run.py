"""A whole run: baselines, our cases, and peers, model by model."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from weightsync_api.bench_result import BenchResult, BenchRow
from weightsync_api.quantity import format_bytes

from ..manifest import Manifest
from . import peer_rows
from .baseline import RoundTrips, copy_times, flat_copy, list_copy
from .case import Case, measure
from .models import manifest_of
from .progress import Progress
from .rows import SMALL_BYTES, Baseline, against, baseline_row, result, row_of
from .scratch import scratch
from .series import Series

TRIPS = 3
"""Round trips before each measured step."""
TRIPS_TO_WARM = 200
COPIES = 8
"""Copies of each kind before and after a large model's steps."""
MOST_COPIES = 10_000
"""Of which the times are kept; a soak takes more."""
PEER_STEPS = 20
LARGE_BYTES = 20 << 30
LARGE_PEER_STEPS = 5
"""Of a model of at least LARGE_BYTES: the peers take seconds for each."""


@dataclass(frozen=True)
class Plan:
    """What is measured, in this order; at least one case, all on one device."""

    cases: Sequence[Case]
    soak: bool
    peers: bool


@dataclass
class _Times:
    """Seconds of what is measured beside a model's steps."""

    copies: Series = field(default_factory=lambda: Series(MOST_COPIES))
    lists: Series = field(default_factory=lambda: Series(MOST_COPIES))


def run(plan: Plan, progress: Progress) -> BenchResult:
    """Measures everything. Raises WeightSyncError; SourceError and ConfigError where a case can't be."""
    if plan.peers:
        peer_rows.load()
    rows: list[BenchRow] = []
    with scratch() as directory:
        progress.head("starting the process that round trips are measured with")
        with RoundTrips(directory) as trips:
            trips.take(TRIPS_TO_WARM)
            for model, group in groupby(plan.cases, lambda case: case.model):
                trips.seconds.clear()
                rows += _of_model(model, list(group), plan, trips, progress)
    measured = {row.peer.partition(" ")[0] for row in rows if row.peer}
    others = peer_rows.versions() if plan.peers else {}
    return result(rows, plan.cases[0].device, {name: found for name, found in others.items() if name in measured})


def _of_model(model: str, cases: list[Case], plan: Plan, trips: RoundTrips, progress: Progress) -> list[BenchRow]:
    manifest, device = manifest_of(model), cases[0].device
    name = f"{model}, {format_bytes(manifest.nbytes)}"
    times = _Times()
    between = _beside(manifest, device, trips, times)
    if manifest.nbytes > SMALL_BYTES:
        progress.head(f"{name}: plain copies")
        _copies(manifest, device, times)
    measured = []
    for case in cases:
        progress.head(f"{name}: {case.transport} {case.mode.value}{', with digests' if case.verify else ''}")
        measured.append(measure(case, progress, between))
        _give_back(device)
    peers: list[BenchRow] = []
    if plan.peers:
        progress.head(f"{name}: peers")
        most = LARGE_PEER_STEPS if manifest.nbytes >= LARGE_BYTES else PEER_STEPS
        peers = peer_rows.rows(cases[0].transport, model, device, min(cases[0].steps, most))
        _give_back(device)
    if manifest.nbytes > SMALL_BYTES:
        progress.head(f"{name}: plain copies again")
        _copies(manifest, device, times)
        _give_back(device)
    base = Baseline(statistics.median(times.copies), statistics.median(times.lists), statistics.median(trips.seconds))
    ours = [row_of(case, found, base, soak=plan.soak) for case, found in zip(cases, measured, strict=True)]
    plain = [row for row, case in zip(ours, cases, strict=True) if not case.verify]
    return [
        baseline_row(model, manifest.nbytes, 1, base.copy, base, len(times.copies)),
        baseline_row(model, manifest.nbytes, len(manifest.tensors), base.foreach, base, len(times.lists)),
        *ours,
        *(against(row, plain, base.copy) for row in peers),
    ]


def _beside(manifest: Manifest, device: torch.device, trips: RoundTrips, times: _Times) -> Callable[[], None]:
    """What is called before each step: round trips, and where there is room for them, copies."""
    if manifest.nbytes > SMALL_BYTES:
        return lambda: trips.take(TRIPS)
    flat, many = flat_copy(manifest.nbytes, device), list_copy(manifest, device)

    def between() -> None:
        times.copies.append(flat())
        times.lists.append(many())
        trips.take(TRIPS)

    return between


def _copies(manifest: Manifest, device: torch.device, times: _Times) -> None:
    """Copies before all steps and after them: the median of both is least wrong about a machine that changed."""
    for seconds in copy_times(manifest.nbytes, device, COPIES):
        times.copies.append(seconds)
    _give_back(device)
    many = list_copy(manifest, device)
    for _ in range(COPIES):
        times.lists.append(many())
    del many
    _give_back(device)


def _give_back(device: torch.device) -> None:
    """Torch's cache would count as the next case's memory."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
