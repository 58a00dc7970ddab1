"""What is in the way, or asks for too much: it is left alone, and a condition names it and says what to do."""

from __future__ import annotations

import json

import pytest
from control_plane import Tree
from operator_process import manifest, until_refused
from reconciling import Operator, applied, children, condition, pod_count

POD_SPEC: Tree = {"containers": [{"name": "mine", "image": "mine:1"}]}
MINE: Tree = {"matchLabels": {"app": "mine"}}
IN_THE_WAY: dict[str, Tree] = {
    "Secret/demo-keys": {"apiVersion": "v1", "stringData": {"mine": "1"}},
    "ConfigMap/demo-agents": {"apiVersion": "v1", "data": {"mine": "1"}},
    "Service/demo-agents": {"apiVersion": "v1", "spec": {"ports": [{"port": 80}], "selector": {"mine": "1"}}},
    "NetworkPolicy/demo-agents": {"apiVersion": "networking.k8s.io/v1", "spec": {"podSelector": MINE}},
    "PodDisruptionBudget/demo-receivers": {"apiVersion": "policy/v1", "spec": {"maxUnavailable": 1, "selector": MINE}},
    "StatefulSet/demo-receivers": {
        "apiVersion": "apps/v1",
        "spec": {
            "replicas": 0,
            "serviceName": "mine",
            "selector": MINE,
            "template": {"metadata": {"labels": {"app": "mine"}}, "spec": POD_SPEC},
        },
    },
}


def content(operator: Operator, kind: str, name: str) -> Tree:
    """An object but for its status, which its controller may write at any moment."""
    tree = operator.cluster.get(kind, name, operator.namespace)
    assert tree is not None
    tree.pop("status", None)
    del tree["metadata"]["resourceVersion"]
    return tree


@pytest.mark.parametrize("labelled", [False, True], ids=["a stranger's", "with our label"])
@pytest.mark.parametrize("place", IN_THE_WAY)
def test_an_object_in_the_way_is_left_alone_and_named(operator: Operator, place: str, labelled: bool) -> None:
    kind, _, name = place.partition("/")
    labels = {"weightsync.dev/name": "demo"} if labelled else {}
    applied(operator, {**IN_THE_WAY[place], "kind": kind, "metadata": {"name": name, "labels": labels}})
    before = content(operator, kind, name)
    applied(operator, manifest(receivers={"replicas": 2}))
    writes = len(operator.cluster.writes())
    operator.passes("demo", "demo")
    assert content(operator, kind, name) == before
    status, reason, message = condition(operator, "Ready")
    assert (status, reason) == ("False", "NameTaken")
    assert message.startswith(f"{kind} {name} was not made by the operator, and is left alone: delete or rename it")
    assert {w.split()[1] for w in operator.cluster.writes()[writes:]} == {"weightsyncs/status"}, "nothing is half made"


def test_it_goes_on_once_the_name_is_free(operator: Operator) -> None:
    applied(operator, {**IN_THE_WAY["Secret/demo-keys"], "kind": "Secret", "metadata": {"name": "demo-keys"}})
    applied(operator, manifest())
    operator.passes("demo", "demo")
    assert condition(operator, "Ready")[1] == "NameTaken"
    operator.cluster.kubectl("-n", operator.namespace, "delete", "secret/demo-keys")
    operator.passes("demo", "demo")
    assert ("Secret", "demo-keys") in children(operator)
    assert condition(operator, "Ready")[1] != "NameTaken"


def test_an_object_of_another_weightsync_is_named_with_its_owner(operator: Operator) -> None:
    for name in ("demo", "other"):
        applied(operator, manifest(name))
        operator.passes(name)
    others = operator.cluster.get("Secret", "other-keys", operator.namespace)
    assert others is not None
    owner = others["metadata"]["ownerReferences"][0]
    patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
    operator.cluster.kubectl("-n", operator.namespace, "patch", "secret/demo-keys", "--type=merge", "-p", patch)
    operator.passes("demo", "demo")
    assert "Secret demo-keys belongs to WeightSync other, and is left alone" in condition(operator, "Ready")[2]


def test_a_service_account_of_the_same_name_is_nobody_s_concern(operator: Operator) -> None:
    """Agents have none of their own, and no token."""
    for name in ("demo", "demo-agents", "demo-sender"):
        applied(operator, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}})
    applied(operator, manifest())
    operator.passes("demo")
    pods = pod_count(operator, 2)
    assert {pod["spec"]["serviceAccountName"] for pod in pods} == {"default"}
    assert all(not any("token" in volume["name"] for volume in pod["spec"]["volumes"]) for pod in pods)


def test_names_of_63_characters_that_differ_at_the_end_share_nothing(operator: Operator) -> None:
    one, other = "a" * 63, "a" * 62 + "b"
    for name in (one, other):
        applied(operator, manifest(name, receivers={"replicas": 2}))
        operator.passes(name, name)
        assert not any(c in condition(operator, "Ready", name)[1] for c in ("NameTaken", "Invalid"))
    pod_count(operator, 6)
    assert len(children(operator)) == 14


def test_labels_of_a_template_can_t_put_pods_into_another_weightsync(operator: Operator) -> None:
    applied(operator, manifest("one"))
    stolen = {"metadata": {"labels": {"weightsync.dev/name": "one"}}}
    applied(operator, manifest("two", receivers={"template": stolen}))
    operator.passes("one", "two")
    status, reason, message = condition(operator, "Ready", "two")
    assert (status, reason) == ("False", "TemplateClash")
    assert 'spec.receivers.template.metadata.labels.weightsync.dev/name: is "one", but the agent needs "two"' in message
    pods = pod_count(operator, 2)
    assert {pod["metadata"]["labels"]["weightsync.dev/name"] for pod in pods} == {"one"}


def test_two_weightsyncs_with_equal_labels_in_their_templates_keep_their_own_pods(operator: Operator) -> None:
    labels = {"metadata": {"labels": {"app": "engine", "app.kubernetes.io/name": "engine"}}}
    for name in ("one", "two"):
        applied(operator, manifest(name, sender=sender(labels), receivers={"template": labels, "replicas": 2}))
    operator.passes("one", "two", "one", "two")
    owners = {pod["metadata"]["name"]: pod["metadata"]["ownerReferences"][0]["name"] for pod in pod_count(operator, 6)}
    assert owners["one-receivers-1"] == "one-receivers"
    assert owners["two-receivers-1"] == "two-receivers"
    operator.passes("one", "two")
    for name in ("one", "two"):
        tree = operator.cluster.get("weightsync", name, operator.namespace)
        assert tree is not None
        assert tree["status"]["replicas"] == 2


def sender(template: Tree) -> Tree:
    return {"source": {"synthetic": {"model": "qwen3-0.6b"}}, "template": template}


@pytest.mark.parametrize("field", ["hostPID", "hostIPC"])
def test_a_template_with_a_host_s_namespace_is_a_condition_and_nothing_is_made(operator: Operator, field: str) -> None:
    applied(operator, manifest(sender=sender({"spec": {field: True}})))
    operator.passes("demo")
    assert children(operator) == {}
    status, reason, message = condition(operator, "Ready")
    assert (status, reason) == ("False", "TemplateClash")
    assert f"spec.sender.template.spec.{field}" in message


def test_a_namespace_that_takes_no_more_objects_is_a_condition_that_quotes_it(operator: Operator) -> None:
    kubectl = operator.cluster.kubectl
    kubectl("-n", operator.namespace, "create", "quota", "full", "--hard=secrets=0,count/statefulsets.apps=0")
    until_refused(operator.cluster, operator.namespace, "exceeded quota: full", "create", "secret", "generic", "probe")
    applied(operator, manifest())
    operator.passes("demo", "demo")
    status, reason, message = condition(operator, "Ready")
    assert (status, reason) == ("False", "Forbidden")
    assert "the API server refused a part of it" in message
    assert "exceeded quota: full" in message


def test_what_the_spec_asks_beyond_the_restricted_level_is_a_condition(operator: Operator) -> None:
    applied(operator, manifest("plain"))
    applied(operator, manifest("host", network={"sharedMemory": "Host"}))
    root = {"spec": {"containers": [{"name": "engine", "image": "x", "securityContext": {"privileged": True}}]}}
    applied(operator, manifest("root", receivers={"template": root}))
    operator.passes("plain", "host", "root")
    assert condition(operator, "PodsRestricted", "plain")[:2] == ("True", "Restricted")
    status, reason, message = condition(operator, "PodsRestricted", "host")
    assert (status, reason) == ("False", "AsksForMore")
    assert "(network.sharedMemory: Host): host-sender: hostIPC is true; host-receivers: hostIPC is true" in message
    message = condition(operator, "PodsRestricted", "root")[2]
    assert "root-receivers: containers[engine].securityContext.privileged is true" in message
