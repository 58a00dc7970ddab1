"""The rights that the chart gives suffice for all that the operator does, and for nothing else."""

from __future__ import annotations

import json
from contextlib import closing

from control_plane import ControlPlane
from helm import (
    Helm,
    InstalledOperator,
    applied,
    new_namespace,
    pod_uids,
    work_through,
)
from kubectl import WAIT, Kubectl, Tree
from operator_process import Sender, eventually, manifest


def test_the_installed_operator_may_do_all_it_does_and_nothing_else(
    plane: ControlPlane, helm: Helm, home: str, team: str
) -> None:
    helm.install(home)
    with InstalledOperator(plane, home) as operator, closing(Sender(team, receivers=2)) as sender:
        eventually(lambda: operator.get("readyz") == "ok\n")
        work_through(plane, team, sender)
        # Pods that are not ready roll together, the operator sees to it.
        before = set(pod_uids(plane, team).values())
        plane.kubectl("-n", team, "patch", "ws/demo", "--type=merge", "-p", '{"spec": {"agent": {"image": "agent:2"}}}')
        eventually(lambda: len(after := pod_uids(plane, team)) == 3 and not before & set(after.values()))
        assert operator.forbidden() == []
        # What it did last is seen a moment before it is in the log.
        eventually(lambda: ("delete", "pods") in {granted(event) for event in operator.requests()})
        used = {granted(event) for event in operator.requests()}
    allowed = rights(plane, "clusterrole/weightsync") | rights(plane, "role/weightsync-lease", home)
    assert {right for right in used if not right[1].startswith("/")} <= allowed
    assert allowed - used == {
        # Server-side apply is authorized as a creation where there is nothing yet, and logged as a patch.
        *(("create", kind) for kind in ("configmaps", "secrets", "services", "statefulsets")),
        *(("create", kind) for kind in ("networkpolicies", "poddisruptionbudgets")),
        ("update", "weightsyncs/finalizers"),  # what admission asks, where owner references block a deletion
        ("create", "leases"),  # the chart makes it; the operator where somebody deleted it
    }


def granted(event: Tree) -> tuple[str, str]:
    reference = event["objectRef"] if "objectRef" in event else {"resource": event["requestURI"]}
    return event["verb"], reference["resource"] + (f"/{reference['subresource']}" if "subresource" in reference else "")


def rights(cluster: Kubectl, role: str, where: str = "default") -> set[tuple[str, str]]:
    tree = json.loads(cluster.kubectl("-n", where, "get", role, "-o", "json"))
    return {(verb, what) for rule in tree["rules"] for what in rule["resources"] for verb in rule["verbs"]}


def test_an_operator_of_some_namespaces_has_rights_in_no_other(
    plane: ControlPlane, helm: Helm, home: str, team: str
) -> None:
    with new_namespace(plane, "other") as other, closing(Sender(team, receivers=2)) as sender:
        helm.install(home, "--set", f"watchNamespaces={{{team}}}")
        with InstalledOperator(plane, home) as operator:
            eventually(lambda: operator.get("readyz") == "ok\n")
            applied(plane, manifest(), other)
            work_through(plane, team, sender)
            assert operator.forbidden() == []
            assert plane.list("pods", other) == []
            assert not may(plane, operator.user, "list", "secrets", other)
            assert not may(plane, operator.user, "create", "statefulsets", other)
            assert not may(plane, operator.user, "list", "secrets", home)
            assert may(plane, operator.user, "list", "secrets", team)


def test_one_of_its_namespaces_that_goes_does_not_stop_the_operator_of_several(
    plane: ControlPlane, helm: Helm, home: str, team: str
) -> None:
    with new_namespace(plane, "gone") as gone:
        helm.install(home, "--set", f"watchNamespaces={{{team},{gone}}}")
        with InstalledOperator(plane, home) as operator:
            eventually(lambda: operator.get("readyz") == "ok\n")
            plane.kubectl("delete", "namespace", gone, WAIT)
            applied(plane, manifest("before"), team)
            eventually(lambda: len(plane.list("pods", team)) == 2)
            operator.process.terminate()
            assert operator.ended() == 0
        with InstalledOperator(plane, home):
            applied(plane, manifest("after"), team)
            eventually(lambda: len(plane.list("pods", team)) == 4)


def may(cluster: Kubectl, user: str, verb: str, what: str, where: str) -> bool:
    resource, _, part = what.partition("/")
    asked = ["auth", "can-i", verb, resource, *([f"--subresource={part}"] if part else []), "--as", user]
    return cluster.run("-n", where, *asked, check=False).stdout.strip() == "yes"


def test_the_clusters_roles_reach_weightsyncs(plane: ControlPlane, helm: Helm, home: str, team: str) -> None:
    for role in ("view", "edit", "admin"):
        plane.kubectl("-n", team, "create", "rolebinding", role, f"--clusterrole={role}", f"--user={role}er")
    assert not may(plane, "viewer", "get", "weightsyncs.weightsync.dev", team)
    helm.install(home)
    eventually(lambda: may(plane, "viewer", "get", "weightsyncs.weightsync.dev", team))
    eventually(lambda: may(plane, "editer", "create", "weightsyncs.weightsync.dev", team))
    eventually(lambda: may(plane, "adminer", "delete", "weightsyncs.weightsync.dev", team))
    assert may(plane, "editer", "patch", "weightsyncs.weightsync.dev/scale", team)
    assert not may(plane, "viewer", "create", "weightsyncs.weightsync.dev", team)
    # What the operator alone writes.
    assert not may(plane, "editer", "patch", "weightsyncs.weightsync.dev/status", team)
