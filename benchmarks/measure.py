"""What every benchmark here shares: weights, another process, repeated steps, and rows of the project's one format."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from weightsync_agent.digest import combine, tensor_digests
from weightsync_agent.identity import own_version
from weightsync_agent.memory import meter_for
from weightsync_agent.sources.synthetic import shapes
from weightsync_api.bench_result import BenchResult, BenchRow

ANSWER_SECONDS = 300
"""A step of 61 GB between sockets takes seconds; making its weights takes as long."""

WARMUPS = 3

_MANY = re.compile(r"^(\d+)x(\d+)(B|KB|MB)$", re.IGNORECASE)
_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20}


def shapes_of(model: str) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes: a model's, or, for `18867x1KB`, as many bfloat16 vectors of that size."""
    found = _MANY.match(model)
    if found is None:
        return list(shapes(model))
    count, size = int(found[1]), int(found[2]) * _UNITS[found[3].upper()]
    return [(f"tensor.{number}", (size // 2,)) for number in range(count)]


def make_weights(model: str, device: torch.device | str, *, random: bool) -> dict[str, torch.Tensor]:
    """bfloat16 tensors of a model, each an allocation of its own as a framework makes them; else all zero."""
    made: dict[str, torch.Tensor] = {}
    block = torch.randint(-(1 << 15), 1 << 15, (1 << 20,), dtype=torch.int16).to(device) if random else None
    for name, shape in shapes_of(model):
        tensor = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        if block is not None:
            flat = tensor.view(-1).view(torch.int16)
            for start in range(0, flat.numel(), block.numel()):
                part = flat[start : start + block.numel()]
                part.copy_(block[: part.numel()]).add_(len(made))
        made[name] = tensor
    return made


def checksum(weights: Mapping[str, torch.Tensor]) -> int:
    """One number over all bytes and their places, by the project's digest; on whichever device they are."""
    tensors = list(weights.values())
    if tensors and tensors[0].is_cuda:
        from weightsync_agent.cuda.digest import DeviceDigest

        return combine(DeviceDigest.of_tensors(tensors, tensors[0].device).bytes())
    return combine(tensor_digests(tensors))


def synchronize(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def copy_seconds(nbytes: int, device: torch.device | str, largest: int = 8 << 30) -> float:
    """Seconds of one contiguous copy of so many bytes on the device, median; above `largest`, by its rate."""
    size = min(nbytes, largest)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    times = []
    for _ in range(12 if size > 1 << 24 else 200):
        synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - began)
    del source, target
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
    return statistics.median(times[2:]) * nbytes / size


@dataclass
class Memory:
    """Largest growth and peak of reserved memory over measured steps, against the model's own bytes before."""

    device: torch.device
    base: int = 0
    first: int = 0
    growth: int = 0
    peak: int = 0

    def start(self) -> None:
        """Call with the weights made and nothing else."""
        self._meter = meter_for(self.device, lambda: 0)
        self._meter.before()
        self.base = self._meter.after().reserved_before

    def before(self) -> None:
        self._meter.before()

    def after(self, measured: bool) -> None:
        sample = self._meter.after()
        self.peak = max(self.peak, sample.peak - self.base)
        if not measured or not self.first:
            self.first = sample.reserved_after
        self.growth = max(self.growth, sample.reserved_after - self.first)


class Other:
    """Another process that runs `main(pipe, *arguments)`; it answers in turn. Spawned, so that it shares nothing."""

    def __init__(self, main: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self._process: BaseProcess = context.Process(target=main, args=(there, *arguments), daemon=True)
        self._process.start()
        there.close()

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def say(self, *what: Any) -> None:
        self.pipe.send(what)

    def hear(self) -> Any:
        """Raises RuntimeError where nothing comes, EOFError where the process has ended."""
        if not self.pipe.poll(ANSWER_SECONDS):
            raise RuntimeError(f"the other process has said nothing for {ANSWER_SECONDS} s")
        return self.pipe.recv()

    def ask(self, *what: Any) -> Any:
        self.say(*what)
        return self.hear()


@dataclass
class Case:
    """What is measured, for its row."""

    name: str
    transport: str
    mode: str
    model: str
    peer: str | None = None
    note: str = ""
    receivers: int = 1
    seconds: list[float] = field(default_factory=list)

    def row(self, copy: float, growth: int, peak: int) -> BenchRow:
        """`copy`: seconds of one copy of the same bytes on the same device in the same run."""
        made = shapes_of(self.model)
        nbytes = sum(torch.Size(shape).numel() * 2 for _, shape in made)
        median = statistics.median(self.seconds)
        return BenchRow(
            name=self.name,
            transport=self.transport,
            mode=self.mode,
            model=self.model,
            bytes=nbytes,
            tensors=len(made),
            receivers=self.receivers,
            milliseconds=round(median * 1e3, 4),
            gigabytes_per_second=round(nbytes / median / 1e9, 3),
            ratio_to_copy=round(copy / median, 4),
            reserved_growth_bytes=max(0, growth),
            reserved_peak_bytes=max(0, peak),
            repeats=len(self.seconds),
            peer=self.peer,
            note=self.note,
        )


def repeat(step: Callable[[bool], None], repeats: int, warmups: int = WARMUPS) -> list[float]:
    """Times of the measured steps, in seconds. `step` gets whether it counts."""
    seconds = []
    for number in range(warmups + repeats):
        began = time.perf_counter()
        step(number >= warmups)
        if number >= warmups:
            seconds.append(time.perf_counter() - began)
    return seconds


def serve(pipe: Connection, answers: Mapping[str, Callable[..., Any]]) -> None:
    """The other process's loop: each word is answered by its function, until `stop`."""
    while True:
        try:
            word, *arguments = pipe.recv()
        except EOFError:
            return
        if word == "stop":
            return
        pipe.send(answers[word](*arguments))


def result(rows: Iterable[BenchRow], extra: Mapping[str, str]) -> BenchResult:
    """The rows with where and with what they were measured."""
    if torch.cuda.is_available():
        hardware = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    else:
        hardware = _processor()
    versions = {"weightsync": own_version(), "python": platform.python_version(), "torch": torch.__version__}
    return BenchResult(hardware=hardware, versions=versions | dict(extra), date=datetime.date.today(), rows=list(rows))


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def show(row: BenchRow) -> None:
    """A line for people, on stderr, so that stdout may be JSON."""
    who = row.peer or "weightsync"
    print(
        f"{who:16} {row.transport:7} {row.mode:8} {row.model:16} {row.milliseconds:10.3f} ms "
        f"{row.gigabytes_per_second:9.2f} GB/s {row.ratio_to_copy:7.3f} of a copy  "
        f"growth {row.reserved_growth_bytes >> 20} MiB  peak +{row.reserved_peak_bytes >> 20} MiB  {row.note}",
        file=sys.stderr,
        flush=True,
    )


def write(path: Path, made: BenchResult) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made.model_dump(mode="json"), indent=2) + "\n")
