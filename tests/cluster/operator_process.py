"""The operator's real process, and a sender whose pod is an address of loopback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Protocol, Self

from control_plane import ControlPlane, Tree, end_with_parent
from kubectl import Kubectl
from loopback import addresses
from weightsync_agent.http import AgentServer
from weightsync_api.reports import AgentReport, AgentState, MemorySample, ReceiverStep, Report, StepReport
from weightsync_operator.plan import HTTP_PORT

WAIT_SECONDS = 120.0
"""Only ends a wait that would not end: everything waited for comes as soon as a busy machine allows."""
MEMORY = MemorySample(reserved_before=1 << 30, reserved_after=1 << 30, allocated_after=1 << 20, peak=1 << 30)


def manifest(name: str = "demo", **spec: Any) -> Tree:
    return {
        "apiVersion": "weightsync.dev/v1alpha1",
        "kind": "WeightSync",
        "metadata": {"name": name},
        "spec": {"sender": {"source": {"synthetic": {"model": "qwen3-0.6b"}}}, **spec},
    }


def eventually(what: Callable[[], bool], seconds: float = WAIT_SECONDS, every: float = 0.1) -> float:
    """Seconds until it was so."""
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < seconds, f"it did not come about within {seconds:g} s"
        time.sleep(every)
    return time.monotonic() - began


def until_refused(cluster: Kubectl, namespace: str, words: str, *command: str) -> None:
    """Returns once a kubectl that would make something is refused in these words.

    The API server's admission hears of a quota or of a namespace's label a moment after it is there.
    """
    command = ("-n", namespace, *command, "--dry-run=server")
    eventually(lambda: words in cluster.run(*command, check=False).stderr)


class OperatorProcess:
    """`weightsync-operator`, until the end of the block."""

    def __init__(self, cluster: ControlPlane, *arguments: str) -> None:
        self.http = f"{next(addresses)}:8080"
        self._log = (cluster.dir / f"operator-{self.http}.log").open("wb")
        command = [sys.executable, "-m", "weightsync_operator.main", "--agent-image", "agent:1", "--http", self.http]
        self.process = subprocess.Popen(
            [*command, *arguments],
            env={**os.environ, "KUBECONFIG": str(cluster.operator_kubeconfig)},
            stderr=self._log,
            preexec_fn=end_with_parent,
        )

    def __enter__(self) -> Self:
        eventually(self.answers)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        self._log.close()
        if kind is not None:
            with open(self._log.name) as log:
                print(log.read()[-6000:])

    def answers(self) -> bool:
        """Whether it serves HTTP: healthy or not is another question."""
        try:
            urllib.request.urlopen(f"http://{self.http}/healthz", timeout=WAIT_SECONDS).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            assert self.process.poll() is None, "the operator ended"
            return False
        return True

    def ended(self) -> int:
        """Its exit code, once it has one."""
        return self.process.wait(WAIT_SECONDS)

    def get(self, path: str) -> str | None:
        """None where it does not answer, or answers that it is not well."""
        try:
            with urllib.request.urlopen(f"http://{self.http}/{path}", timeout=WAIT_SECONDS) as answer:
                return str(answer.read().decode())
        except OSError:
            return None

    def metric(self, pattern: str) -> float:
        """Sum of the series that match."""
        lines = (self.get("metrics") or "").splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(pattern, line))

    def passes(self, result: str = ".*") -> float:
        return self.metric(rf'weightsync_operator_reconcile_seconds_count\{{result="{result}"\}}')


class Sender:
    """What a sender's agent answers, served by the agent's own HTTP server."""

    def __init__(self, namespace: str, name: str = "demo", receivers: int = 1) -> None:
        self.address = next(addresses)
        self.errors: Counter[str] = Counter()
        self._place = namespace, name
        self._receivers = receivers
        self._steps: list[StepReport] = []
        self._news = threading.Condition()
        self._server = AgentServer(self, f"{self.address}:{HTTP_PORT}", 0)

    def close(self) -> None:
        self._server.close()

    def step(self) -> float:
        """Does a step. Gives when it ended, on the monotonic clock."""
        rows = [
            ReceiverStep(rank=rank, state=AgentState.SYNCED, ack_microseconds=800, memory=MEMORY, verified=True)
            for rank in range(1, self._receivers + 1)
        ]
        with self._news:
            self._steps.append(
                StepReport(
                    step=len(self._steps) + 1,
                    started_at=datetime.now(UTC),
                    duration_microseconds=23_100,
                    bytes=8_044_936_192,
                    memory=MEMORY,
                    receivers=rows,
                    verified=True,
                    complete=True,
                )
            )
            self._news.notify_all()
        return time.monotonic()

    def report(self) -> Report:
        state = AgentState.SYNCED if self._steps else AgentState.JOINED
        agents = [
            AgentReport(rank=rank, node="node-a", state=state, step=len(self._steps), memory=MEMORY)
            for rank in range(self._receivers + 1)
        ]
        return Report(
            namespace=self._place[0],
            name=self._place[1],
            session="s1",
            transport="NCCL",
            mode="Packed",
            route="P2P/CUMEM",
            agents=agents,
            steps=list(self._steps[-64:]),
        )

    def wait_report(self, after: int, timeout: float) -> Report:
        with self._news:
            self._news.wait_for(lambda: len(self._steps) > after, timeout)
            return self.report()


class Addressed(Protocol):
    """What listens at an address."""

    address: str


def run_pods(cluster: ControlPlane, namespace: str, sender: Addressed) -> None:
    """Marks every pod as running, as a kubelet would; the sender's has the sender's address."""
    for pod in cluster.list("pods", namespace):
        name = pod["metadata"]["name"]
        address = sender.address if "-sender-" in name else next(addresses)
        container = pod["spec"]["containers"][0]
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [{"type": "PodScheduled", "status": "True"}],
            "containerStatuses": [
                {
                    "name": container["name"],
                    "image": container["image"],
                    "imageID": "",
                    "ready": True,
                    "restartCount": 0,
                    "state": {"running": {"startedAt": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}},
                }
            ],
        }
        patch = ["patch", f"pod/{name}", "--subresource=status", "--type=merge", "-p", json.dumps({"status": status})]
        cluster.kubectl("-n", namespace, *patch)
