"""What the benchmarks of other projects' transfers share: weights, another process, repeated steps, and rows."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from weightsync_agent.bench.baseline import copy_times
from weightsync_agent.bench.models import allocate, fill, manifest_of
from weightsync_agent.digest import combine, tensor_digests
from weightsync_agent.memory import meter_for
from weightsync_api.bench_result import BenchRow

WARMUPS = 3
COPIES = 12
EXPONENT_TOP = 0x4000
"""bfloat16's: where it is 0, a value is below 2, and finite."""
ANSWER_SECONDS = 300
"""A step of 61 GB between sockets takes seconds; making its weights takes as long."""


def make_weights(model: str, device: torch.device | str, *, random: bool) -> dict[str, torch.Tensor]:
    """A model's tensors, each an allocation of its own as a framework makes them; all equal where not `random`."""
    made = allocate(manifest_of(model), torch.device(device))
    if random:
        fill(made, 1)
        for tensor in made.values():
            # No NaN among them: torch._foreach_copy_, by which a peer's tensors reach the parameters, goes through
            # float32 and gives each NaN the same bits.
            tensor.view(torch.int16).bitwise_and_(~EXPONENT_TOP)
    return made


def checksum(weights: Mapping[str, torch.Tensor]) -> int:
    """One number over all bytes and their places, by the project's digest; on whichever device they are."""
    return combine(digests(weights))


def digests(weights: Mapping[str, torch.Tensor]) -> bytes:
    """8 bytes a tensor, in order."""
    tensors = list(weights.values())
    if tensors and tensors[0].is_cuda:
        from weightsync_agent.cuda.digest import DeviceDigest

        return DeviceDigest.of_tensors(tensors, tensors[0].device).bytes()
    return tensor_digests(tensors)


class Memory:
    """Largest growth and peak of reserved memory over measured steps, against the model's own bytes before."""

    def __init__(self, device: torch.device) -> None:
        """Call with the weights made and nothing else."""
        self._meter = meter_for(device, lambda: 0)
        self.base = self._meter.after().reserved_before
        self._first = 0
        self.growth = 0
        self.peak = 0

    def before(self) -> None:
        self._meter.before()

    def after(self, measured: bool) -> None:
        sample = self._meter.after()
        self.peak = max(self.peak, sample.peak - self.base)
        if not measured or not self._first:
            self._first = sample.reserved_after
        self.growth = max(self.growth, sample.reserved_after - self._first)


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
        self.pipe.close()
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
    peer: str | None
    note: str
    seconds: list[float] = field(default_factory=list)

    def row(self, device: torch.device, growth: int, peak: int) -> BenchRow:
        """Measures one copy of the same bytes too; call with nothing else on the device."""
        manifest = manifest_of(self.model)
        copy, median = statistics.median(copy_times(manifest.nbytes, device, COPIES)), statistics.median(self.seconds)
        return BenchRow(
            name=self.name,
            transport=self.transport,
            mode=self.mode,
            model=self.model,
            bytes=manifest.nbytes,
            tensors=len(manifest.tensors),
            receivers=1,
            milliseconds=round(median * 1e3, 4),
            gigabytes_per_second=round(manifest.nbytes / median / 1e9, 3),
            ratio_to_copy=round(copy / median, 4),
            reserved_growth_bytes=max(0, growth),
            reserved_peak_bytes=max(0, peak),
            repeats=len(self.seconds),
            peer=self.peer,
            note=self.note,
        )


def repeat(step: Callable[[bool], None], repeats: int) -> list[float]:
    """Times of the measured steps, in seconds. `step` gets whether it counts."""
    seconds = []
    for number in range(WARMUPS + repeats):
        began = time.perf_counter()
        step(number >= WARMUPS)
        if number >= WARMUPS:
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
