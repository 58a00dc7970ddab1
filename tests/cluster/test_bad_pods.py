"""Pods that a namespace would not take: what the operator says of them is what the API server's admission says."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from control_plane import ControlPlane, Tree
from operator_process import until_refused
from weightsync_operator.pod_security import beyond_restricted

SECURITY: Tree = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
CASES: dict[str, Tree] = {
    "plain": {},
    "host-network": {"hostNetwork": True},
    "host-pid": {"hostPID": True},
    "host-ipc": {"hostIPC": True},
    "host-path": {"volumes": [{"name": "x", "hostPath": {"path": "/"}}]},
    "nfs": {"volumes": [{"name": "x", "nfs": {"server": "a", "path": "/"}}]},
    "claim": {"volumes": [{"name": "x", "persistentVolumeClaim": {"claimName": "a"}}]},
    "empty-dir": {"volumes": [{"name": "x", "emptyDir": {}}]},
    "root": {"securityContext": {"runAsUser": 0}},
    "not-non-root": {"securityContext": {"runAsNonRoot": False}},
    "user": {"securityContext": {"runAsUser": 1000}},
    "no-seccomp": {"securityContext": {"seccompProfile": None}},
    "unconfined": {"securityContext": {"seccompProfile": {"type": "Unconfined"}}},
    "sysctl": {"securityContext": {"sysctls": [{"name": "net.core.somaxconn", "value": "1"}]}},
    "safe-sysctl": {"securityContext": {"sysctls": [{"name": "net.ipv4.tcp_syncookies", "value": "1"}]}},
    "selinux": {"securityContext": {"seLinuxOptions": {"type": "spc_t"}}},
    "apparmor": {"securityContext": {"appArmorProfile": {"type": "Unconfined"}}},
    "privileged": {"of": {"securityContext": {**SECURITY, "allowPrivilegeEscalation": None, "privileged": True}}},
    "escalation": {"of": {"securityContext": {"capabilities": {"drop": ["ALL"]}}}},
    "no-drop": {"of": {"securityContext": {"allowPrivilegeEscalation": False}}},
    "ipc-lock": {"of": {"securityContext": {**SECURITY, "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}}},
    "bind": {"of": {"securityContext": {**SECURITY, "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}}}},
    "container-root": {"of": {"securityContext": {**SECURITY, "runAsUser": 0}}},
    "container-unconfined": {"of": {"securityContext": {**SECURITY, "seccompProfile": {"type": "Unconfined"}}}},
    "host-port": {"of": {"ports": [{"containerPort": 80, "hostPort": 80}]}},
    "port": {"of": {"ports": [{"containerPort": 80}]}},
    "init": {"initContainers": [{"name": "i", "image": "x", "securityContext": {**SECURITY, "privileged": False}}]},
    "bad-init": {"initContainers": [{"name": "i", "image": "x"}]},
}
"""Over a pod that the level takes; `of`: of its container."""


def pod(name: str, change: Tree) -> Tree:
    container: Tree = {"name": "agent", "image": "x", "securityContext": SECURITY}
    spec: Tree = {
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    change = copy.deepcopy(change)
    container |= change.pop("of", {})
    security = spec["securityContext"] | change.pop("securityContext", {})
    spec |= {**change, "securityContext": {k: v for k, v in security.items() if v is not None}}
    container["securityContext"] = {k: v for k, v in container["securityContext"].items() if v is not None}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


@pytest.fixture
def refusals(cluster: ControlPlane, namespace: str) -> dict[str, str]:
    """What a namespace of the level says of each case that it refuses."""
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    until_refused(cluster, namespace, "violates PodSecurity", "run", "probe", "--image=probe:1")
    trees = [pod(name, change) for name, change in CASES.items()]
    every: dict[str, Any] = {"apiVersion": "v1", "kind": "List", "items": trees}
    done = cluster.run("-n", namespace, "create", "--dry-run=server", "-f", "-", stdin=json.dumps(every), check=False)
    found = re.findall(r'pods "([a-z-]+)" is forbidden: violates PodSecurity "restricted:latest": (.*)', done.stderr)
    # An API server without --allow-privileged comes before the level.
    found += re.findall(r'Pod "(privileged)" is invalid: (.*)', done.stderr)
    taken = re.findall(r"pod/([a-z-]+) created", done.stdout)
    assert sorted([*taken, *(name for name, _ in found)]) == sorted(CASES), done.stderr
    return dict(found)


def test_what_goes_beyond_restricted_is_what_a_restricted_namespace_refuses(refusals: dict[str, str]) -> None:
    said = {name: beyond_restricted(pod(name, change)["spec"]) for name, change in CASES.items()}
    assert {name for name, fields in said.items() if fields} == set(refusals), (said, refusals)
    assert len(refusals) == 20
