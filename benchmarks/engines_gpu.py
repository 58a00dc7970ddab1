"""One GPU: real vLLM engines brought up to date by vLLM's own packed IPC and by ours, through `LLM` and over HTTP.

    python benchmarks/engines_gpu.py [--model MODEL ...] [--steps N] [--archive FILE] [--output FILE] [--add]

Each step is a whole one as the trainer sees it: engine and trainer are processes of their own on one GPU. Ours includes
pausing, resetting the prefix cache and resuming; vLLM's own does not, but over HTTP. Afterwards the engines must hold
the same bytes in all parameters, give the same greedy tokens, and equal a fresh engine that was started on them.

vLLM has to be installed, or `--archive` names a .tar.xz with it in `site/` and stand-ins in `stubs/`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from engine_models import manifest_of
from weightsync_agent.bench.rows import rates, result, table
from weightsync_api.bench_result import BenchResult, BenchRow
from weightsync_api.quantity import format_bytes

HERE = Path(__file__).parent
ROOT = HERE.parent
OUTPUT = HERE / "results" / "vllm-h200.json"
MODELS = ("qwen3-0.6b", "qwen3-4b", "qwen3-30b-a3b")
LARGE = 30e9
"""Bytes above which two engines don't fit beside each other, and no checkpoint is written for a fresh one."""
LIMIT_SECONDS = 400

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
    # The trainer's process has used the GPU: forking it would break the engine.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # For vLLM's own IPC handles alone, which are pickles; ours needs none.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0",
    "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1", "VLLM_LOGGING_LEVEL": "WARNING",
}  # fmt: skip


def unpack(archive: Path, directory: Path) -> list[str]:
    """Folders for PYTHONPATH."""
    if not (directory / "site").is_dir():
        with tarfile.open(archive) as packed:
            packed.extractall(directory, filter="tar")
        subprocess.run([sys.executable, "-m", "compileall", "-q", "-j", "16", str(directory / "site")], check=False)
    return [str(directory / "site"), str(directory / "stubs")]


def entry_point(directory: Path) -> str:
    """A folder that names the plugin as an installed package would: this runs from a source tree too."""
    info = directory / "plugin" / "weightsync_source-0.0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weightsync-source\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nweightsync_source = weightsync_agent.engines.vllm_plugin:register\n"
    )
    return str(info.parent)


class Runner:
    """`plain`: an engine on the CPU keeps its weights as they are, as on a GPU."""

    def __init__(self, device: str, directory: Path, archive: Path | None = None, *, plain: bool = False) -> None:
        self._device = device
        self._directory = directory
        paths = unpack(archive, directory) if archive else []
        paths += [entry_point(directory), str(HERE), *(str(ROOT / part) for part in ("agent", "crds", "operator"))]
        paths.append(str(ROOT / "tests" / "engines"))
        if plain:
            paths.append(str(ROOT / "tests" / "engines" / "plain_cpu"))
        self._path = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)

    def beside(self, kinds: list[tuple[str, int]], model: str) -> dict[str, dict[str, Any]]:
        """Runs cases beside each other. Gives what each measured; one that failed has its `error`."""
        up = self._directory / f"up-{time.monotonic_ns()}"
        with ThreadPoolExecutor(len(kinds)) as pool:
            futures = {kind: pool.submit(self._one, kind, model, steps, up, len(kinds)) for kind, steps in kinds}
            return {kind: future.result() for kind, future in futures.items()}

    def _one(self, kind: str, model: str, steps: int, up: Path, peers: int) -> dict[str, Any]:
        env = {
            **os.environ, **ENVIRONMENT, "PYTHONPATH": self._path, "BENCH_UP": str(up), "BENCH_PEERS": str(peers),
        }  # fmt: skip
        words = [sys.executable, str(HERE / "engine_case.py"), kind, model, str(steps), self._device]
        began = time.monotonic()
        log = self._directory / f"{kind}-{model}.log"
        with log.open("w") as out:
            process = subprocess.Popen([*words, str(self._directory)], env=env, stdout=out, stderr=out)
            try:
                process.wait(LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        text = log.read_text(errors="replace")
        for line in text.splitlines():
            if line.startswith("RESULT "):
                found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
                print(f"{kind} {model}: {time.monotonic() - began:.0f} s", flush=True)
                return found
        tail = [line for line in text.splitlines() if "Error" in line or 'File "' in line][-14:]
        print(f"{kind} {model} FAILED after {time.monotonic() - began:.0f} s\n" + "\n".join(t[:220] for t in tail))
        return {"kind": kind, "model": model, "error": tail[-1] if tail else "no result"}


def rows(model: str, found: dict[str, dict[str, Any]], copy: float) -> Iterator[BenchRow]:
    tokens = {kind: case.get("greedy") for kind, case in found.items() if "error" not in case}
    digests = {kind: case["digest"] for kind, case in found.items() if "digest" in case}
    for kind, case in found.items():
        if "seconds" not in case:
            continue
        others = [other for other in tokens if other != kind]
        proof = [
            f"greedy tokens equal those of {', '.join(o for o in others if tokens[o] == tokens[kind]) or 'no other'}",
            *(f"tokens DIFFER from {o}" for o in others if tokens[o] != tokens[kind]),
        ]
        if kind in digests:
            same = [o for o in digests if o != kind and digests[o] == digests[kind]]
            proof += [f"bytes equal those of {', '.join(same) or 'no other'}"]
            proof += [f"bytes DIFFER from {o}" for o in digests if o != kind and digests[o] != digests[kind]]
        yield _row(model, kind, case, copy, "; ".join(proof))


def _row(model: str, kind: str, case: dict[str, Any], copy: float, proof: str) -> BenchRow:
    median = statistics.median(case["seconds"])
    trainer, engine = case["trainer_reserved"], case["engine_reserved"]
    # The first step's growth is a start-up cost, told in the note; what comes after it leaks.
    growth = max(trainer[-1] - trainer[0], engine[-1] - engine[0])
    steps = max(1, len(trainer) - 1)
    notes = [
        f"over {len(trainer)} steps reserved grew by {format_bytes(max(0, trainer[-1] - trainer[0]))} in the trainer"
        f" ({format_bytes(max(0, (trainer[-1] - trainer[0]) // steps))} a step) and"
        f" {format_bytes(max(0, engine[-1] - engine[0]))} in the engine",
        proof,
    ]
    ours = kind.endswith("ours")
    if ours:
        how = "plan, proven" if case["in_place"] and case["proven"] else f"layer by layer: {case['reason']}"
        notes.insert(0, f"{how}; first step with the proof {case['first_seconds']:.2f} s; inside the worker "
                        f"{statistics.median(case['inside_seconds']) * 1e3:.3f} ms; pause, cache reset and resume "
                        "included")  # fmt: skip
    elif kind.startswith("http"):
        notes.insert(0, "pause, cache reset and resume included")
    where = "HTTP" if kind.startswith("http") else "LLM"
    return BenchRow(
        name=f"vLLM engine over {where} {model}, {'weightsync' if ours else 'vLLM packed IPC, 1 GiB'}",
        transport="ipc",
        mode=f"{'Direct' if ours else 'packed'} through {where}",
        model=model,
        bytes=case["bytes"],
        tensors=case["tensors"],
        receivers=1,
        **rates(case["bytes"], median, copy),
        reserved_growth_bytes=max(0, growth),
        repeats=len(case["seconds"]),
        peer=None if ours else f"vLLM {_vllm_version()}",
        note="; ".join(notes),
    )


_version = ""


def _vllm_version() -> str:
    return _version or "unknown"


def copy_seconds(nbytes: int, device: str) -> float:
    """One flat copy of the same bytes, in this run."""
    from weightsync_agent.bench.baseline import copy_times

    found = statistics.median(copy_times(nbytes, torch.device(device), 8))
    if device == "cuda":
        torch.cuda.empty_cache()
    return float(found)


def main() -> None:
    global _version
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help=f"repeatable; default: {', '.join(MODELS)}")
    parser.add_argument("--steps", type=int, default=100, help="measured steps of ours")
    parser.add_argument("--their-steps", type=int, default=8, help="of vLLM's own, which keeps 1 GiB a step")
    parser.add_argument("--archive", type=Path, help="a .tar.xz with vLLM, where it is not installed")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "weightsync-engines")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal without vLLM's own")
    parser.add_argument("--http", default="qwen3-0.6b", help="models that are measured over HTTP too, by commas")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--add", action="store_true", help="keep the output's rows of other models")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "this needs a GPU, and none is visible\n")
    options.directory.mkdir(parents=True, exist_ok=True)
    runner = Runner(options.device, options.directory, options.archive, plain=options.device == "cpu")
    theirs = options.device == "cuda"
    made: list[BenchRow] = []
    for model in options.model or MODELS:
        nbytes = manifest_of(model).nbytes
        copy = copy_seconds(nbytes, options.device)
        ours, own = ("ours", options.steps), ("theirs", options.their_steps if nbytes < LARGE else 3)
        found: dict[str, dict[str, Any]] = {}
        if nbytes > LARGE:
            groups = [[ours], [own]] if theirs else [[ours]]
        else:
            groups = [[ours, ("fresh", 0), *([own] if theirs else [])]]
        if model in options.http.split(","):
            groups.append([("http-ours", options.steps), *([("http-theirs", options.their_steps)] if theirs else [])])
        for group in groups:
            found |= runner.beside(group, model)
        for case in found.values():
            _version = case.get("vllm", _version)
        made += rows(model, found, copy)
        write(made, options)


def write(made: list[BenchRow], options: argparse.Namespace) -> None:
    """After every model, so that what was measured before a failure is told too."""
    kept: list[BenchRow] = []
    if options.add and options.output.exists():
        names = {row.name for row in made}
        before = BenchResult.model_validate_json(options.output.read_text())
        kept = [row for row in before.rows if row.name not in names]
    told = result([*kept, *made], torch.device(options.device), {"vllm": _vllm_version()})
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(told.model_dump_json(indent=2) + "\n")
    print(f"{told.hardware}; torch {torch.__version__}\n{table(told.rows)}", flush=True)


if __name__ == "__main__":
    main()
