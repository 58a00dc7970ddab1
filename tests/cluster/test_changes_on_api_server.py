"""A change of a spec reaches the pods once, and those that hold nothing at once."""

from __future__ import annotations

import json

from control_plane import Tree
from operator_process import eventually, manifest
from reconciling import Operator, applied, children, condition, pod_count

CLAIMS: Tree = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "ResourceClaimTemplate",
    "metadata": {"name": "one-gpu"},
    "spec": {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.example.com"}}]}}},
}


def uids(operator: Operator) -> dict[str, str]:
    return {p["metadata"]["name"]: p["metadata"]["uid"] for p in operator.cluster.list("pods", operator.namespace)}


def images(operator: Operator) -> set[str]:
    pods = operator.cluster.list("pods", operator.namespace)
    return {pod["spec"]["containers"][0]["image"] for pod in pods}


def revisions(operator: Operator, of: str) -> int:
    found = operator.cluster.list("controllerrevisions", operator.namespace)
    return sum(r["metadata"]["ownerReferences"][0]["name"] == of for r in found)


def change(operator: Operator, spec: Tree) -> None:
    patch = ["patch", "weightsync/demo", "--type=merge", "-p", json.dumps({"spec": spec})]
    operator.cluster.kubectl("-n", operator.namespace, *patch)


def test_pods_that_hold_nothing_are_replaced_together(operator: Operator) -> None:
    """Alone, the controller would replace the last, and wait for ever until it is ready."""
    applied(operator, manifest(receivers={"replicas": 3}, agent={"image": "mistyped:1"}))
    operator.passes("demo")
    pod_count(operator, 4)
    before = uids(operator)
    change(operator, {"agent": {"image": "right:1"}})

    def replaced() -> bool:
        operator.passes("demo")
        return images(operator) == {"right:1"} and len(uids(operator)) == 4

    eventually(replaced)
    after = uids(operator)
    assert all(before[name] != after[name] for name in before)
    operator.passes("demo", "demo")
    assert uids(operator) == after, "once, and no more"


def test_a_receiver_that_is_ready_is_left_to_the_controller(operator: Operator) -> None:
    applied(operator, manifest(receivers={"replicas": 3}))
    operator.passes("demo")
    pod_count(operator, 4)
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    patch = ["--subresource=status", "--type=merge", "-p", json.dumps({"status": status})]
    operator.cluster.kubectl("-n", operator.namespace, "patch", "pod/demo-receivers-0", *patch)
    before = uids(operator)
    change(operator, {"agent": {"image": "other:1"}})

    def others_replaced() -> bool:
        operator.passes("demo")
        now = uids(operator)
        return len(now) == 4 and all(now[f"demo-receivers-{n}"] != before[f"demo-receivers-{n}"] for n in (1, 2))

    eventually(others_replaced)
    operator.passes("demo", "demo")
    assert uids(operator)["demo-receivers-0"] == before["demo-receivers-0"]


def test_several_changes_at_once_are_one_revision(operator: Operator) -> None:
    applied(operator, manifest(receivers={"replicas": 1}))
    operator.passes("demo", "demo")
    pod_count(operator, 2)
    assert revisions(operator, "demo-receivers") == 1
    change(
        operator,
        {
            "agent": {"image": "other:1", "env": [{"name": "A", "value": "b"}]},
            "transfer": {"bucketSize": "64Mi"},
            "receivers": {"template": {"spec": {"nodeSelector": {"a": "b"}}}},
        },
    )
    operator.passes("demo", "demo", "demo")
    eventually(lambda: [revisions(operator, of) for of in ("demo-receivers", "demo-sender")] == [2, 2])
    operator.passes("demo", "demo")
    assert [revisions(operator, of) for of in ("demo-receivers", "demo-sender")] == [2, 2]


def test_more_receivers_are_no_new_revision(operator: Operator) -> None:
    applied(operator, manifest(receivers={"replicas": 1}))
    operator.passes("demo")
    before = {pod["metadata"]["uid"] for pod in pod_count(operator, 2)}
    change(operator, {"receivers": {"replicas": 3}})
    operator.passes("demo", "demo")
    assert before <= {pod["metadata"]["uid"] for pod in pod_count(operator, 4)}
    assert revisions(operator, "demo-receivers") == 1


def test_trainer_and_engine_of_different_images_share_one_claim(operator: Operator) -> None:
    applied(operator, CLAIMS)
    trainer = {"spec": {"containers": [{"name": "trainer", "image": "trainer:1", "command": ["train"]}]}}
    engine = {"spec": {"containers": [{"name": "engine", "image": "engine:1", "command": ["serve"]}]}}
    spec: Tree = {
        "placement": "Colocated",
        "gpus": {"claimTemplate": "one-gpu"},
        "sender": {"source": {"trainer": {}}, "template": trainer},
        "receivers": {"template": engine},
    }
    applied(operator, {**manifest(), "spec": spec})
    operator.passes("demo", "demo")
    (pod,) = pod_count(operator, 1)
    assert {c["name"]: c["image"] for c in pod["spec"]["containers"]} == {
        "sender": "trainer:1",
        "receivers": "engine:1",
    }
    assert pod["spec"]["resourceClaims"] == [{"name": "gpus", "resourceClaimTemplateName": "one-gpu"}]
    assert all(c["resources"]["claims"] == [{"name": "gpus"}] for c in pod["spec"]["containers"])
    assert pod["spec"]["shareProcessNamespace"] is True
    before = operator.cluster.writes()
    operator.passes("demo")
    assert [w for w in operator.cluster.writes()[len(before) :] if "status" not in w] == []
    assert condition(operator, "PodsRestricted")[0] == "True"
    assert ("StatefulSet", "demo-group") in children(operator)
