"""Pods fail: the group goes on without them or waits for them, and the condition says why in the cluster's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from operator_process import eventually
from pod_cluster import (
    STARTED_SECONDS,
    Lines,
    PodCluster,
    WeightSyncOnCluster,
    cause_then_condition,
    manifest,
    restarts,
    uids,
)

pytestmark = pytest.mark.timeout(900)

Tree = dict[str, Any]


def manifest_with(role: str, **container: Any) -> Tree:
    """A manifest in which one role's container has more than usual."""
    tree = manifest()
    spec = tree["spec"][role]["template"]["spec"]
    spec = {**spec, "containers": [{**spec["containers"][0], **container}]}
    tree["spec"][role] = {**tree["spec"][role], "template": {"spec": spec}}
    return tree


def container_state(ws: WeightSyncOnCluster, pod: str) -> Tree:
    statuses = ws.pods().get(pod, {}).get("status", {}).get("containerStatuses") or [{}]
    return dict(statuses[0])


def waits_for(ws: WeightSyncOnCluster, pod: str, *reasons: str) -> Callable[[], bool]:
    return lambda: container_state(ws, pod).get("state", {}).get("waiting", {}).get("reason") in reasons


def event(ws: WeightSyncOnCluster, words: str) -> Callable[[], bool]:
    return lambda: any(words in str(e.get("message")) for e in ws.cluster.list("events", ws.namespace))


def test_a_crashed_receiver_comes_back_and_is_whole_one_step_later(pod_cluster: PodCluster, pod_namespace: str) -> None:
    ws = pod_cluster.make(pod_namespace, manifest(receivers={"replicas": 2}))
    ws.wait_ready()
    before = uids(ws.pods())
    ready = '.status.conditions[?(@.type=="Ready")]'
    columns = f'-o=jsonpath={{{ready}.status}} {{{ready}.message}}{{"\\n"}}'  # no range: kubectl -w prints it once only
    with Lines(pod_cluster, "-n", pod_namespace, "get", "ws/demo", "-w", columns) as lines:
        eventually(lambda: lines.texts != [])
        ws.kill_agent("demo-receivers-1", "receiver")
        # Every state that was written: a quick engine may be back before one looks.
        eventually(lambda: any(line.startswith("False") and "demo-receivers-1" in line for line in lines.texts))
        print("\n".join(lines.texts))
    broken = ws.step()
    eventually(lambda: ws.condition().get("status") == "True", STARTED_SECONDS)
    status = ws.wait_step(broken + 1)
    eventually(lambda: restarts(ws.pods()["demo-receivers-1"]) > 0)  # the kubelet tells when it comes to it
    # Whole, and as far as the others: it took one step to have it all.
    assert {a["state"] for a in status["agents"] if a["rank"]} == {"Synced"}
    after = uids(ws.pods())
    assert after.pop("demo-receivers-1")[1] == 1
    assert after == {name: at for name, at in before.items() if name != "demo-receivers-1"}


def test_a_crashed_sender_goes_on_at_the_next_step(pod_cluster: PodCluster, pod_namespace: str) -> None:
    ws = pod_cluster.make(pod_namespace, manifest())
    ws.wait_ready()
    ws.wait_step(4)
    receivers = uids(ws.pods())["demo-receivers-0"]
    ws.kill_agent("demo-sender-0", "sender")
    eventually(lambda: restarts(ws.pods()["demo-sender-0"]) == 1)
    last = ws.step()
    status = ws.wait_step(last + 3, STARTED_SECONDS)
    eventually(lambda: ws.condition().get("status") == "True")
    complete = [step["step"] for step in status["history"] if step["complete"]]
    # The new sender counts on from what its receivers hold: of a step that was whole as the old one died, before
    # anyone had read its report, nobody can tell.
    assert complete == sorted(set(complete)), complete
    assert len(complete) >= complete[-1] - complete[0], complete
    assert uids(ws.pods())["demo-receivers-0"] == receivers


def test_a_crash_of_one_agent_of_a_shared_pod_starts_the_whole_group_anew(
    pod_cluster: PodCluster, pod_namespace: str
) -> None:
    ws = pod_cluster.make(pod_namespace, manifest(placement="Colocated"))
    ws.wait_ready()
    ws.kill_agent("demo-group-0", "receiver")
    eventually(lambda: restarts(ws.pods()["demo-group-0"]) == 1)
    eventually(lambda: ws.condition().get("status") == "True", STARTED_SECONDS)


def test_a_deleted_pod_is_made_anew_and_joins(pod_cluster: PodCluster, pod_namespace: str) -> None:
    ws = pod_cluster.make(pod_namespace, manifest())
    ws.wait_ready()
    before = uids(ws.pods())
    ws.kubectl("delete", "pod/demo-receivers-0", "--grace-period=0", "--force")
    eventually(
        lambda: uids(ws.pods()).get("demo-receivers-0", before["demo-receivers-0"])[0] != before["demo-receivers-0"][0]
    )
    eventually(lambda: ws.condition().get("status") == "True", STARTED_SECONDS)
    assert uids(ws.pods())["demo-sender-0"] == before["demo-sender-0"]


def test_an_image_that_can_not_be_pulled_is_quoted(pod_cluster: PodCluster, pod_namespace: str) -> None:
    ws = pod_cluster.make(pod_namespace, manifest_with("sender", image="registry.invalid/weightsync/agent:none"))
    reasons = ["ErrImagePull", "ImagePullBackOff"]
    cause = waits_for(ws, "demo-sender-0", *reasons)
    cause_then_condition(ws, cause, reasons, ["demo-sender-0", "registry.invalid/weightsync/agent:none"])


def test_a_pod_that_can_not_be_scheduled_is_quoted(pod_cluster: PodCluster, pod_namespace: str) -> None:
    limits = {"nvidia.com/gpu": "99"}
    ws = pod_cluster.make(pod_namespace, manifest_with("sender", resources={"limits": limits}))

    def unscheduled() -> bool:
        conditions = ws.pods().get("demo-sender-0", {}).get("status", {}).get("conditions", [])
        return any(c["type"] == "PodScheduled" and c["status"] == "False" for c in conditions)

    cause_then_condition(ws, unscheduled, ["Unschedulable"], ["demo-sender-0", "Insufficient nvidia.com/gpu"])


def test_a_pod_that_used_too_much_memory_is_told(pod_cluster: PodCluster, pod_namespace: str) -> None:
    ws = pod_cluster.make(pod_namespace, manifest_with("sender", resources={"limits": {"memory": "48Mi"}}))

    def killed() -> bool:
        status = container_state(ws, "demo-sender-0")
        ended = [status.get(name, {}).get("terminated", {}) for name in ("state", "lastState")]
        return any(end.get("reason") == "OOMKilled" for end in ended)

    cause_then_condition(ws, killed, ["OOMKilled"], ["demo-sender-0", "limits.memory"])


def test_a_failing_probe_is_quoted(pod_cluster: PodCluster, pod_namespace: str) -> None:
    # Of a probe that outlasts its time nobody would see what it says.
    times = {"periodSeconds": 1, "failureThreshold": 2, "timeoutSeconds": 60}
    probe = {"exec": {"command": ["ls", "/no-such-file"]}, **times}
    tree = manifest_with("receivers", startupProbe=probe)
    ws = pod_cluster.make(pod_namespace, tree)

    def restarted() -> bool:
        return restarts(ws.pods().get("demo-receivers-0", {"status": {}})) >= 1

    eventually(event(ws, "probe failed"), STARTED_SECONDS)
    cause_then_condition(ws, restarted, ["ProbeFailed"], ["demo-receivers-0", "no-such-file"])


def test_a_crash_is_told_with_the_programs_last_lines(pod_cluster: PodCluster, pod_namespace: str) -> None:
    program = "raise SystemExit('no checkpoint in /weights: is the volume mounted?')"
    tree = manifest_with("receivers", command=["python3", "-c", program])
    ws = pod_cluster.make(pod_namespace, tree)

    def crashed() -> bool:
        return restarts(ws.pods().get("demo-receivers-0", {"status": {}})) >= 1

    cause_then_condition(ws, crashed, ["Crashed"], ["demo-receivers-0", "is the volume mounted?"])
