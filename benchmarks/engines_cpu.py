"""The CPU: a running vLLM brought up to date by ours, and by its own reload from disk, in turns within one engine.

    python benchmarks/engines_cpu.py [--model MODEL ...] [--steps N] [--output FILE]

With the interpreter of an environment that has vLLM (tests/engines/install.sh vllm). Twice for each model: with weights
that stay as they are, as on a GPU, so that ours goes by the plan, and with those that vLLM's CPU build packs, so that
ours goes through the engine's loaders too. Afterwards both must have made the engine say the same.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from engines_gpu import Runner, copy_seconds
from weightsync_agent.bench.rows import rates, result, table
from weightsync_api.bench_result import BenchRow

OUTPUT = Path(__file__).parent / "results" / "engines-cpu.json"
MODELS = ("tiny", "small")


def rows(case: dict[str, Any], plain: bool, copy: float) -> Iterator[BenchRow]:
    ours, reload = case["seconds"]["ours"], case["seconds"]["reload"]
    ratio = sorted(theirs / mine for theirs, mine in zip(reload, ours, strict=True))
    kept = "weights kept as they are" if plain else "weights packed by the engine"
    tokens = {
        k: f"greedy tokens {'equal' if right else 'DIFFER from'} a fresh engine's" for k, right in case["right"].items()
    }
    notes = {
        "ours": f"{kept}; {'by plan, proven' if case['proven'] else 'layer by layer'}; pause, cache reset and resume "
        f"included; the reload takes {statistics.median(ratio):.1f} times as long in the middle of {len(ratio)} turns, "
        f"{ratio[0]:.1f} to {ratio[-1]:.1f} in all; {tokens['ours']}",
        "reload": f"{kept}; the file in the page cache; the cache reset included; {tokens['reload']}",
    }
    for kind, seconds in (("ours", ours), ("reload", reload)):
        median = statistics.median(seconds)
        how = "Direct" if case["in_place"] else "layer by layer"
        yield BenchRow(
            name=f"vLLM engine over LLM {case['model']}, {'weightsync' if kind == 'ours' else 'reload from disk'}",
            transport="shm" if kind == "ours" else "file",
            mode=f"{how if kind == 'ours' else 'reload_weights'}, {'plain' if plain else 'packed'}",
            model=case["model"],
            bytes=case["bytes"],
            tensors=case["tensors"],
            receivers=1,
            **rates(case["bytes"], median, copy),
            reserved_growth_bytes=max(case["held"][kind]) - case["held"][kind][0],
            repeats=len(seconds),
            peer=None if kind == "ours" else f"vLLM {case['vllm']}",
            note=notes[kind],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help=f"repeatable; default: {', '.join(MODELS)}")
    parser.add_argument("--steps", type=int, default=30, help="measured turns")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    made: list[BenchRow] = []
    version = ""
    with tempfile.TemporaryDirectory(prefix="weightsync-engines-") as folder:
        for model in options.model or MODELS:
            for plain in (True, False):
                case = Runner("cpu", Path(folder), plain=plain).beside([("reload", options.steps)], model)["reload"]
                if "error" in case:
                    sys.exit(1)
                version = case["vllm"]
                made += rows(case, plain, copy_seconds(case["bytes"], "cpu"))
    told = result(made, torch.device("cpu"), {"vllm": version})
    options.output.write_text(told.model_dump_json(indent=2) + "\n")
    print(f"{told.hardware}; torch {torch.__version__}\n{table(told.rows)}", flush=True)


if __name__ == "__main__":
    main()
