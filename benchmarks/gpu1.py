"""One GPU: CUDA IPC against one copy of the same bytes, beside vLLM's packed IPC and verl's buckets, in one run.

    python benchmarks/gpu1.py [--model MODEL ...] [--steps N] [--soak N] [--no-peers] [--output FILE]

Each step is a whole one, by the library: Sender and Receiver in two processes on one GPU, weights into the receiver's
own parameters, every byte compared after the last. Needs `peers.py fetch` before.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import peers
import torch
from weightsync_agent.bench.case import Case, measure
from weightsync_agent.bench.progress import Progress
from weightsync_agent.bench.rows import result, table
from weightsync_agent.bench.run import Plan, run
from weightsync_api.bench_result import BenchRow
from weightsync_api.v1alpha1.spec import TransferMode

MODELS = ("qwen3-0.6b", "qwen3-4b", "qwen3-30b-a3b")
OUTPUT = Path(__file__).parent / "results" / "ipc-h200.json"
DEVICE = torch.device("cuda", 0)
BUCKET_BYTES, SLOTS = 256 << 20, 4
"""1 GiB of staging memory on the sender, none on the receiver."""


def case(model: str, mode: TransferMode, steps: int, *, adopted: bool = True) -> Case:
    return Case(
        model=model, transport="ipc", mode=mode, device=DEVICE, receiver_devices=(DEVICE,),
        bucket_bytes=BUCKET_BYTES, slots=SLOTS, steps=steps, threads=torch.get_num_threads(), adopted=adopted,
    )  # fmt: skip


def ways(model: str, steps: int) -> list[Case]:
    """Direct and Packed, each where the sender writes into the receiver's tensors, and where it does not."""
    both = (case(model, mode, steps) for mode in (TransferMode.DIRECT, TransferMode.PACKED))
    return [replace(made, push=push) for made in both for push in (True, False)]


def join(model: str, progress: Progress) -> BenchRow:
    """What joining takes with torch's handles of tensors allocated one by one; with an arena, a row's note has it."""
    found = measure(replace(case(model, TransferMode.DIRECT, 3, adopted=False), push=False), progress)
    return BenchRow(
        name=f"join {model} by torch handles",
        transport="ipc",
        mode="join",
        model=model,
        bytes=found.nbytes,
        tensors=found.tensors,
        receivers=1,
        milliseconds=round(found.join_seconds * 1e3, 3),
        gigabytes_per_second=0,
        ratio_to_copy=0,
        reserved_growth_bytes=0,
        repeats=1,
        note=f"once, from Hello to admission, over {found.route}",
    )


def rows(
    models: Sequence[str], steps: int, soak: int, with_peers: bool, brief: bool, progress: Progress
) -> Iterator[BenchRow]:
    for model in models:
        cases = ways(model, steps)
        if not brief:
            cases.insert(1, replace(cases[0], touched_by="Copy"))
        if not brief and model == models[-1]:
            # At the largest alone: their time goes by the bytes.
            cases.append(replace(cases[0], verify=True))
        yield from run(Plan(cases=cases, soak=False, peers=with_peers), progress).rows
    if not brief:
        yield join(models[-1], progress)
    if soak:
        for way in (ways(models[0], soak)[n] for n in (0, 3)):
            plan = Plan(cases=[way], soak=True, peers=False)
            yield from (row for row in run(plan, progress).rows if row.peer is None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help=f"repeatable; default: {', '.join(MODELS)}")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--soak", type=int, default=1000, help="steps of the soak at the first model; 0: none")
    parser.add_argument("--brief", action="store_true", help="no digests, no join by torch handles")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "this needs a GPU, and none is visible\n")
    progress = Progress()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was measured until then is written
    found: list[BenchRow] = []
    try:
        for row in rows(
            options.model or MODELS, options.steps, options.soak, not options.no_peers, options.brief, progress
        ):
            found.append(row)
            progress.head(f"{row.name}: {row.gigabytes_per_second:.1f} GB/s, {row.milliseconds:.3f} ms")
    finally:
        # What was measured before a failure is told too.
        progress.end()
        made = result(found, DEVICE, peers.versions())
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(made.model_dump_json(indent=2) + "\n")
        print(f"{made.hardware}; torch {torch.__version__}\n{table(made.rows)}")


if __name__ == "__main__":
    main()
