"""Why an agent does not run is told in Kubernetes' own words: shapes of pods and events as a kubelet reports them."""

from __future__ import annotations

from typing import Any

import pytest
from operator_samples import planned, weightsync
from weightsync_operator.platform import ObservedAgent
from weightsync_operator.pod_status import observe_agents, trimmed, wants_events

TREE = dict[str, Any]
PLAN = planned(weightsync())
POD = "demo-receivers-0"


def pod(state: TREE | None = None, *, last: TREE | None = None, restarts: int = 0, **status: Any) -> TREE:
    container = {"name": "engine", "env": [{"name": "WEIGHTSYNC_AGENTS", "value": "receiver:1@0"}]}
    statuses = []
    if state is not None:
        statuses = [
            {"name": "logs", "state": {"running": {}}, "restartCount": 0},
            {"name": "engine", "state": state, "lastState": last or {}, "restartCount": restarts},
        ]
    tree = {
        "metadata": {"name": POD, "uid": "p1", "labels": {}, "managedFields": [{}]},
        "spec": {"nodeName": "node-a", "containers": [{"name": "logs"}, container], "volumes": [{}]},
        "status": {"phase": "Pending", "containerStatuses": statuses, **status},
    }
    return trimmed(tree)


def seen(tree: TREE, events: list[TREE] | None = None) -> ObservedAgent:
    (agent,) = [a for a in observe_agents(PLAN, {POD: tree}, {POD: events or []}) if a.rank == 1]
    return agent


def warning(reason: str, message: str) -> TREE:
    return {"type": "Warning", "reason": reason, "message": message}


def test_a_running_agent_is_seen_with_its_node_and_its_container_s_restarts() -> None:
    agent = seen(pod({"running": {"startedAt": "x"}}, restarts=2, phase="Running"))
    assert (agent.running, agent.node, agent.restarts, agent.reason, agent.exit_code) == (True, "node-a", 2, "", None)


CRASHED = {"exitCode": 1, "reason": "Error", "message": "RuntimeError: no such file\n"}
KILLED = {"exitCode": 137, "reason": "Error", "startedAt": "2026-01-01T10:00:05Z"}
UNHEALTHY = warning("Unhealthy", "Liveness probe failed: Get http://10.0.0.1:8080/healthz: connection refused")
KILLING = {
    "type": "Normal",
    "reason": "Killing",
    "message": "Container engine failed liveness probe, will be restarted",
    "lastTimestamp": "2026-01-01T10:00:05Z",
}


def test_an_agent_that_was_started_again_has_its_cause_until_it_is_ready() -> None:
    again = {"running": {"startedAt": "x"}}
    tree = pod(again, last={"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, restarts=1, phase="Running")
    agent = seen(tree)
    assert (agent.running, agent.reason, agent.exit_code) == (True, "OOMKilled", None)
    tree["status"]["containerStatuses"][1]["ready"] = True
    assert seen(tree).reason == ""
    assert wants_events(pod(again, last={"terminated": KILLED}, restarts=1, phase="Running"))
    assert not wants_events(pod(again, phase="Running"))


@pytest.mark.parametrize(
    ("tree", "events", "reason", "message"),
    [
        (
            pod({"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x:1": not found'}}),
            [],
            "ImagePullBackOff",
            'Back-off pulling image "x:1": not found',
        ),
        (
            pod({"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "hf" not found'}}),
            [],
            "CreateContainerConfigError",
            'secret "hf" not found',
        ),
        (
            pod(
                conditions=[
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
                    }
                ]
            ),
            [],
            "Unschedulable",
            "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        ),
        (
            pod({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}, last={"terminated": CRASHED}),
            [],
            "Crashed",
            "container engine exited with code 1: RuntimeError: no such file",
        ),
        (
            pod({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}),
            [],
            "OOMKilled",
            "container engine was killed because it used more memory than its limit: raise "
            "agent.resources.limits.memory; /dev/shm counts too",
        ),
        (
            pod({"waiting": {"reason": "CrashLoopBackOff"}}, last={"terminated": KILLED}),
            [UNHEALTHY, KILLING],
            "ProbeFailed",
            f"container engine was restarted: {UNHEALTHY['message']}",
        ),
        (pod({"terminated": KILLED}), [], "Crashed", "container engine exited with code 137"),
        (
            pod({"terminated": {**KILLED, "exitCode": 0}}),
            [UNHEALTHY, KILLING],
            "ProbeFailed",
            f"container engine was restarted: {UNHEALTHY['message']}",
        ),
        # A probe that failed while it started, or that ended the container before this one, is no cause.
        (pod({"terminated": KILLED}), [UNHEALTHY], "Crashed", "container engine exited with code 137"),
        (
            pod({"terminated": KILLED}),
            [{**KILLING, "lastTimestamp": "2026-01-01T09:59:59Z"}, UNHEALTHY],
            "Crashed",
            "container engine exited with code 137",
        ),
        (
            pod({"waiting": {"reason": "ContainerCreating"}}),
            [warning("FailedMount", 'MountVolume.SetUp failed for volume "w": configmap "w" not found')],
            "FailedMount",
            'MountVolume.SetUp failed for volume "w": configmap "w" not found',
        ),
        (
            pod(phase="Failed", reason="UnexpectedAdmissionError", message="Allocate failed: no healthy devices"),
            [],
            "UnexpectedAdmissionError",
            "Allocate failed: no healthy devices",
        ),
        (pod({"waiting": {"reason": "ContainerCreating"}}), [], "", "the pod is being started"),
    ],
    ids=str,
)
def test_the_cause_is_quoted(tree: TREE, events: list[TREE], reason: str, message: str) -> None:
    agent = seen(tree, events)
    assert not agent.running
    assert (agent.reason, agent.message) == (reason, message)


def test_a_pod_that_is_refused_is_no_pod_but_has_its_reason() -> None:
    refusal = warning("FailedCreate", "create Pod demo-receivers-0 failed: pods is forbidden: exceeded quota: gpus")
    agents = observe_agents(PLAN, {}, {"demo-receivers": [refusal]})
    assert [(a.rank, a.exists, a.reason, a.message) for a in agents] == [(1, False, "FailedCreate", refusal["message"])]
    assert observe_agents(PLAN, {}, {}) == ()


def test_an_init_container_that_fails_is_why_the_agent_waits() -> None:
    init = {"name": "fetch", "state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}}}
    agent = seen(pod({"waiting": {"reason": "PodInitializing"}}, initContainerStatuses=[init]))
    assert (agent.reason, agent.message) == ("ErrImagePull", "not found")


def test_events_are_asked_for_only_where_the_pod_itself_does_not_tell() -> None:
    assert not wants_events(pod({"running": {}}, phase="Running"))
    assert not wants_events(pod({"waiting": {"reason": "ImagePullBackOff"}}))
    assert not wants_events(pod(conditions=[{"type": "PodScheduled", "status": "False"}]))
    assert not wants_events(pod())
    assert wants_events(pod({"waiting": {"reason": "ContainerCreating"}}))
    assert wants_events(pod({"waiting": {"reason": "CrashLoopBackOff"}}, last={"terminated": KILLED}))


def test_a_long_message_keeps_its_end() -> None:
    long = "x" * 5000 + " the cause"
    agent = seen(pod({"terminated": {"exitCode": 1, "message": long}}))
    assert len(agent.message) <= 1024
    assert agent.message.endswith("the cause")
