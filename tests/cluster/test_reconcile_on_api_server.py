"""The reconciler on a real API server, StatefulSet controller, garbage collector and scheduler; no pod ever runs."""

from __future__ import annotations

import json

from control_plane import Tree
from operator_process import eventually, manifest, until_refused
from reconciling import Operator, applied, children, condition, pod_count, unscheduled_pods


def test_one_pass_makes_every_object_with_an_owner_and_the_pods_follow(operator: Operator) -> None:
    applied(operator, manifest(receivers={"replicas": 2}))
    (done,) = operator.passes("demo")
    assert done.written
    found = children(operator)
    assert sorted(found) == [
        ("ConfigMap", "demo-agents"),
        ("NetworkPolicy", "demo-agents"),
        ("PodDisruptionBudget", "demo-receivers"),
        ("Secret", "demo-keys"),
        ("Service", "demo-agents"),
        ("StatefulSet", "demo-receivers"),
        ("StatefulSet", "demo-sender"),
    ]
    ws = operator.cluster.get("weightsync", "demo", operator.namespace)
    assert ws is not None
    for tree in found.values():
        (owner,) = tree["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (ws["metadata"]["uid"], True)
    assert not ws["metadata"].get("finalizers")
    assert all("kopf" not in name for name in ws["metadata"].get("annotations", {}))

    def pods() -> set[str]:
        return {pod["metadata"]["name"] for pod in operator.cluster.list("pods", operator.namespace)}

    eventually(lambda: pods() == {"demo-sender-0", "demo-receivers-0", "demo-receivers-1"})


def test_a_second_pass_writes_nothing_nor_does_another_operator_s_first(operator: Operator) -> None:
    applied(operator, manifest(receivers={"replicas": 2, "template": template()}))
    operator.passes("demo")
    unscheduled_pods(operator, 3)
    operator.passes("demo", "demo")  # the pods' state goes into the status
    before = operator.cluster.writes()
    assert "patch statefulsets demo-sender" in before
    for done in [*operator.passes("demo", "demo"), *operator.passes("demo")]:
        assert not done.written
    assert operator.cluster.writes()[len(before) :] == []


def template() -> Tree:
    """With values that the API server writes differently, or drops."""
    container = {
        "name": "agent",
        "resources": {"requests": {"cpu": "1000m", "memory": "1024Mi"}, "limits": {"cpu": 2}},
        "env": [{"name": "EMPTY", "value": ""}],
        "volumeMounts": [{"name": "x", "mountPath": "/x", "readOnly": False}],
    }
    return {"spec": {"containers": [container], "volumes": [{"name": "x", "emptyDir": {}}], "tolerations": []}}


def test_what_others_change_or_delete_is_put_right(operator: Operator) -> None:
    applied(operator, manifest(receivers={"replicas": 2}))
    operator.passes("demo")
    kubectl = operator.cluster.kubectl
    kubectl("-n", operator.namespace, "scale", "statefulset/demo-receivers", "--replicas=0")
    kubectl("-n", operator.namespace, "delete", "service/demo-agents")
    kubectl("-n", operator.namespace, "label", "configmap/demo-agents", "weightsync.dev/name-")
    operator.passes("demo")
    found = children(operator)
    assert found["StatefulSet", "demo-receivers"]["spec"]["replicas"] == 2
    assert ("Service", "demo-agents") in found
    assert ("ConfigMap", "demo-agents") in found


def test_kubectl_scale_adds_receivers_and_touches_no_other_pod(operator: Operator) -> None:
    applied(operator, manifest(receivers={"replicas": 1}))
    operator.passes("demo")
    before = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pod_count(operator, 2)}
    operator.cluster.kubectl("-n", operator.namespace, "scale", "weightsync/demo", "--replicas=3")
    operator.passes("demo")
    after = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pod_count(operator, 4)}
    assert before.items() <= after.items()
    operator.passes("demo")
    scale = json.loads(
        operator.cluster.kubectl(
            "get", "--raw",
            f"/apis/weightsync.dev/v1alpha1/namespaces/{operator.namespace}/weightsyncs/demo/scale",
        )
    )  # fmt: skip
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (3, 3)
    assert scale["status"]["selector"] == "weightsync.dev/name=demo,weightsync.dev/role=receiver"
    operator.cluster.kubectl("-n", operator.namespace, "scale", "weightsync/demo", "--replicas=1")
    operator.passes("demo")
    assert ("PodDisruptionBudget", "demo-receivers") not in children(operator), "it is planned from two receivers on"
    pod_count(operator, 2)


def test_suspend_ends_the_pods_and_keeps_the_keys(operator: Operator) -> None:
    applied(operator, manifest())
    operator.passes("demo")
    pod_count(operator, 2)
    keys = children(operator)["Secret", "demo-keys"]["data"]
    patch = ["patch", "weightsync/demo", "--type=merge", "-p"]
    operator.cluster.kubectl("-n", operator.namespace, *patch, '{"spec":{"suspend":true}}')
    operator.passes("demo")
    pod_count(operator, 0)
    assert condition(operator, "Suspended")[:2] == ("True", "Suspended")
    operator.cluster.kubectl("-n", operator.namespace, *patch, '{"spec":{"suspend":false}}')
    operator.passes("demo")
    pod_count(operator, 2)
    assert children(operator)["Secret", "demo-keys"]["data"] == keys


def test_nothing_is_left_of_a_weightsync_deleted_while_the_operator_is_down(operator: Operator) -> None:
    applied(operator, manifest())
    operator.passes("demo")
    pod_count(operator, 2)
    operator.cluster.kubectl("-n", operator.namespace, "delete", "weightsync/demo")
    eventually(lambda: children(operator) == {})
    (done,) = operator.passes("demo")
    assert done.resource is None
    assert children(operator) == {}


def test_children_are_not_made_anew_in_a_foreground_deletion(operator: Operator) -> None:
    tree = manifest()
    tree["metadata"]["finalizers"] = ["example.com/hold"]
    applied(operator, tree)
    operator.passes("demo")
    operator.cluster.kubectl("-n", operator.namespace, "delete", "weightsync/demo", "--wait=false")
    operator.cluster.kubectl("-n", operator.namespace, "delete", "service/demo-agents")
    before = operator.cluster.writes()
    operator.passes("demo")
    assert operator.cluster.writes()[len(before) :] == []
    patch = ["patch", "weightsync/demo", "--type=merge", "-p", '{"metadata":{"finalizers":null}}']
    operator.cluster.kubectl("-n", operator.namespace, *patch)


def test_two_weightsyncs_never_share_an_object(operator: Operator) -> None:
    applied(operator, manifest("one"))
    applied(operator, manifest("two"))
    operator.passes("one", "two", "one", "two")
    owners = [tree["metadata"]["ownerReferences"][0]["name"] for tree in children(operator).values()]
    assert sorted(owners) == ["one"] * 6 + ["two"] * 6


def test_a_template_that_the_api_server_refuses_is_a_condition_that_quotes_it(operator: Operator) -> None:
    applied(operator, manifest(receivers={"template": {"spec": {"dnsPolicy": "Sometimes"}}}))
    operator.passes("demo", "demo")
    status, reason, message = condition(operator, "Ready")
    assert (status, reason) == ("False", "Invalid")
    assert 'spec.template.spec.dnsPolicy: Unsupported value: "Sometimes"' in message
    patch = ["patch", "weightsync/demo", "--type=merge", "-p", '{"spec":{"receivers":{"template":null}}}']
    operator.cluster.kubectl("-n", operator.namespace, *patch)
    operator.passes("demo", "demo")
    assert condition(operator, "Ready")[1] != "Invalid"
    assert ("StatefulSet", "demo-receivers") in children(operator)


def test_a_pod_that_can_t_be_scheduled_is_a_condition_that_quotes_the_scheduler(operator: Operator) -> None:
    applied(operator, manifest())
    operator.passes("demo")

    def told() -> bool:
        operator.passes("demo")
        return condition(operator, "Ready")[1] == "Unschedulable"

    eventually(told)
    message = condition(operator, "Ready")[2]
    assert "pod demo-sender-0" in message
    assert "no nodes available to schedule pods" in message


def test_a_quota_that_forbids_the_pods_is_a_condition_that_quotes_it(operator: Operator) -> None:
    kubectl = operator.cluster.kubectl
    kubectl("-n", operator.namespace, "create", "quota", "none", "--hard=pods=0")
    until_refused(operator.cluster, operator.namespace, "exceeded quota: none", "run", "probe", "--image=probe:1")
    applied(operator, manifest())
    operator.passes("demo")

    def told() -> bool:
        operator.passes("demo")
        return condition(operator, "Ready")[1] == "FailedCreate"

    eventually(told)
    message = condition(operator, "Ready")[2]
    assert "exceeded quota: none" in message
    tree = operator.cluster.get("weightsync", "demo", operator.namespace)
    assert tree is not None
    assert tree["status"]["replicas"] == 0


def test_the_restricted_level_takes_the_pods_and_host_memory_is_refused_with_a_sentence(operator: Operator) -> None:
    label = "pod-security.kubernetes.io/enforce=restricted"
    operator.cluster.kubectl("label", "namespace", operator.namespace, label)
    until_refused(operator.cluster, operator.namespace, "violates PodSecurity", "run", "probe", "--image=probe:1")
    applied(operator, manifest("plain"))
    applied(operator, manifest("host", network={"sharedMemory": "Host"}))
    operator.passes("plain", "host")
    pods = pod_count(operator, 2)
    assert {pod["metadata"]["labels"]["weightsync.dev/name"] for pod in pods} == {"plain"}

    def told() -> bool:
        operator.passes("host")
        return condition(operator, "Ready", "host")[1] == "FailedCreate"

    eventually(told)
    assert 'violates PodSecurity "restricted' in condition(operator, "Ready", "host")[2]


def test_every_placement_is_taken_as_planned(operator: Operator) -> None:
    specs: dict[str, Tree] = {
        "colocated": {"placement": "Colocated", "receivers": {"replicas": 3}},
        "node": {"placement": "Node", "receivers": {"replicas": 7}},
        "claim": {"placement": "Node", "gpus": {"claimTemplate": "two-gpus"}},
        "cpu": {"device": "CPU", "receivers": {"replicas": 2}},
    }
    for name, spec in specs.items():
        applied(operator, manifest(name, **spec))
        (done,) = operator.passes(name)
        assert operator.woken == []
        assert done.status is not None
        assert not any("refused" in c.message for c in done.status.conditions)
    before = operator.cluster.writes()
    operator.passes(*specs)
    assert [w for w in operator.cluster.writes()[len(before) :] if "status" not in w] == []


def test_nothing_of_the_status_is_pruned(operator: Operator) -> None:
    applied(operator, manifest(receivers={"replicas": 2}))
    (done,) = operator.passes("demo")
    assert done.status is not None
    tree = operator.cluster.get("weightsync", "demo", operator.namespace)
    assert tree is not None
    assert tree["status"] == done.status.model_dump(mode="json", by_alias=True, exclude_none=True)


def test_a_user_s_edit_of_the_spec_stands_when_the_status_is_written(operator: Operator) -> None:
    applied(operator, manifest())
    operator.passes("demo")
    patch = ["patch", "weightsync/demo", "--type=merge", "-p", '{"spec":{"steps":{"intervalSeconds":9}}}']
    operator.cluster.kubectl("-n", operator.namespace, *patch)
    operator.passes("demo")
    get = ["get", "weightsync/demo", "-o", "json", "--show-managed-fields"]
    tree = json.loads(operator.cluster.kubectl("-n", operator.namespace, *get))
    assert tree["spec"]["steps"]["intervalSeconds"] == 9
    managers = {entry["manager"]: entry for entry in tree["metadata"]["managedFields"]}
    assert managers["weightsync-operator"]["subresource"] == "status"
    assert set(managers["weightsync-operator"]["fieldsV1"]) == {"f:status"}
