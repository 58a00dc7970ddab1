"""A whole run: baselines, our cases, and peers, model by model."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from weightsync_api.bench_result import BenchResult, BenchRow
from weightsync_api.quantity import format_bytes

from . import baseline, peer_rows
from .case import Case, measure
from .models import manifest_of
from .progress import Progress
from .rows import Baseline, against, baseline_row, result, row_of


@dataclass(frozen=True)
class Plan:
    """What is measured, in this order; at least one case, all on one device."""

    cases: Sequence[Case]
    soak: bool
    peers: bool


def run(plan: Plan, progress: Progress) -> BenchResult:
    """Measures everything. Raises WeightSyncError; SourceError and ConfigError where a case can't be."""
    if plan.peers:
        peer_rows.load()
    device = plan.cases[0].device
    progress.head("bare ZeroMQ round trips")
    with tempfile.TemporaryDirectory(prefix="weightsync-bench-") as directory:
        round_trip = baseline.round_trip_seconds(Path(directory))
    rows: list[BenchRow] = []
    for model, group in groupby(plan.cases, lambda case: case.model):
        rows += _of_model(model, list(group), plan, round_trip, progress)
    return result(rows, device, peer_rows.versions() if plan.peers else {})


def _of_model(model: str, cases: list[Case], plan: Plan, round_trip: float, progress: Progress) -> list[BenchRow]:
    manifest, device = manifest_of(model), cases[0].device
    repeats = _repeats(manifest.nbytes)
    progress.head(f"{model}, {format_bytes(manifest.nbytes)}: one copy")
    copies = baseline.copy_times(manifest.nbytes, device, repeats)
    foreach = baseline.foreach_times(manifest, device, repeats)
    _give_back(device)
    measured = []
    for case in cases:
        progress.head(f"{model}: {case.transport} {case.mode.value}{', with digests' if case.verify else ''}")
        measured.append(measure(case, progress))
        _give_back(device)
    peers: list[BenchRow] = []
    if plan.peers:
        progress.head(f"{model}: peers")
        peers = peer_rows.rows(cases[0].transport, model, device, min(cases[0].steps, 20))
        _give_back(device)
    # Again at the end: where the machine got busier or calmer meanwhile, the median of both says so least wrongly.
    copies += baseline.copy_times(manifest.nbytes, device, repeats)
    foreach += baseline.foreach_times(manifest, device, repeats)
    _give_back(device)
    base = Baseline(statistics.median(copies), statistics.median(foreach), round_trip)
    ours = [row_of(case, found, base, soak=plan.soak) for case, found in zip(cases, measured, strict=True)]
    plain = [row for row, case in zip(ours, cases, strict=True) if not case.verify]
    return [
        baseline_row(model, manifest.nbytes, 1, base.copy, base, len(copies)),
        baseline_row(model, manifest.nbytes, len(manifest.tensors), base.foreach, base, len(foreach)),
        *ours,
        *(against(row, plain, base.copy) for row in peers),
    ]


def _repeats(nbytes: int) -> int:
    """As many copies as take some seconds on a slow machine, and no fewer than 6."""
    return min(200, max(6, (16 << 30) // max(nbytes, 1)))


def _give_back(device: torch.device) -> None:
    """Torch's cache would count as the next case's memory."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
