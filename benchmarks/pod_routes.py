"""Which way the bytes go between pods of one node, and how fast: namespaces, devices and environment as in Kubernetes.

    python benchmarks/pod_routes.py [--case CASE ...] [--model MODEL] [--steps N] [--output FILE] [--cpu]

Needs root, unshare and two GPUs. Each case is a WeightSync; its pods are what the operator plans for it, and run the
agents in namespaces of their own, each pod with the device nodes of its own GPUs only. The last case is one that is
never planned: it shows that the agents refuse it in a sentence. --cpu: a rehearsal without GPUs, over the same pods.

Exit codes: 0 as it should be; 1 a case failed, went another way, or was below its goal; 2 this machine can't.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pod_agent import WARMUPS, Measured
from pod_namespaces import NamespaceError, Running, connect, why_not
from pod_plan import Placed, PlanError, place, resource
from weightsync_agent.bench.models import manifest_of
from weightsync_agent.bench.rows import result, table
from weightsync_api.bench_result import BenchResult, BenchRow
from weightsync_api.reports import Report
from weightsync_api.v1alpha1 import Condition, ConditionType, WeightSyncStatus
from weightsync_operator.status import condition, next_status

OUTPUT = Path(__file__).parent / "results" / "pod-routes-h200x2.json"
CASE_SECONDS = 90.0
OTHERS_SECONDS = 10.0
"""How long the other pods have once one has failed."""
NCCL_HOSTID = "one-host"


@dataclass(frozen=True)
class Case:
    """A WeightSync between two GPUs of one node, and what should come of it."""

    key: str
    spec: Mapping[str, Any]
    model: str
    """That it is measured with unless told otherwise."""
    goal: float
    """GB/s that it should reach; 0: it should be refused."""
    routes: tuple[str, ...]
    """What the route starts with."""
    optimal: tuple[str, str]
    """Status and reason of TransportOptimal."""
    cpu_route: str
    change: Mapping[str, str] = field(default_factory=dict)
    """After the plan, what an operator would not do."""


HOST = {"placement": "Dedicated", "network": {"sharedMemory": "Host"}}
CASES = (
    Case("node-ipc", {"placement": "Node"}, "qwen3-4b", 365, ("P2P/Mapped",), ("True", "Fast"), "SharedMemory"),
    Case("node-nccl", {"placement": "Node", "transport": "NCCL"}, "qwen3-4b", 355, ("P2P/",), ("True", "Fast"), "Gloo"),
    Case("dedicated-host", HOST, "qwen3-0.6b", 45, ("SHM/",), ("False", "HostMemory"), "Gloo"),
    Case("dedicated", {"placement": "Dedicated"}, "qwen3-0.6b", 12, ("NET/Socket",), ("False", "Sockets"), "Gloo"),
    Case(
        "host-id-without-its-nodes", HOST, "64x1MiB", 0, (), ("Unknown", "NotMeasured"), "",
        change={"NCCL_HOSTID": NCCL_HOSTID, "NCCL_P2P_DISABLE": "", "NCCL_CUMEM_HOST_ENABLE": ""},
    ),
)  # fmt: skip
REFUSAL = f"NCCL_HOSTID is '{NCCL_HOSTID}' in ranks 0, 1"


@dataclass
class Outcome:
    """What came of a case."""

    case: Case
    row: BenchRow
    route: str
    optimal: Condition
    wrong: list[str] = field(default_factory=list)
    """Sentences, where it is not as it should be."""


class CaseError(Exception):
    """A case did not come to its end; the text has the agents' own words."""


def run(case: Case, model: str, steps: int, *, cpu: bool = False) -> Outcome:
    """Runs one case to its end or CASE_SECONDS. Raises CaseError, PlanError, NamespaceError; leaves no process."""
    device = "cpu" if cpu else "cuda"
    transfer = {
        "joinTimeoutSeconds": 60, "ackTimeoutSeconds": 30, "stepTimeoutSeconds": 60,
        "verify": {"mode": "Digest", "everySteps": WARMUPS + steps + 1},
    }  # fmt: skip
    ws = resource({**case.spec, "transfer": transfer}, [model, str(steps), device])
    with tempfile.TemporaryDirectory(prefix="weightsync-pods-") as name, ExitStack() as pods:
        directory = Path(name)
        placed = place(ws, directory, networks=True, cpu=cpu, change=case.change)
        running = [pods.enter_context(Running(pod, directory)) for pod in placed.pods]
        network = "a network each"
        if not placed.pods[0].address:
            network = "one container"
        else:
            try:
                connect(*running)
            except OSError as error:
                # This kernel has no veth: the same pods, on the machine's network.
                print(f"  {error}: the pods share the machine's network", flush=True)
                pods.close()
                network = "one network, as this kernel has no veth"
                again = directory / "again"
                again.mkdir()
                placed = place(ws, again, networks=False, cpu=cpu, change=case.change)
                running = [pods.enter_context(Running(pod, again)) for pod in placed.pods]
        for one in running:
            one.go()
        _wait(running, case)
        said = "\n".join(one.tail() for one in running)
        if not case.goal:
            return _refused(case, placed, model, said)
        measured = Measured.model_validate_json(running[0].out.read_text().splitlines()[-1])
    return _outcome(case, placed, measured, model, network, cpu)


def _wait(running: Sequence[Running], case: Case) -> None:
    """Until all pods have ended. Raises CaseError where one failed, unless that is what the case is for."""
    until, shown, failed = time.monotonic() + CASE_SECONDS, time.monotonic(), False
    while any(one.process.poll() is None for one in running):
        now = time.monotonic()
        if not failed and any(one.process.poll() not in (None, 0) for one in running):
            failed, until = True, min(until, now + OTHERS_SECONDS)
        if now > until:
            break
        if now - shown > 5:
            shown = now
            print(f"  {until - now:.0f} s left", flush=True)
        time.sleep(0.05)
    codes = [one.process.poll() for one in running]
    if (any(codes) and case.goal) or None in codes:
        for one in running:
            one.end()
        told = "\n".join(f"--- {one.pod.name}:\n{one.tail()}" for one in running)
        raise CaseError(f"exit codes {codes} (None: still running after {CASE_SECONDS:g} s)\n{told}")


def _optimal(placed: Placed, report: Report | None) -> Condition:
    now = datetime.datetime.now(datetime.UTC)
    status = next_status(placed.resource, placed.plan, placed.observed(), report, now, WeightSyncStatus())
    found = condition(status, ConditionType.TRANSPORT_OPTIMAL)
    assert found is not None
    return found


def _outcome(case: Case, placed: Placed, measured: Measured, model: str, network: str, cpu: bool) -> Outcome:
    report, manifest = measured.report, manifest_of(model)
    optimal, seconds = _optimal(placed, report), statistics.median(measured.seconds)
    rate = manifest.nbytes / seconds / 1e9
    routes, verdict = ((case.cpu_route,), ("True", "CPUDevice")) if cpu else (case.routes, case.optimal)
    pods = placed.pods
    visible = ", ".join(f"{pod.name} sees GPU {' and '.join(map(str, pod.gpus))}" for pod in pods)
    memory = "the host's IPC namespace and /dev/shm" if pods[0].host_ipc else "an IPC namespace and /dev/shm each"
    planned = sorted(f"{k}={v}" for k, v in pods[0].env.items() if k.startswith("NCCL_"))
    note = [f"route {report.route}", f"TransportOptimal {optimal.status} ({optimal.reason})", network]
    note += [memory] if len(pods) > 1 else []
    note += [visible, *planned]
    row = BenchRow(
        name=case.key,
        transport="gloo" if case.cpu_route == "Gloo" and cpu else "shm" if cpu else _transport(report),
        mode=report.mode,
        model=model,
        bytes=manifest.nbytes,
        tensors=len(manifest.tensors),
        receivers=1,
        milliseconds=round(seconds * 1e3, 4),
        gigabytes_per_second=round(rate, 3),
        ratio_to_copy=round(measured.copy_seconds / seconds, 4),
        reserved_growth_bytes=_growth(measured),
        repeats=len(measured.seconds),
        note="; ".join(note),
    )
    outcome = Outcome(case, row, report.route, optimal)
    if not report.route.startswith(routes):
        outcome.wrong.append(f"the route is {report.route}, not {' or '.join(routes)}")
    if (optimal.status, optimal.reason) != verdict:
        outcome.wrong.append(f"TransportOptimal is {optimal.status} ({optimal.reason}): {optimal.message}")
    if row.reserved_growth_bytes and not cpu:
        outcome.wrong.append(f"reserved memory grew by {row.reserved_growth_bytes} bytes")
    return outcome


def _transport(report: Report) -> str:
    return "mapped" if report.route == "P2P/Mapped" else report.transport.lower()


def _growth(measured: Measured) -> int:
    """Most that an agent's reserved memory was above that of its first measured step."""
    steps = measured.report.steps[-len(measured.seconds) - 1 : -1]
    series = [[step.memory.reserved_after for step in steps]]
    series.append([row.memory.reserved_after for step in steps for row in step.receivers])
    return max(max(values) - values[0] for values in series)


def _refused(case: Case, placed: Placed, model: str, said: str) -> Outcome:
    manifest, optimal = manifest_of(model), _optimal(placed, None)
    sentence = next((line for line in said.splitlines() if REFUSAL in line), "")
    row = BenchRow(
        name=case.key, transport="nccl", mode="Refused", model=model, bytes=manifest.nbytes,
        tensors=len(manifest.tensors), receivers=1, milliseconds=0, gigabytes_per_second=0, ratio_to_copy=0,
        reserved_growth_bytes=0, note=f"not planned, and refused by the agents: {sentence}",
    )  # fmt: skip
    outcome = Outcome(case, row, "", optimal)
    if not sentence:
        outcome.wrong.append(f"no sentence says why NCCL can't work: {said}")
    return outcome


def below_goal(outcome: Outcome) -> str:
    """A sentence where the rate is below the case's goal; empty otherwise."""
    rate, goal = outcome.row.gigabytes_per_second, outcome.case.goal
    return f"{rate:.1f} GB/s is below the goal of {goal:g}" if rate < goal else ""


def merged(path: Path, new: BenchResult) -> BenchResult:
    """The file's rows, with the new ones in place of those of their name and model."""
    names = {row.name for row in new.rows}
    old = BenchResult.model_validate_json(path.read_bytes()).rows if path.exists() else []
    order = [case.key for case in CASES]
    rows = [row for row in old if row.name not in names] + list(new.rows)
    return new.model_copy(update={"rows": sorted(rows, key=lambda row: order.index(row.name))})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    keys = [case.key for case in CASES]
    parser.add_argument("--case", action="append", choices=keys, help="repeatable; default: all")
    parser.add_argument("--model", help="for all cases; default: each case's own")
    parser.add_argument(
        "--steps", type=int, choices=range(1, 61), default=8, metavar="N", help="measured steps; default: 8"
    )
    parser.add_argument("--output", type=Path, help=f"merged into; default: {OUTPUT.name}, none with --cpu")
    parser.add_argument("--cpu", action="store_true", help="tensors on CPUs, through the same pods")
    options = parser.parse_args()
    if reason := why_not():
        parser.exit(2, f"{reason}\n")
    if not options.cpu and torch.cuda.device_count() < 2:
        parser.exit(2, f"this needs two GPUs, and {torch.cuda.device_count()} are visible\n")
    chosen = [case for case in CASES if case.key in (options.case or keys) and (case.goal or not options.cpu)]
    rows: list[BenchRow] = []
    bad = 0
    for case in chosen:
        model, began = options.model or ("64x1MiB" if options.cpu else case.model), time.monotonic()
        print(f"{case.key}: {model}", flush=True)
        try:
            outcome = run(case, model if case.goal else case.model, options.steps, cpu=options.cpu)
        except (CaseError, PlanError, NamespaceError) as error:
            bad += 1
            print(f"  FAILED after {time.monotonic() - began:.0f} s: {error}", flush=True)
            continue
        row = outcome.row
        rows.append(row)
        print(f"  {row.gigabytes_per_second:.1f} GB/s, {row.note} [{time.monotonic() - began:.0f} s]", flush=True)
        wrong = [*outcome.wrong, *([goal] if (goal := below_goal(outcome)) and not options.cpu else [])]
        for sentence in wrong:
            print(f"  WRONG: {sentence}", flush=True)
        bad += bool(wrong)
    if rows:
        made = result(rows, torch.device("cpu" if options.cpu else "cuda"), {} if options.cpu else _nccl_version())
        output = options.output or (None if options.cpu else OUTPUT)
        if output is not None:
            made = merged(output, made)
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(made.model_dump_json(indent=2) + "\n")
        print(f"{made.hardware}; torch {torch.__version__}\n{table(made.rows)}")
    return 1 if bad else 0


def _nccl_version() -> dict[str, str]:
    from weightsync_agent.cuda.nccl import library

    return {"nccl": ".".join(map(str, library().version))}


if __name__ == "__main__":
    sys.exit(main())
