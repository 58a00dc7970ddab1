"""The NetworkPolicy, where something enforces it: the group and the operator reach the agents, and nobody else does."""

from __future__ import annotations

import json

import pytest
from kubectl import WAIT, Tree
from operator_process import eventually
from pod_cluster import STARTED_SECONDS, PodCluster, WeightSyncOnCluster, manifest, must_not_skip

pytestmark = pytest.mark.timeout(900)

CONTROL, HTTP, ENGINE = 7400, 8080, 9000
TRY = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])).close()
    print("reached")
except OSError as error:
    print("refused" if isinstance(error, ConnectionRefusedError) else "no answer")
"""


@pytest.fixture
def enforced(pod_cluster: PodCluster) -> None:
    if not json.loads(pod_cluster.kubectl("get", "nodes", "-l", "weightsync.dev/network-policies=enforced", "-o=json"))[
        "items"
    ]:
        reason = (
            "nothing is known to enforce NetworkPolicies here: no node has weightsync.dev/network-policies=enforced"
        )
        if must_not_skip():
            pytest.fail(reason)
        pytest.skip(reason)


def stranger(cluster: PodCluster, namespace: str, image: str) -> None:
    """A pod that has nothing to do with the group. Gone with its namespace."""
    container = {
        "name": "stranger",
        "image": image,
        "command": ["sleep", "3600"],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "stranger"},
        "spec": {
            "containers": [container],
            "terminationGracePeriodSeconds": 0,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        },
    }
    assert cluster.apply(pod, namespace).returncode == 0
    cluster.run("-n", namespace, "wait", "--for=condition=Ready", "pod/stranger", WAIT)


def tries(ws: WeightSyncOnCluster, namespace: str, pod: str, address: str, port: int, seconds: float = 60) -> str:
    """What becomes of a connection from a pod. `seconds`: after which there is no answer."""
    words = ("-n", namespace, "exec", pod, "--", "python3", "-c", TRY, address, str(port), str(seconds))
    return ws.cluster.kubectl(*words).strip()


@pytest.mark.usefixtures("enforced")
def test_the_group_and_the_operator_reach_agents_and_nobody_else_does(
    pod_cluster: PodCluster, pod_namespace: str
) -> None:
    tree = manifest()
    # An engine that serves its own clients beside the agent.
    container = tree["spec"]["receivers"]["template"]["spec"]["containers"][0]
    tree["spec"]["receivers"]["template"]["spec"]["containers"] = [
        {**container, "ports": [{"name": "engine", "containerPort": ENGINE}]}
    ]
    ws = pod_cluster.make(pod_namespace, tree)
    ws.wait_ready(STARTED_SECONDS)
    pods = ws.pods()
    sender, receiver = (pods[f"demo-{name}-0"]["status"]["podIP"] for name in ("sender", "receivers"))
    image = pods["demo-sender-0"]["spec"]["containers"][0]["image"]
    with pod_cluster.namespace() as elsewhere:
        for namespace in (elsewhere, pod_namespace):
            stranger(pod_cluster, namespace, image)
            assert tries(ws, namespace, "stranger", sender, CONTROL, 3) == "no answer"
            assert tries(ws, namespace, "stranger", sender, HTTP, 3) == "no answer"
            assert tries(ws, namespace, "stranger", receiver, HTTP, 3) == "no answer"
            # Nobody listens there; the policy lets it through to be told so.
            assert tries(ws, namespace, "stranger", receiver, ENGINE) == "refused"
    assert tries(ws, pod_namespace, "demo-receivers-0", sender, CONTROL) == "reached"
    assert tries(ws, pod_namespace, "demo-sender-0", receiver, HTTP) == "reached"
    # The operator reads reports, and the kubelet's probes go on.
    step = ws.step()
    eventually(lambda: ws.step() >= step + 3)
    eventually(lambda: ws.condition()["status"] == "True" and all(ready(pod) for pod in ws.pods().values()))


def ready(pod: Tree) -> bool:
    return all(status["ready"] for status in pod["status"]["containerStatuses"])
