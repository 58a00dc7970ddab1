"""One measured case: a real Sender in this process, receivers in processes of their own, and whole steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from weightsync_api.agent_config import AgentConfig
from weightsync_api.reports import MemorySample, StepReport
from weightsync_api.v1alpha1.spec import Device, TransferMode, Transport, Verify, VerifyMode

from ..deadline import Deadline
from ..memory import meter_for
from ..sender import Sender
from ..transport import make_arena
from .models import allocate, fill, manifest_of
from .processes import START_SECONDS, Other
from .scratch import scratch
from .series import Series
from .tasks import ReceiverReady, ReceiverTask

WARMUPS = 3
SOAK_WARMUPS = 100
"""The sender keeps its last 64 reports, and until then its memory grows with them."""
JOIN_SECONDS = 60.0
"""The receivers' processes are up when the sender starts: only to map memory is left."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """What is measured."""

    model: str
    transport: str
    """shm, gloo, ipc or nccl."""
    mode: TransferMode
    device: torch.device
    receiver_devices: tuple[torch.device, ...]
    """One a receiver."""
    bucket_bytes: int
    slots: int
    steps: int
    """Measured steps, after the warm-up."""
    threads: int
    """Of torch, in each process."""
    adopted: bool = True
    """Direct mode: the weights lie in an arena. False: each an allocation of its own that a torch handle exports."""
    push: bool = True
    """On one GPU: the sender may write into the receivers' tensors. False: each receiver copies for itself."""
    verify: bool = False
    """Digests in every step. Otherwise in the first, and in one after the last that is measured."""
    warmups: int = WARMUPS
    touched_by: Literal["Kernel", "Copy"] = "Kernel"
    """How the weights change before a step, on a GPU: by a kernel, as a trainer does it, or by its copy engine, with
    no kernel of the sender's right before the step."""

    @property
    def agent_transport(self) -> Transport:
        return Transport.IPC if self.transport in ("shm", "ipc") else Transport.NCCL


@dataclass
class Memory:
    """One process's reserved memory over the measured steps, in bytes."""

    base: int
    """With the weights and nothing else."""
    reserved: Series
    """After each measured step."""
    peak: int = 0

    def take(self, sample: MemorySample, measured: bool) -> None:
        self.peak = max(self.peak, sample.peak)
        if measured:
            self.reserved.append(sample.reserved_after)

    @property
    def growth(self) -> int:
        """Most that it was above the first measured step's."""
        return round(max(self.reserved) - self.reserved[0]) if self.reserved else 0

    @property
    def slope(self) -> float:
        """Bytes a step, by least squares over the measured steps."""
        return slope(self.reserved)


@dataclass
class Measured:
    """What came of a case."""

    mode: str
    """Direct or Packed: what the sender took."""
    nbytes: int
    tensors: int
    seconds: Sequence[float]
    memory: list[Memory]
    """By rank, the sender's first."""
    route: str
    join_seconds: float = 0.0
    """Of the slowest receiver: from its Hello to its admission, memory mapped, plans built and self-test passed."""


def measure(case: Case, progress: Progress, between: Callable[[], None] = lambda: None) -> Measured:
    """Runs the case. `between` is called before each measured step, for what is measured beside it.

    Raises BenchError, StepFailed, JoinTimeout, ConfigError, TransportError; leaves no process and no memory.
    """
    manifest = manifest_of(case.model)
    with scratch() as directory, ExitStack() as ends:
        config = _config(case, directory)
        arena = None
        if case.mode != TransferMode.PACKED and case.adopted:
            arena = make_arena(case.device, manifest.arena_bytes)
            ends.callback(arena.close)
        weights = allocate(manifest, case.device, arena.tensor() if arena is not None else None)
        ends.callback(weights.clear)
        fill(weights, 0)
        progress(f"starting {len(case.receiver_devices)} receiver(s)")
        receivers = [ends.enter_context(_start(case, config, rank)) for rank in range(1, config.receivers + 1)]
        ready = Deadline(START_SECONDS)
        bases = [ReceiverReady.model_validate_json(r.line(ready)).reserved_bytes for r in receivers]
        arena_bytes = arena.nbytes if arena is not None else 0
        meter = meter_for(case.device, lambda: arena_bytes)
        memory = [Memory(base, Series(case.steps)) for base in (meter.after().reserved_after, *bases)]
        meter.close()
        with Sender(weights, config=config, arena=arena) as sender:
            seconds = Series(case.steps)
            for number in range(case.warmups + case.steps):
                measured = number >= case.warmups
                if measured:
                    between()
                _touch(weights, number, case.touched_by)
                began = time.perf_counter()
                report = sender.step()
                taken = time.perf_counter() - began
                if measured:
                    seconds.append(taken)
                _note(memory, report, measured)
                progress(f"step {number + 1} of {case.warmups + case.steps}: {taken * 1e3:.3f} ms")
            # The proof that what was timed moves every byte: all of them anew, and compared.
            fill(weights, 1)
            if not sender.step().verified:
                raise AssertionError("the step after the last was not verified")
            state = sender.report()
            joins = max(agent.join_microseconds for agent in state.agents) / 1e6
    return Measured(state.mode, manifest.nbytes, len(manifest.tensors), seconds, memory, state.route, joins)


def slope(values: Sequence[float]) -> float:
    """Slope of the least-squares line through (0, v0), (1, v1), ...; 0 for fewer than two."""
    count = len(values)
    if count < 2:
        return 0.0
    middle, mean = (count - 1) / 2, sum(values) / count
    above = sum((x - middle) * (y - mean) for x, y in enumerate(values))
    return above / sum((x - middle) ** 2 for x in range(count))


def _start(case: Case, config: AgentConfig, rank: int) -> Other:
    task = ReceiverTask(
        config=config, rank=rank, model=case.model, device=str(case.receiver_devices[rank - 1]), threads=case.threads
    )
    return Other("weightsync_agent.bench.receiver", [task.model_dump_json()])


def _config(case: Case, directory: Path) -> AgentConfig:
    endpoint = f"ipc://{directory}/control"
    return AgentConfig(
        namespace="bench",
        name="bench",
        device=Device.CUDA if case.device.type == "cuda" else Device.CPU,
        transport=case.agent_transport,
        mode=case.mode,
        bucket_bytes=case.bucket_bytes,
        slots=case.slots,
        push=case.push,
        receivers=len(case.receiver_devices),
        join_timeout_seconds=JOIN_SECONDS,
        verify=Verify(mode=VerifyMode.DIGEST, every_steps=1 if case.verify else case.warmups + case.steps + 1),
        bind=endpoint,
        connect=endpoint,
        runtime_dir=str(directory),
    )


def _touch(weights: dict[str, torch.Tensor], step: int, by: Literal["Kernel", "Copy"]) -> None:
    """Another value in one tensor, so that no two steps carry the same weights; it is there when this returns."""
    tensors = list(weights.values())
    place = tensors[step % len(tensors)].view(-1)[:1]
    if by == "Copy" and place.is_cuda:
        place.copy_(torch.full((1,), step + 2.0, dtype=place.dtype).pin_memory())
    else:
        place.fill_(step + 2)
    if place.is_cuda:
        torch.cuda.synchronize(place.device)


def _note(memory: list[Memory], report: StepReport, measured: bool) -> None:
    memory[0].take(report.memory, measured)
    for part in report.receivers:
        memory[part.rank].take(part.memory, measured)
