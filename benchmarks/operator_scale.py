"""The operator with many WeightSyncs, on a real control plane: cold start, idle load, memory, latencies and writes.

Pods are made by the real StatefulSet controller and never run; one process answers for all senders, each at a loopback
address of its own. Needs the programs that `tests/cluster/build.sh` makes. At 1,000 resources it takes some 15 minutes
on two idle cores, most of them the StatefulSet controller's; each part has a deadline.

    python benchmarks/operator_scale.py --resources 1000 --output benchmarks/results/operator.json
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests" / "cluster"), str(HERE.parent / "tests")]

from control_plane import ControlPlane, programs  # noqa: E402
from operator_process import OperatorProcess, manifest  # noqa: E402
from operator_senders import NAMESPACE, Senders, address_of, name_of  # noqa: E402
from weightsync_api.crd import render  # noqa: E402
from weightsync_operator.kube_api import KubeApi, Tree  # noqa: E402

PARALLEL = 8
SAMPLES = 50
LATENCIES = "p50", "p99", "max"
GOALS = {
    "operatorSecondsToStatefulSets.p99": 0.5,
    "statusSeconds.p99": 1.0,
    "idleRequestsPerSecond": 5.0,
    "idleCorePercent": 5.0,
    "rssMiB": 250.0,
    "coldStartSeconds": 30.0,
    "coldStartWrites": 0.0,
}
"""Upper bounds."""

_began = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - _began:6.1f} s, load {os.getloadavg()[0]:4.1f}] {text}", file=sys.stderr, flush=True)


class Benchmark:
    """All parts of one run, in their order."""

    def __init__(self, cluster: ControlPlane, api: KubeApi, senders: Senders, count: int, idle: float) -> None:
        self.cluster = cluster
        self.api = api
        self.senders = senders
        self.count = count
        self.idle_seconds = idle
        self.found: dict[str, Any] = {"resources": count, "agentsEach": senders.receivers + 1}

    def start(self) -> OperatorProcess:
        return OperatorProcess(self.cluster, "-n", NAMESPACE)

    # --- parts --------------------------------------------------------------------------------------------------

    async def create_all(self, operator: OperatorProcess) -> None:
        began = time.monotonic()
        await self.each(range(self.count), self.create)
        self.found["createAllSeconds"] = round(time.monotonic() - began, 1)
        say(f"{self.count} WeightSyncs are there")
        wanted = self.count * (self.senders.receivers + 1)
        await self.until("pods made", self.pods_made, wanted, 60 + wanted / 8)
        self.found["podsOfAllSeconds"] = round(time.monotonic() - began, 1)

    async def first_steps(self, operator: OperatorProcess) -> None:
        await self.each(range(self.count), self.run_sender)
        say("every sender's pod has an address")
        # Eleven steps: the histories are full, and the statuses as large as they get.
        for number in range(self.count):
            for _ in range(11):
                self.senders.step(number)
        began = time.monotonic()
        await self.until("WeightSyncs at step 11", lambda: self.at_step(operator, 11), self.count, 60 + self.count / 4)
        self.found["firstStatusOfAllSeconds"] = round(time.monotonic() - began, 1)
        await self.quiet()

    async def stop(self, operator: OperatorProcess) -> None:
        began = time.monotonic()
        operator.process.terminate()
        await asyncio.to_thread(operator.process.wait, 20)
        self.found["stopSeconds"] = round(time.monotonic() - began, 1)
        say(f"the operator ended in {self.found['stopSeconds']} s")

    async def cold_start(self, operator: OperatorProcess, began: float, writes: int) -> None:
        await self.until("WeightSyncs reconciled", lambda: self.known(operator), self.count, 60 + self.count / 4, 0.2)
        self.found["coldStartSeconds"] = round(time.monotonic() - began, 1)
        self.found["coldStartCpuSeconds"] = round(cpu_seconds(psutil.Process(operator.process.pid)), 1)
        await asyncio.sleep(30)
        await self.unasking()  # it compares all it knows with all there is, within 30 s
        self.found["coldStartWrites"] = len(await asyncio.to_thread(self.cluster.writes)) - writes
        if self.found["coldStartWrites"]:
            say("writes: " + str(Counter(w.rsplit(" ", 1)[0] for w in self.cluster.writes()[writes:])))

    async def idle(self, operator: OperatorProcess) -> None:
        say(f"idle for {self.idle_seconds:g} s")
        process = psutil.Process(operator.process.pid)
        since, answers = len(list(self.cluster.audit())), self.senders.answers
        cpu, began = cpu_seconds(process), time.monotonic()
        await asyncio.sleep(self.idle_seconds)
        passed, used = time.monotonic() - began, cpu_seconds(process) - cpu
        asked = list(self.cluster.audit())[since:]
        self.found["idleCorePercent"] = round(100 * used / passed, 1)
        self.found["idleRequestsPerSecond"] = round(len(asked) / passed, 2)
        self.found["idlePollsPerSecond"] = round((self.senders.answers - answers) / passed, 1)
        say(str(Counter(event["verb"] for event in asked)))

    async def status_latency(self, operator: OperatorProcess) -> None:
        """Of one resource at a time, from the end of its step to the status that has it."""
        say("steps, and when they are in the status")
        latencies = []
        for number in random.sample(range(self.count), min(self.count, SAMPLES)):
            self.senders.step(number)
            began, wanted = time.monotonic(), self.senders.last(number)
            while await self.step_of(number) != wanted:
                assert time.monotonic() - began < 30, f"step {wanted} of {name_of(number)} is not in its status"
                await asyncio.sleep(0.01)
            latencies.append(time.monotonic() - began)
            await asyncio.sleep(0.1)
        self.found["statusSeconds"] = spread(latencies)

    async def writes_of_a_fast_one(self, operator: OperatorProcess) -> None:
        """Twenty resources that step five times a second: how often their statuses are written."""
        say("fast steps, and how often they are written")
        fast = random.sample(range(self.count), min(self.count, 20))
        since, seconds = len(list(self.cluster.audit())), 20
        for _ in range(seconds * 5):
            for number in fast:
                self.senders.step(number)
            await asyncio.sleep(0.2)
        await asyncio.sleep(3)
        times: dict[str, list[float]] = defaultdict(list)
        for event in list(self.cluster.audit())[since:]:
            if event["verb"] == "patch" and event["objectRef"].get("subresource") == "status":
                received = datetime.datetime.fromisoformat(event["requestReceivedTimestamp"])
                times[event["objectRef"]["name"]].append(received.timestamp())
        gaps = [b - a for at in times.values() for a, b in itertools.pairwise(at)]
        self.found["statusWriteGapSeconds"] = {"min": round(min(gaps), 2), "p50": round(statistics.median(gaps), 2)}

    async def new_ones(self, operator: OperatorProcess) -> None:
        """One more WeightSync at a time: when its StatefulSets are there (the operator's part), and its pods."""
        say("new WeightSyncs, one at a time")
        ours, pods = [], []
        for number in range(self.count, self.count + SAMPLES):
            name, last = name_of(number), self.senders.receivers - 1
            await self.create(number)
            began = time.monotonic()
            await self.appears("StatefulSet", f"{name}-sender", f"{name}-receivers")
            ours.append(time.monotonic() - began)
            await self.appears("Pod", f"{name}-sender-0", *(f"{name}-receivers-{n}" for n in range(last + 1)))
            pods.append(time.monotonic() - began)
            await asyncio.sleep(0.1)
        self.found["operatorSecondsToStatefulSets"] = spread(ours)
        self.found["secondsToPods"] = spread(pods)

    def memory(self, operator: OperatorProcess) -> None:
        process = psutil.Process(operator.process.pid)
        self.found["rssMiB"] = max(round(process.memory_info().rss / 2**20), self.found.get("rssMiB", 0))
        peak = Path(f"/proc/{process.pid}/status").read_text().split("VmHWM:")[1].split()[0]
        self.found["rssPeakMiB"] = max(round(int(peak) / 1024), self.found.get("rssPeakMiB", 0))
        say(f"RSS {process.memory_info().rss / 2**20:.0f} MiB, peak {int(peak) / 1024:.0f} MiB")

    # --- tools --------------------------------------------------------------------------------------------------

    async def each(self, numbers: Any, work: Any) -> None:
        turns = asyncio.Semaphore(PARALLEL)

        async def one(number: int) -> None:
            async with turns:
                await work(number)

        await asyncio.gather(*(one(number) for number in numbers))

    async def until(self, what: str, count: Any, wanted: int, seconds: float, every: float = 1.0) -> None:
        """Until there are so many; says how many every 10 s. Raises AssertionError at the deadline."""
        began = told = time.monotonic()
        while (found := int(await asyncio.to_thread(count))) < wanted:
            now = time.monotonic()
            assert now - began < seconds, f"{what}: {found} of {wanted} after {seconds:.0f} s"
            if now - told > 10:
                told = now
                say(f"{what}: {found} of {wanted}")
            await asyncio.sleep(every)
        say(f"{what}: {found}, in {time.monotonic() - began:.1f} s")

    async def quiet(self) -> None:
        """Until the operator has written nothing for 5 s."""
        before = -1
        for _ in range(60):
            writes = len(await asyncio.to_thread(self.cluster.writes))
            if writes == before:
                return
            before = writes
            await asyncio.sleep(5)
        raise AssertionError("the operator writes and writes")

    async def unasking(self) -> None:
        """Until the operator has asked for nothing for 10 s."""
        before = -1
        for _ in range(30):
            asked = len(list(await asyncio.to_thread(self.cluster.audit)))
            if asked == before:
                return
            before = asked
            await asyncio.sleep(10)
        raise AssertionError("the operator asks and asks")

    def known(self, operator: OperatorProcess) -> int:
        return int(operator.metric(r'weightsync_operator_weightsyncs\{condition="Ready"'))

    def at_step(self, operator: OperatorProcess, step: int) -> int:
        lines = (operator.get("metrics") or "").splitlines()
        return sum(line.startswith("weightsync_step{") and float(line.rsplit(" ", 1)[1]) >= step for line in lines)

    def pods_made(self) -> int:
        """One of them, and how many more there are: a whole list takes the API server seconds."""
        page = json.loads(self.cluster.kubectl("get", "--raw", f"/api/v1/namespaces/{NAMESPACE}/pods?limit=1"))
        return len(page["items"]) + int(page["metadata"].get("remainingItemCount", 0))

    async def step_of(self, number: int) -> int:
        tree = await self.api.get("WeightSync", NAMESPACE, name_of(number))
        return int(tree["status"]["step"]) if tree is not None else 0

    async def appears(self, kind: str, *names: str) -> None:
        began = time.monotonic()
        for name in names:
            while await self.api.get(kind, NAMESPACE, name) is None:
                assert time.monotonic() - began < 60, f"{kind} {name} is not there"
                await asyncio.sleep(0.01)

    async def create(self, number: int) -> None:
        tree = manifest(name_of(number), receivers={"replicas": self.senders.receivers})
        tree["metadata"]["namespace"] = NAMESPACE
        await self.api.create(tree)

    async def run_sender(self, number: int) -> None:
        address = address_of(number)
        container = {"name": "agent", "image": "agent:1", "imageID": "", "ready": True, "restartCount": 0}
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "containerStatuses": [{**container, "state": {"running": {}}}],
        }
        metadata = {"namespace": NAMESPACE, "name": f"{name_of(number)}-sender-0"}
        tree: Tree = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status}
        await self.api.apply(tree, "status")


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = len(ordered) // 2, min(len(ordered) - 1, int(len(ordered) * 0.99)), len(ordered) - 1
    return {name: round(ordered[place], 3) for name, place in zip(LATENCIES, at, strict=True)}


async def measure(cluster: ControlPlane, count: int, receivers: int, idle: float) -> dict[str, Any]:
    cluster.kubectl("create", "namespace", NAMESPACE)
    api = await KubeApi.connect(cluster.kubeconfig)
    senders = Senders(count + SAMPLES, receivers)
    runner = await senders.serve()
    run = Benchmark(cluster, api, senders, count, idle)
    try:
        with await asyncio.to_thread(run.start) as operator:
            await run.create_all(operator)
            await run.first_steps(operator)
            run.memory(operator)
            await run.stop(operator)
        writes, began = len(cluster.writes()), time.monotonic()
        with await asyncio.to_thread(run.start) as operator:
            await run.cold_start(operator, began, writes)
            run.memory(operator)
            await run.idle(operator)
            await run.status_latency(operator)
            await run.writes_of_a_fast_one(operator)
            await run.new_ones(operator)
            run.memory(operator)
    finally:
        await api.close()
        await runner.cleanup()
    return run.found


def missed(found: dict[str, Any]) -> list[str]:
    """Every goal that was not reached, in a sentence."""
    sentences = []
    for place, goal in GOALS.items():
        value: Any = found
        for part in place.split("."):
            value = value[part]
        if value > goal:
            sentences.append(f"{place} is {value}, more than {goal:g}")
    return sentences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resources", type=int, default=1000)
    parser.add_argument("--receivers", type=int, default=7)
    parser.add_argument("--idle", type=float, default=120.0, help="seconds")
    parser.add_argument("--output", type=Path, help="a file for the figures, in JSON")
    arguments = parser.parse_args()
    subprocess.run([HERE.parent / "tests" / "cluster" / "build.sh"], check=True, stdout=subprocess.DEVNULL)
    folder = programs()
    assert folder is not None
    load = os.getloadavg()[0]
    with ControlPlane(folder, scheduler=False) as cluster:
        cluster.kubectl("apply", "--server-side", "-f", "-", stdin=render())
        cluster.kubectl("wait", "--for=condition=Established", "crd/weightsyncs.weightsync.dev", "--timeout=30s")
        kubernetes = json.loads(cluster.kubectl("get", "--raw", "/version"))["gitVersion"]
        found = asyncio.run(measure(cluster, arguments.resources, arguments.receivers, arguments.idle))
    result = {
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}; load {load:.1f} before the run",
        "versions": {name: version(name) for name in ("weightsync", "kopf", "kubernetes", "aiohttp")}
        | {"python": platform.python_version(), "kube-apiserver": kubernetes},
        "date": datetime.date.today().isoformat(),
        "figures": found,
        "goals": GOALS,
        "missed": missed(found),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n")
    for sentence in result["missed"]:
        say(sentence)


if __name__ == "__main__":
    main()
