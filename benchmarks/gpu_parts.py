"""The GPU's parts alone, in one process: copy plans and digests against one device copy of the same bytes.

    python benchmarks/gpu_parts.py [MODEL ...]

Prints GB/s of weights (median of 20), the host's time of one call, and what the tables cost to build.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
from weightsync_agent.cuda.copy_plan import DeviceCopyPlan
from weightsync_agent.cuda.digest import DeviceDigest
from weightsync_agent.cuda.export import ExportLedger
from weightsync_agent.cuda.importer import TorchImport
from weightsync_agent.sources.shapes import shapes

REPEATS = 20


def milliseconds(work: Callable[[], object]) -> float:
    """Median device time of one call, after 3 to warm up."""
    times = []
    for repeat in range(REPEATS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def host_microseconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def weights(model: str, device: torch.device) -> list[torch.Tensor]:
    made = [torch.empty(shape, dtype=torch.bfloat16, device=device) for _, shape in shapes(model)]
    for tensor in made:
        tensor.view(-1).view(torch.int16).random_(-(1 << 15), 1 << 15)
    return made


def bench(model: str, device: torch.device) -> None:
    sources = weights(model, device)
    targets = [torch.empty_like(tensor) for tensor in sources]
    nbytes = sum(tensor.numel() * 2 for tensor in sources)
    print(f"{model}: {len(sources)} tensors, {nbytes / 1e9:.2f} GB")

    def row(name: str, work: Callable[[], object], note: str = "") -> None:
        taken = milliseconds(work)
        print(f"  {name:34s} {taken:8.3f} ms {nbytes / taken / 1e6:7.0f} GB/s {note}", flush=True)

    start = time.perf_counter()
    plan = DeviceCopyPlan.of_tensors(list(zip(sources, targets, strict=True)), device)
    torch.cuda.synchronize()
    built = time.perf_counter() - start
    row("copy plan", plan.run, f"built in {built * 1e3:.0f} ms, {plan.rows} rows, {plan.table_bytes >> 20} MiB")
    print(f"  {'copy plan, host':34s} {host_microseconds(plan.run):8.1f} us")
    assert all(
        torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(sources[:50], targets[:50], strict=True)
    )
    for limit in (32, 132, 528):
        plan.grid_limit = limit
        plan.warm()
        row(f"copy plan, {limit} programs", plan.run)
    start = time.perf_counter()
    digest = DeviceDigest.of_tensors(targets, device)
    torch.cuda.synchronize()
    row("digest", digest.run, f"built in {(time.perf_counter() - start) * 1e3:.0f} ms")
    assert digest.bytes() == DeviceDigest.of_tensors(sources, device).bytes()
    exports(sources, device)
    row("torch._foreach_copy_", lambda: torch._foreach_copy_(targets, sources))


def open_all(connection: Connection) -> None:
    torch.zeros(1, device="cuda")
    connection.send(None)
    handles = connection.recv()
    start = time.perf_counter()
    opened = [TorchImport(handle, 0) for handle in handles]
    connection.send(time.perf_counter() - start)
    start = time.perf_counter()
    for one in opened:
        one.close()
    connection.send(time.perf_counter() - start)


def exports(tensors: list[torch.Tensor], device: torch.device) -> None:
    """What joining costs with torch's handles, into another process."""
    ledger = ExportLedger(device, limit_bytes=0)
    start = time.perf_counter()
    handles, _ = ledger.export_all(tensors)
    exported = time.perf_counter() - start
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    other = context.Process(target=open_all, args=(theirs,), daemon=True)
    other.start()
    answers = []
    for _ in range(3):
        if not ours.poll(60):
            raise SystemExit("the other process does not answer")
        answers.append(ours.recv())
        if len(answers) == 1:
            ours.send(handles)
    other.join(30)
    print(
        f"  torch handles: {len(handles)}, exported in {exported * 1e3:.0f} ms, opened in {answers[1] * 1e3:.0f} ms, "
        f"released in {answers[2] * 1e3:.0f} ms, unreleased {ledger.unreleased}, stranded {ledger.retire_all()}",
        flush=True,
    )


def main() -> None:
    device = torch.device("cuda", 0)
    print(torch.cuda.get_device_name(device), torch.__version__)
    big = torch.randint(0, 256, (8 << 30,), dtype=torch.uint8, device=device)
    other = torch.empty_like(big)
    copy = milliseconds(partial(other.copy_, big))
    print(f"one device copy of 8 GiB: {big.numel() / copy / 1e6:.0f} GB/s")
    del big, other
    for model in sys.argv[1:] or ["qwen3-0.6b", "qwen3-4b", "qwen3-30b-a3b"]:
        torch.cuda.empty_cache()
        bench(model, device)


if __name__ == "__main__":
    main()
