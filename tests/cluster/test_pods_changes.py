"""Changes of a WeightSync whose pods run: receivers come and go, pods roll once, GPUs are given back, all goes."""

from __future__ import annotations

import time

import pytest
from kubectl import WAIT
from operator_process import eventually
from pod_cluster import STARTED_SECONDS, Lines, PodCluster, WeightSyncOnCluster, manifest, uids

pytestmark = pytest.mark.timeout(900)

KINDS = "statefulsets,pods,services,configmaps,secrets,networkpolicies,poddisruptionbudgets,controllerrevisions"


@pytest.fixture
def running(pod_cluster: PodCluster, pod_namespace: str) -> WeightSyncOnCluster:
    ws = pod_cluster.make(pod_namespace, manifest(receivers={"replicas": 1}))
    ws.wait_ready()
    return ws


def receivers(ws: WeightSyncOnCluster) -> str:
    return str(ws.status()["summary"]["receivers"])


def left(ws: WeightSyncOnCluster) -> list[str]:
    found = ws.cluster.list(KINDS, ws.namespace)
    theirs = ("model", "kube-root-ca.crt")
    return [f"{t['kind']}/{t['metadata']['name']}" for t in found if t["metadata"]["name"] not in theirs]


def test_receivers_join_and_leave_without_touching_the_others(running: WeightSyncOnCluster) -> None:
    before = uids(running.pods())
    running.patch(receivers={"replicas": 2})
    eventually(lambda: receivers(running) == "2/2", STARTED_SECONDS)
    status = running.status()
    joined = next(agent for agent in status["agents"] if agent["rank"] == 2)
    assert joined["state"] == "Synced"
    # `kubectl scale` writes the scale subresource, as an autoscaler does.
    running.kubectl("scale", "ws/demo", "--replicas=1")
    eventually(lambda: receivers(running) == "1/1" and len(running.pods()) == 2)
    reached = running.step()
    status = running.wait_step(reached + 2)
    assert status["replicas"] == 1
    assert uids(running.pods()) == before
    steps = [step["step"] for step in status["history"]]
    assert steps == list(range(steps[0], steps[0] + len(steps)))


def test_no_receivers_is_a_condition_and_the_sender_waits(running: WeightSyncOnCluster) -> None:
    running.kubectl("scale", "ws/demo", "--replicas=0")
    eventually(lambda: running.condition().get("reason") == "NoReceivers")
    eventually(lambda: len(running.pods()) == 1)
    running.kubectl("scale", "ws/demo", "--replicas=1")
    running.wait_ready()


def test_a_template_change_rolls_the_pods_once(running: WeightSyncOnCluster) -> None:
    before = uids(running.pods())
    columns = '-o=jsonpath={.metadata.name} {.metadata.uid}{"\\n"}'
    with Lines(running.cluster, "-n", running.namespace, "get", "pods", "-w", columns) as lines:
        eventually(lambda: len(lines.seen) >= len(before))
        template = manifest()["spec"]["receivers"]["template"]
        running.patch(receivers={"template": {**template, "metadata": {"labels": {"team": "rl"}}}})

        def rolled() -> bool:
            pod = running.pods().get("demo-receivers-0", {"metadata": {"labels": {}}})
            return bool(pod["metadata"]["labels"].get("team") == "rl")

        eventually(rolled)
        eventually(lambda: receivers(running) == "1/1" and running.condition().get("status") == "True", STARTED_SECONDS)
        running.wait_step(running.step() + 3)
    seen = {name: {line.split(" ")[1] for line in lines.texts if line.startswith(name)} for name in before}
    assert {name: len(ids) for name, ids in seen.items()} == {"demo-receivers-0": 2, "demo-sender-0": 1}
    assert uids(running.pods())["demo-sender-0"] == before["demo-sender-0"]


def test_suspend_gives_the_gpus_back_and_keeps_the_last_status(running: WeightSyncOnCluster) -> None:
    kept = running.wait_step(2)
    began = time.monotonic()
    running.patch(suspend=True)
    eventually(lambda: running.pods() == {})
    print(f"no pod is left {time.monotonic() - began:.1f} s after suspend")
    eventually(lambda: running.condition("Suspended").get("status") == "True")
    status = running.status()
    assert status["step"] >= kept["step"]
    # A step that was on its way when the pods were told to end may be there too, and did not get far.
    assert status["lastStep"]["complete"] or status["lastStep"]["step"] > status["step"]
    assert status["history"]
    assert status["summary"]["status"] == "Suspended"
    running.patch(suspend=False)
    running.wait_ready()
    assert running.condition("Suspended")["status"] == "False"


def test_a_field_that_can_not_change_is_refused_in_a_sentence(running: WeightSyncOnCluster) -> None:
    words = ("patch", "ws/demo", "--type=merge", "-p", '{"spec": {"placement": "Colocated"}}')
    done = running.cluster.run("-n", running.namespace, *words, check=False)
    assert done.returncode != 0
    assert "placement" in done.stderr
    print(done.stderr)


def test_deleted_everything_is_gone_in_seconds(running: WeightSyncOnCluster) -> None:
    began = time.monotonic()
    running.kubectl("delete", "ws/demo", WAIT)
    eventually(lambda: left(running) == [])
    print(f"all is gone {time.monotonic() - began:.1f} s after delete")


def test_deleted_while_the_operator_is_down_everything_is_gone_in_seconds(running: WeightSyncOnCluster) -> None:
    running.cluster.scale_operator(0)
    try:
        began = time.monotonic()
        running.kubectl("delete", "ws/demo", WAIT)
        eventually(lambda: left(running) == [])
        print(f"all is gone {time.monotonic() - began:.1f} s after delete, without an operator")
    finally:
        running.cluster.scale_operator(1)


def test_an_operator_that_was_away_has_the_last_ten_steps(running: WeightSyncOnCluster) -> None:
    status = running.wait_step(3)
    running.cluster.scale_operator(0)
    stopped, at = running.status()["step"], uids(running.pods())
    try:
        # Steps go on without it; the sender's own word, as nobody writes it down.
        eventually(lambda: own_step(running) >= stopped + 8)
    finally:
        running.cluster.scale_operator(1)
    eventually(lambda: running.step() >= stopped + 8)
    steps = [step["step"] for step in running.status()["history"]]
    assert len(steps) == min(10, steps[-1])
    assert steps == list(range(steps[-1] - len(steps) + 1, steps[-1] + 1))
    assert uids(running.pods()) == at
    assert status["history"][0]["startedAt"]


def own_step(ws: WeightSyncOnCluster) -> int:
    """The last step that the sender itself reports."""
    code = (
        "import json, urllib.request; "
        "report = json.load(urllib.request.urlopen('http://127.0.0.1:8080/report?after=0')); "
        "print(max((step['step'] for step in report['steps']), default=0))"
    )
    return int(ws.kubectl("exec", "demo-sender-0", "--", "python3", "-c", code))
