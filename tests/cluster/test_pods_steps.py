"""Real pods of the agent image, made by the operator that the chart installed, move weights; steps are in status."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator

import pytest
from operator_process import eventually
from pod_cluster import RESTRICTED, Lines, PodCluster, WeightSyncOnCluster, ended_at, manifest, restarts

pytestmark = pytest.mark.timeout(900)

CPU_TRANSPORTS = {"Dedicated": "NCCL", "Node": "NCCL", "Colocated": "IPC"}
"""As they are decided; on the CPU gloo stands in for NCCL and shared memory for IPC."""


@pytest.fixture(scope="module")
def running(pod_cluster: PodCluster) -> Iterator[WeightSyncOnCluster]:
    """A WeightSync with two receivers that goes on for the whole module: a step each second."""
    with pod_cluster.namespace() as namespace:
        ws = pod_cluster.make(namespace, manifest(receivers={"replicas": 2}))
        ws.wait_ready()
        yield ws


@pytest.mark.parametrize("placement", ["Dedicated", "Node", "Colocated"])
def test_pods_of_every_placement_move_weights_with_nothing_else_done(
    pod_cluster: PodCluster, pod_namespace: str, placement: str
) -> None:
    began = time.monotonic()
    ws = pod_cluster.make(pod_namespace, manifest(placement=placement, receivers={"replicas": 2}))
    ws.wait_ready()
    print(f"Ready {time.monotonic() - began:.0f} s after apply")
    status = ws.wait_step(ws.step() + 3)
    pods = ws.pods()
    assert len(pods) == (3 if placement == "Dedicated" else 1)
    assert sum(restarts(pod) for pod in pods.values()) == 0
    assert [len(pod["spec"]["containers"]) for pod in pods.values()] == [1] * len(pods)
    assert status["transport"] == CPU_TRANSPORTS[placement]
    assert status["summary"]["status"] == "Syncing"
    assert status["summary"]["receivers"] == "2/2"
    assert [(a["rank"], a["role"]) for a in status["agents"]] == [(0, "Sender"), (1, "Receiver"), (2, "Receiver")]
    for agent in status["agents"]:
        assert agent["pod"] in pods
        assert agent["node"] == pods[agent["pod"]]["spec"]["nodeName"]
        assert agent["reservedBytes"] > 0
    assert all(agent["state"] == "Synced" for agent in status["agents"] if agent["role"] == "Receiver")
    assert status["lastStep"]["complete"]
    assert int(status["summary"]["verified"]) >= 1
    assert not (pod_cluster.get("ws", "demo", pod_namespace) or {})["metadata"].get("finalizers")


def test_pods_get_the_gpus_that_they_asked_for_and_no_two_the_same(running: WeightSyncOnCluster) -> None:
    given = [
        running.kubectl("exec", pod, "--", "python3", "-c", "import os; print(os.environ['NVIDIA_VISIBLE_DEVICES'])")
        for pod in running.pods()
    ]
    assert len(set(given)) == 3, given


def test_a_restricted_namespace_finds_nothing_in_the_pods(running: WeightSyncOnCluster) -> None:
    words = ("label", "namespace", running.namespace, "--overwrite", "--dry-run=server")
    loose = running.cluster.run(*words, RESTRICTED.replace("=restricted", "=privileged"))
    assert "arning" not in loose.stderr
    # Lifted for a moment, so that the pods are looked at anew: an unchanged label is not.
    running.cluster.kubectl("label", "namespace", running.namespace, f"{RESTRICTED.split('=')[0]}-")
    again = running.cluster.run("label", "namespace", running.namespace, RESTRICTED)
    assert "arning" not in again.stderr, again.stderr


def test_a_step_is_in_the_status_before_the_next_one_is_done(pod_cluster: PodCluster, pod_namespace: str) -> None:
    # Steps are further apart than status writes: none waits for its turn.
    ws = pod_cluster.make(pod_namespace, manifest(steps={"intervalSeconds": 5}))
    ws.wait_ready()
    columns = "-o=jsonpath={.status.lastStep.step} {.status.lastStep.startedAt} {.status.lastStep.durationMicroseconds}"
    with Lines(pod_cluster, "-n", pod_namespace, "get", "ws/demo", "-w", columns + '{"\\n"}') as lines:
        eventually(lambda: len({line.split(" ")[0] for line in lines.texts}) > 7)
    first: dict[int, float] = {}
    for at, line in lines.seen:
        step, started, duration = line.split(" ")
        first.setdefault(int(step), at - ended_at({"startedAt": started, "durationMicroseconds": int(duration)}))
    lags = sorted(list(first.values())[1:])  # of the first line the step may be old
    p99 = lags[math.ceil(0.99 * len(lags)) - 1]
    print(f"{len(lags)} steps were in the status after {lags[len(lags) // 2]:.2f} s (median), {p99:.2f} s (p99)")
    assert list(first) == sorted(first)
    # Each by itself: only a machine that stalls for a step's 5 s has two in one.
    assert len(first) > 0.7 * (max(first) - min(first) + 1), list(first)


def test_get_w_shows_steps_going_by_in_at_most_a_line_each_two_seconds(running: WeightSyncOnCluster) -> None:
    began = time.time()
    with Lines(running.cluster, "-n", running.namespace, "get", "ws", "-w", "--no-headers") as lines:
        eventually(lambda: len({line.split()[5] for line in lines.texts}) > 8)
    steps = [int(line.split()[5]) for line in lines.texts]
    assert steps == sorted(steps)
    # All of them together tell: a line's way here may take longer than the next one's. The first was written before.
    seconds = lines.seen[-1][0] - began
    print(f"{len(steps)} lines, {steps[-1] - steps[0]} steps, {seconds:.1f} s")
    assert seconds >= 2 * (len(steps) - 2)


def test_what_kubectl_prints_reads_well(running: WeightSyncOnCluster) -> None:
    header, row = running.kubectl("get", "weightsyncs").splitlines()
    print(f"{header}\n{row}")
    assert " ".join(header.split()) == "NAME READY STATUS TRANSPORT RECEIVERS STEP RESERVED DELTA ACK RATE AGE"
    name, ready, word, transport, receivers, *_ = row.split()
    assert (name, ready, word, transport, receivers) == ("demo", "True", "Syncing", "NCCL", "2/2")
    wide, values = running.kubectl("get", "ws", "-o", "wide").splitlines()
    print(f"{wide}\n{values}")
    assert {"REASON", "NODES", "PEAK", "VERIFIED"} <= set(wide.split())
    told = running.kubectl("describe", "ws/demo")
    print(told)
    assert "all 2 receivers hold step" in told
    assert "Synced" in told.partition("Events:")[2]
    explained = running.cluster.kubectl("explain", "weightsync.spec.transfer")
    print(explained)
    assert re.search(r"bucketSize\s+<", explained)
    assert "ackTimeoutSeconds" in explained


def test_the_conditions_carry_generation_and_times(running: WeightSyncOnCluster) -> None:
    tree = running.cluster.get("ws", "demo", running.namespace) or {}
    conditions = {c["type"]: c for c in tree["status"]["conditions"]}
    expected = {"Ready", "Progressing", "MemoryStable", "AcksTimely", "TransportOptimal", "Suspended"}
    assert expected <= set(conditions)
    for condition in conditions.values():
        assert condition["observedGeneration"] == tree["metadata"]["generation"]
        assert condition["lastTransitionTime"]
        assert condition["message"]
    assert tree["status"]["observedGeneration"] == tree["metadata"]["generation"]
