"""From times to rows of the project's one benchmark format, and to a table for people."""

from __future__ import annotations

import datetime
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import zmq
from weightsync_api.bench_result import BenchResult, BenchRow
from weightsync_api.quantity import format_bytes, format_delta

from ..identity import own_version
from .case import Case, Measured

SMALL_BYTES = 64 << 20
"""Below, what a step costs beyond its copies is told: above, a copy's own variation is more than that."""


@dataclass(frozen=True)
class Baseline:
    """What was measured beside a model's cases, in seconds."""

    copy: float
    """One flat copy of the same bytes."""
    foreach: float
    """One torch._foreach_copy_ of the same list."""
    round_trip: float
    """One bare ZeroMQ round trip between two processes."""


def row_of(case: Case, measured: Measured, base: Baseline, *, soak: bool) -> BenchRow:
    """Our row. `soak`: its note has the slopes of reserved memory."""
    seconds = statistics.median(measured.seconds)
    notes = [slopes(measured)] if soak else [f"joined in {measured.join_seconds:.2f} s"]
    if measured.nbytes <= SMALL_BYTES and not case.verify:
        notes += beyond_copies(measured, base)
    elif case.touched_by == "Copy":
        beyond = (seconds - base.copy) * 1e6
        notes.append(f"weights written by the copy engine, not a kernel: {beyond:.0f} us beyond one copy")
    mode = f"{measured.mode}, pushed" if measured.route == "IPC/Push" else measured.mode
    extra = " with digests" if case.verify else " written by the copy engine" if case.touched_by == "Copy" else ""
    return BenchRow(
        name=f"{case.transport} {mode} {case.model}{extra}",
        transport=case.transport,
        mode=mode,
        model=case.model,
        bytes=measured.nbytes,
        tensors=measured.tensors,
        receivers=len(case.receiver_devices),
        **rates(measured.nbytes, seconds, base.copy),
        reserved_growth_bytes=max(memory.growth for memory in measured.memory),
        reserved_peak_bytes=max(0, *(memory.peak - memory.base for memory in measured.memory)),
        repeats=len(measured.seconds),
        note="; ".join(notes),
    )


def baseline_row(model: str, nbytes: int, tensors: int, seconds: float, base: Baseline, repeats: int) -> BenchRow:
    """The row of a plain copy within one process: flat where `tensors` is 1, else one torch._foreach_copy_."""
    how = "copy_" if tensors == 1 else "_foreach_copy_"
    return BenchRow(
        name=f"{how} {model}",
        transport=how,
        mode="one process",
        model=model,
        bytes=nbytes,
        tensors=tensors,
        receivers=0,
        **rates(nbytes, seconds, base.copy),
        reserved_growth_bytes=0,
        repeats=repeats,
        peer=f"torch {torch.__version__}",
        note="one flat buffer to another" if tensors == 1 else "each tensor an allocation of its own",
    )


def against(peer: BenchRow, ours: Sequence[BenchRow], copy: float) -> BenchRow:
    """A peer's row with the ratio to this run's copy, and how much slower it is than our slowest and fastest mode."""
    note = peer.note
    if ours:
        times = sorted(peer.milliseconds / row.milliseconds for row in ours)
        factor = f"{times[0]:.1f}" if len(times) == 1 else f"{times[0]:.1f} to {times[-1]:.1f}"
        note += f"; takes {factor} times as long as ours"
    return peer.model_copy(update={"ratio_to_copy": round(copy * 1e3 / peer.milliseconds, 4), "note": note})


def beyond_copies(measured: Measured, base: Baseline) -> list[str]:
    """Sentences for a model of small tensors: a step in units of a bare round trip, and of a copy of the list."""
    seconds = statistics.median(measured.seconds)
    copies = 1 if measured.mode == "Direct" or measured.route == "IPC/Push" else 2
    beyond = max(0.0, seconds - copies * base.foreach)
    rate = f"{seconds / base.foreach:.2f} times one _foreach_copy_ of the list"
    if not beyond:
        return [rate]
    return [
        f"beyond its copies {beyond * 1e6:.0f} us, "
        f"{beyond / base.round_trip:.1f} bare ZeroMQ round trips of {base.round_trip * 1e6:.0f} us",
        rate,
    ]


def slopes(measured: Measured) -> str:
    """Reserved memory over a soak, by process."""
    names = ["sender", *(f"rank {rank}" for rank in range(1, len(measured.memory)))]
    parts = [
        f"{name} {memory.slope:+.1f} bytes/step, {format_delta(round(memory.reserved[-1] - memory.reserved[0]))}"
        for name, memory in zip(names, measured.memory, strict=True)
    ]
    return f"reserved over {len(measured.seconds)} steps: {'; '.join(parts)}"


def result(rows: Sequence[BenchRow], device: torch.device, others: Mapping[str, str]) -> BenchResult:
    """The rows with where and with what they were measured. `others`: versions of what else was."""
    versions = {
        "weightsync": own_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "zeromq": zmq.zmq_version(),
        "linux": ".".join(platform.release().split(".")[:2]),
    }
    return BenchResult(
        hardware=hardware(device), versions={**versions, **others}, date=datetime.date.today(), rows=rows
    )


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}"
    name = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    memory = format_bytes(psutil.virtual_memory().total)
    return f"{name}, {len(psutil.Process().cpu_affinity() or [])} cores, {memory} of memory"


def table(rows: Sequence[BenchRow]) -> str:
    """Aligned columns, a line a row, and the notes below."""
    cells = [["MODEL", "TRANSPORT", "MODE", "BYTES", "TENSORS", "MS", "GB/S", "OF A COPY", "GROWTH", "PEAK", ""]]
    notes: list[str] = []
    for row in rows:
        mark = ""
        if row.note:
            notes.append(row.note)
            mark = f"[{len(notes)}]"
        digests = ", digests" if row.name.endswith("with digests") else ""
        cells.append([
            row.model,
            f"{row.peer}, {row.transport}" if row.peer else row.transport,
            row.mode + digests,
            format_bytes(row.bytes),
            str(row.tensors),
            f"{row.milliseconds:.3f}",
            f"{row.gigabytes_per_second:.2f}",
            f"{row.ratio_to_copy:.2f}",
            format_delta(row.reserved_growth_bytes),
            format_delta(row.reserved_peak_bytes),
            mark,
        ])  # fmt: skip
    right = {"BYTES", "TENSORS", "MS", "GB/S", "OF A COPY", "GROWTH", "PEAK"}
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = [
        "   ".join(
            cell.rjust(width) if title in right else cell.ljust(width)
            for cell, width, title in zip(line, widths, cells[0], strict=True)
        ).rstrip()
        for line in cells
    ]
    return "\n".join([*lines, *(f"[{number}] {note}" for number, note in enumerate(notes, 1))])


def rates(nbytes: int, seconds: float, copy: float) -> dict[str, float]:
    """A row's fields of time. `copy`: seconds of one flat copy of the same bytes."""
    return {
        "milliseconds": round(seconds * 1e3, 4),
        "gigabytes_per_second": round(nbytes / seconds / 1e9, 3),
        "ratio_to_copy": round(copy / seconds, 4),
    }
