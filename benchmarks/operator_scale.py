"""The operator with many WeightSyncs, on a real control plane: cold start, idle load, memory, status latency.

Pods are made by the real StatefulSet controller and never run; one process answers for all senders, each at a loopback
address of its own. Needs the programs that `tests/cluster/build.sh` makes.

    python benchmarks/operator_scale.py --resources 1000 --receivers 7
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests" / "cluster"), str(HERE.parent / "tests")]

from control_plane import ControlPlane, programs  # noqa: E402
from operator_process import MEMORY, OperatorProcess, eventually, manifest  # noqa: E402
from weightsync_api.crd import render  # noqa: E402
from weightsync_api.reports import AgentReport, AgentState, ReceiverStep, Report, StepReport  # noqa: E402
from weightsync_operator.kube_api import KubeApi  # noqa: E402
from weightsync_operator.plan import HTTP_PORT  # noqa: E402

NAMESPACE = "scale"
PARALLEL = 8


def name_of(number: int) -> str:
    return f"ws-{number:04d}"


def address_of(number: int) -> str:
    return f"127.9.{number // 250}.{number % 250 + 1}"


class Senders:
    """Answers `/report` for every sender, by the address that was asked."""

    def __init__(self, count: int, receivers: int) -> None:
        self.receivers = receivers
        self.steps: list[list[StepReport]] = [[] for _ in range(count)]
        self.news = [asyncio.Event() for _ in range(count)]

    def step(self, number: int) -> None:
        row = [
            ReceiverStep(rank=rank, state=AgentState.SYNCED, ack_microseconds=800, memory=MEMORY)
            for rank in range(1, self.receivers + 1)
        ]
        self.steps[number].append(
            StepReport(
                step=len(self.steps[number]) + 1,
                started_at=datetime.now(UTC),
                duration_microseconds=23_100,
                bytes=8_044_936_192,
                memory=MEMORY,
                receivers=row,
                complete=True,
            )
        )
        self.news[number].set()

    async def answer(self, request: web.Request) -> web.Response:
        host = request.transport.get_extra_info("sockname")[0]  # type: ignore[union-attr]
        _, _, block, last = map(int, host.split("."))
        number, after = block * 250 + last - 1, int(request.query["after"])
        if len(self.steps[number]) <= after:
            self.news[number].clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.news[number].wait(), float(request.query["timeout"]))
        done = len(self.steps[number])
        state = AgentState.SYNCED if done else AgentState.JOINED
        report = Report(
            namespace=NAMESPACE,
            name=name_of(number),
            session="s1",
            transport="NCCL",
            mode="Packed",
            route="P2P/CUMEM",
            agents=[AgentReport(rank=r, state=state, step=done, memory=MEMORY) for r in range(self.receivers + 1)],
            steps=[step for step in self.steps[number] if step.step > after][-64:],
        )
        return web.Response(text=report.model_dump_json(by_alias=True), content_type="application/json")

    async def serve(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/report", self.answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "0.0.0.0", HTTP_PORT, backlog=4096).start()
        return runner


async def each(count: int, work: Any) -> None:
    turns = asyncio.Semaphore(PARALLEL)

    async def one(number: int) -> None:
        async with turns:
            await work(number)

    await asyncio.gather(*(one(number) for number in range(count)))


async def create(api: KubeApi, number: int, receivers: int) -> None:
    tree = manifest(name_of(number), receivers={"replicas": receivers})
    tree["metadata"]["namespace"] = NAMESPACE
    await api.create(tree)


async def run_sender(api: KubeApi, number: int) -> None:
    pod = f"{name_of(number)}-sender-0"
    address = address_of(number)
    status = {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "containerStatuses": [
            {
                "name": "agent",
                "image": "agent:1",
                "imageID": "",
                "ready": True,
                "restartCount": 0,
                "state": {"running": {}},
            }
        ],
    }
    tree = {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": NAMESPACE, "name": pod}, "status": status}
    await api.apply(tree, "status")


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def requests(cluster: ControlPlane, since: int) -> Counter[str]:
    return Counter(event["verb"] for event in list(cluster.audit())[since:])


def pods_made(cluster: ControlPlane) -> int:
    return cluster.kubectl("-n", NAMESPACE, "get", "pods", "-o", "name").count("\n")


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


async def measure(cluster: ControlPlane, count: int, receivers: int, idle: float) -> dict[str, Any]:
    found: dict[str, Any] = {"resources": count, "agentsEach": receivers + 1}
    cluster.kubectl("create", "namespace", NAMESPACE)
    api = await KubeApi.connect(cluster.kubeconfig)
    senders = Senders(count, receivers)
    runner = await senders.serve()

    def start() -> OperatorProcess:
        return OperatorProcess(cluster, "-n", NAMESPACE)

    def done(operator: OperatorProcess) -> bool:
        return operator.metric(r'weightsync_operator_weightsyncs\{condition="Ready"') == count

    with await asyncio.to_thread(start) as operator:
        began = time.monotonic()
        await each(count, lambda number: create(api, number, receivers))
        created = time.monotonic() - began
        pods = count * (receivers + 1)
        await asyncio.to_thread(eventually, lambda: pods_made(cluster) >= pods, 1200, 2)
        found["createAllSeconds"] = round(created, 1)
        found["podsOfAllSeconds"] = round(time.monotonic() - began, 1)
        await each(count, lambda number: run_sender(api, number))
        for number in range(count):
            senders.step(number)
        await asyncio.to_thread(eventually, lambda: operator.metric(r"weightsync_step\{") == count, 600)
        operator.process.terminate()
        await asyncio.to_thread(operator.process.wait, 20)
    print("made", json.dumps(found), flush=True)

    before = len(cluster.writes())
    began = time.monotonic()
    with await asyncio.to_thread(start) as operator:
        await asyncio.to_thread(eventually, lambda: done(operator), 600)
        found["coldStartSeconds"] = round(time.monotonic() - began, 1)
        await asyncio.sleep(15)
        found["coldStartWrites"] = len(cluster.writes()) - before
        process = psutil.Process(operator.process.pid)
        since, cpu, began = len(list(cluster.audit())), cpu_seconds(process), time.monotonic()
        await asyncio.sleep(idle)
        passed = time.monotonic() - began
        found["idleCorePercent"] = round(100 * (cpu_seconds(process) - cpu) / passed, 1)
        found["idleRequestsPerSecond"] = round(sum(requests(cluster, since).values()) / passed, 2)
        found["rssMiB"] = round(process.memory_info().rss / 2**20)
        latencies = []
        for number in random.sample(range(count), min(count, 50)):  # each once: a status is written once in 2 s
            senders.step(number)
            began, wanted = time.monotonic(), len(senders.steps[number])
            while True:
                tree = await api.get("WeightSync", NAMESPACE, name_of(number))
                if tree is not None and tree["status"]["step"] == wanted:
                    break
                await asyncio.sleep(0.01)
            latencies.append(time.monotonic() - began)
            await asyncio.sleep(0.2)
        found["statusSeconds"] = {
            "p50": round(percentile(latencies, 50), 3),
            "p99": round(percentile(latencies, 99), 3),
        }
    await api.close()
    await runner.cleanup()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resources", type=int, default=1000)
    parser.add_argument("--receivers", type=int, default=7)
    parser.add_argument("--idle", type=float, default=60.0, help="seconds")
    arguments = parser.parse_args()
    subprocess.run([HERE.parent / "tests" / "cluster" / "build.sh"], check=True, stdout=subprocess.DEVNULL)
    folder = programs()
    assert folder is not None
    with ControlPlane(folder, scheduler=False) as cluster:
        cluster.kubectl("apply", "--server-side", "-f", "-", stdin=render())
        cluster.kubectl("wait", "--for=condition=Established", "crd/weightsyncs.weightsync.dev", "--timeout=30s")
        found = asyncio.run(measure(cluster, arguments.resources, arguments.receivers, arguments.idle))
    found["cores"] = os.cpu_count()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
