"""Two GPUs: NCCL and the mapped route at the wire's speed, beside raw ncclBroadcast and vLLM's packed broadcast.

    python benchmarks/gpu2.py [--model MODEL ...] [--steps N] [--soak N] [--output FILE]

Each step is a whole one, by the library: Sender and Receiver in two processes, a GPU each, control messages included,
weights into the receiver's own parameters, every byte compared after the last. Needs `peers.py fetch` before.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import peer_runs
import peers
import plain_nccl
import torch
from measure import Other, serve
from weightsync_agent.bench.baseline import copy_times
from weightsync_agent.bench.case import Case
from weightsync_agent.bench.progress import Progress
from weightsync_agent.bench.rows import result, table
from weightsync_agent.bench.run import Plan, run
from weightsync_agent.cuda.nccl import library
from weightsync_api.bench_result import BenchRow
from weightsync_api.v1alpha1.spec import TransferMode

MODELS = ("qwen3-0.6b", "qwen3-4b", "qwen3-30b-a3b")
OUTPUT = Path(__file__).parent / "results" / "nccl-h200x2.json"
GIB = 1 << 30
RAW_REPEATS = 20
BUCKET_BYTES = 256 << 20
SLOTS = 2
DEVICES = (torch.device("cuda", 0), torch.device("cuda", 1))


def _raw_receiver(pipe: Connection, identity: bytes) -> None:
    torch.cuda.set_device(1)
    data = torch.zeros(GIB, dtype=torch.uint8, device="cuda")
    pipe.send("ready")
    group = plain_nccl.PlainGroup(identity, 1, 2)

    def broadcasts() -> bool:
        for _ in range(RAW_REPEATS + 3):
            group.broadcast(data, 0)
        torch.cuda.synchronize()
        return bool((data == 7).all())

    serve(pipe, {"broadcasts": broadcasts})
    group.close()


def raw() -> BenchRow:
    """One ncclBroadcast of 1 GiB after the other, by the GPU's own clock: what any NCCL transport is measured by."""
    torch.cuda.set_device(0)
    identity = plain_nccl.new_id()
    data = torch.full((GIB,), 7, dtype=torch.uint8, device="cuda")
    with Other(_raw_receiver, identity) as other:
        other.hear()
        group = plain_nccl.PlainGroup(identity, 0, 2)
        other.say("broadcasts")
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(RAW_REPEATS + 4)]
        marks[0].record()
        for mark in marks[1:]:
            group.broadcast(data, 0)
            mark.record()
        if not other.hear():
            raise RuntimeError("the raw broadcast brought other bytes")
        torch.cuda.synchronize()
        times = [start.elapsed_time(end) for start, end in pairwise(marks[3:])]
        other.say("stop")
        group.close()
    del data
    torch.cuda.empty_cache()
    milliseconds, copy = statistics.median(times), statistics.median(copy_times(GIB, DEVICES[0], RAW_REPEATS))
    return BenchRow(
        name="ncclBroadcast of 1 GiB",
        transport="nccl",
        mode="raw",
        model="1x1GiB",
        bytes=GIB,
        tensors=1,
        receivers=1,
        milliseconds=round(milliseconds, 4),
        gigabytes_per_second=round(GIB / milliseconds / 1e6, 3),
        ratio_to_copy=round(copy * 1e3 / milliseconds, 4),
        reserved_growth_bytes=0,
        repeats=len(times),
        peer=f"NCCL {'.'.join(map(str, library().version))}",
        note="back to back, by events on the sender's GPU",
    )


def case(model: str, transport: str, mode: TransferMode, steps: int) -> Case:
    return Case(
        model=model, transport=transport, mode=mode, device=DEVICES[0], receiver_devices=DEVICES[1:],
        bucket_bytes=BUCKET_BYTES, slots=SLOTS, steps=steps, threads=torch.get_num_threads(),
    )  # fmt: skip


def rows(models: Sequence[str], steps: int, soak: int, progress: Progress) -> Iterator[BenchRow]:
    progress.head("raw ncclBroadcast")
    yield raw()
    for model in models:
        modes = (TransferMode.PACKED, TransferMode.DIRECT)
        # vLLM's run is in the midst of ours, so that both meet the same machine.
        ours = Plan(cases=[case(model, "nccl", mode, steps) for mode in modes], soak=False, peers=False)
        yield from run(ours, progress).rows
        progress.head(f"{model}: vLLM")
        yield peer_runs.vllm_nccl(model, ("cuda:0", "cuda:1"), steps)
        mapped = Plan(cases=[case(model, "ipc", TransferMode.DIRECT, steps)], soak=False, peers=False)
        yield from (_mapped(row) for row in run(mapped, progress).rows if row.peer is None)
    if soak:
        model = models[0]
        for transport, mode in (("nccl", TransferMode.PACKED), ("ipc", TransferMode.DIRECT)):
            plan = Plan(cases=[case(model, transport, mode, soak)], soak=True, peers=False)
            yield from (_mapped(row) for row in run(plan, progress).rows if row.peer is None)


def _mapped(row: BenchRow) -> BenchRow:
    """The sender's memory read over NVLink by the receiver's own copy plan: IPC to another GPU."""
    if row.transport != "ipc":
        return row
    return row.model_copy(update={"transport": "mapped", "name": row.name.replace("ipc", "mapped", 1)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help=f"repeatable; default: {', '.join(MODELS)}")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--soak", type=int, default=1000, help="steps of the soak at the first model; 0: none")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    if torch.cuda.device_count() < 2:
        parser.exit(2, f"this needs two GPUs, and {torch.cuda.device_count()} are visible\n")
    progress = Progress()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was measured until then is written
    found: list[BenchRow] = []
    try:
        for row in rows(options.model or MODELS, options.steps, options.soak, progress):
            found.append(row)
            progress.head(f"{row.name}: {row.gigabytes_per_second:.1f} GB/s, {row.milliseconds:.3f} ms")
    finally:
        # What was measured before a failure is told too.
        progress.end()
        others = peers.versions() | {"nccl": ".".join(map(str, library().version))}
        made = result(found, DEVICES[0], others)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(made.model_dump_json(indent=2) + "\n")
        print(f"{made.hardware}; torch {torch.__version__}\n{table(made.rows)}")


if __name__ == "__main__":
    main()
