"""Pure: a plan -> the Kubernetes objects that should exist, as trees for server-side apply.

Every object carries the WeightSync's labels, an owner reference, and the hash of what was planned: a later pass
applies it again only where that, or what the API server holds, differs.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightsync_api.v1alpha1 import API_VERSION, KIND

from .curve_keys import CurveKeys
from .kinds import (
    CONFIG_MAP,
    DISRUPTION_BUDGET,
    NETWORK_POLICY,
    PLACES,
    SECRET,
    SERVICE,
    STATEFUL_SET,
)
from .plan import HTTP_PORT, LABEL_NAME, LABEL_ROLE, Plan, PodRole, PodSet, child_name
from .platform import Problem
from .pod_security import beyond_restricted
from .pods import CONFIG_FILE, Tree, config_name, keys_name, pod_template

MANAGER = "weightsync-operator"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
ANNOTATION_HASH = "weightsync.dev/planned"
"""Of an object: hash of what was applied."""
ANNOTATION_CONFIG = "weightsync.dev/config"
"""Of a pod: hash of the agents' configuration; another one rolls the pods."""
ANNOTATION_KEYS = "weightsync.dev/keys"
"""Of a pod: fingerprint of the CURVE keys."""


@dataclass(frozen=True)
class Options:
    """What the operator's installation decides."""

    image: str = ""
    """The agents', where a spec names none."""
    operator_namespace: str = ""
    """Where the operator runs; empty: any namespace."""
    operator_labels: Mapping[str, str] = field(default_factory=lambda: {"app.kubernetes.io/name": "weightsync"})
    """Of the operator's pods: only they and the group itself reach the agents."""


@dataclass(frozen=True)
class Rendered:
    """The objects of one plan, in the order in which they are applied, and what stands against it."""

    objects: Sequence[Tree]
    problems: Sequence[Problem]
    beyond_restricted: Sequence[str] = ()
    """What of the pods the Pod Security level restricted refuses."""


def render(plan: Plan, options: Options, keys: CurveKeys | None = None) -> Rendered:
    """The objects of a plan. `keys`: None where none are known yet; the Secret then has no data."""
    problems: list[Problem] = []
    beyond: list[str] = []
    objects = [_config_map(plan)]
    if plan.config.curve_dir:
        objects.append(_secret(plan, keys))
    objects += [_service(plan), _network_policy(plan, options)]
    for pods in plan.pod_sets:
        if pods.role == PodRole.RECEIVER and pods.replicas > 1:
            objects.append(_disruption_budget(plan, pods))
    for pods in plan.pod_sets:
        template, found = pod_template(plan, pods, options.image)
        problems += found
        beyond += [f"{pods.name}: {what}" for what in beyond_restricted(template.get("spec") or {})]
        objects.append(_stateful_set(plan, pods, template, keys))
    for tree in objects:
        tree["metadata"].setdefault("annotations", {})[ANNOTATION_HASH] = digest(tree)
    return Rendered(objects, list(dict.fromkeys(problems)), beyond)


def digest(tree: Any) -> str:
    """16 hexadecimal digits of a tree of JSON values."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def child_names(plan: Plan) -> list[tuple[str, str]]:
    """(kind, name) of every object that is in a plan of this WeightSync at some time."""
    names = [(CONFIG_MAP, config_name(plan)), (SECRET, keys_name(plan)), (SERVICE, plan.service)]
    names += [(NETWORK_POLICY, plan.service), (DISRUPTION_BUDGET, child_name(plan.name, "receivers"))]
    return names + [(STATEFUL_SET, pods.name) for pods in plan.pod_sets]


def _object(plan: Plan, kind: str, name: str, **body: Any) -> Tree:
    metadata: Tree = {
        "name": name,
        "namespace": plan.namespace,
        "labels": {LABEL_NAME: plan.name, LABEL_MANAGED_BY: MANAGER},
    }
    if plan.config.uid:
        metadata["ownerReferences"] = [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": plan.name,
                "uid": plan.config.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
    return {"apiVersion": PLACES[kind].api_version, "kind": kind, "metadata": metadata, **body}


def _config_map(plan: Plan) -> Tree:
    text = plan.config.model_dump_json(by_alias=True, indent=1)
    return _object(plan, CONFIG_MAP, config_name(plan), data={CONFIG_FILE: text})


def _config_hash(plan: Plan) -> str:
    """Without the number of receivers: a running sender takes new ones in, and only its next start reads it."""
    return digest(plan.config.model_dump(mode="json", exclude={"receivers"}))


def _secret(plan: Plan, keys: CurveKeys | None) -> Tree:
    files = keys.files if keys else {}
    data = {name: base64.b64encode(text.encode()).decode() for name, text in sorted(files.items())}
    return _object(plan, SECRET, keys_name(plan), type="Opaque", **({"data": data} if data else {}))


def _service(plan: Plan) -> Tree:
    spec = {
        "clusterIP": "None",
        # Names must resolve before the pods are ready: they become ready by what they tell each other.
        "publishNotReadyAddresses": True,
        "selector": {LABEL_NAME: plan.name},
        "ports": [{"name": "http", "port": HTTP_PORT, "targetPort": HTTP_PORT, "protocol": "TCP"}],
    }
    return _object(plan, SERVICE, plan.service, spec=spec)


def _network_policy(plan: Plan, options: Options) -> Tree:
    """Lets the group in on every port (NCCL and gloo choose theirs), the operator on the agents' HTTP, and anybody on
    ports that containers of the templates declare: an engine serves its own clients."""
    operator: Tree = {"podSelector": {"matchLabels": dict(options.operator_labels)}, "namespaceSelector": {}}
    if options.operator_namespace:
        operator["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": options.operator_namespace}}
    most = max(len(pods.agents) for pods in plan.pod_sets)
    http: Tree = {"protocol": "TCP", "port": HTTP_PORT}
    if most > 1:
        http["endPort"] = HTTP_PORT + most - 1
    ingress: list[Tree] = [
        {"from": [{"podSelector": {"matchLabels": {LABEL_NAME: plan.name}}}]},
        {"from": [operator], "ports": [http]},
    ]
    declared = _declared_ports(plan)
    if declared:
        ingress.append({"ports": declared})
    spec = {"podSelector": {"matchLabels": {LABEL_NAME: plan.name}}, "policyTypes": ["Ingress"], "ingress": ingress}
    return _object(plan, NETWORK_POLICY, plan.service, spec=spec)


def _declared_ports(plan: Plan) -> list[Tree]:
    found = set()
    for pods in plan.pod_sets:
        for template in (pods.sender_template, pods.receiver_template):
            for container in _list(_tree(template.get("spec")).get("containers")):
                for port in _list(_tree(container).get("ports")):
                    number = _tree(port).get("containerPort")
                    if isinstance(number, int):
                        found.add((str(_tree(port).get("protocol", "TCP")), number))
    return [{"protocol": protocol, "port": port} for protocol, port in sorted(found)]


def _tree(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _disruption_budget(plan: Plan, pods: PodSet) -> Tree:
    """Nodes are drained one receiver at a time. The single sender has none: it would block a drain for ever."""
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": dict(pods.labels)}}
    return _object(plan, DISRUPTION_BUDGET, pods.name, spec=spec)


def _stateful_set(plan: Plan, pods: PodSet, template: Tree, keys: CurveKeys | None) -> Tree:
    metadata = template.get("metadata") or {}
    annotations = {**(metadata.get("annotations") or {}), ANNOTATION_CONFIG: _config_hash(plan)}
    if keys is not None and plan.config.curve_dir:
        annotations[ANNOTATION_KEYS] = keys.fingerprint
    spec = {
        "replicas": pods.replicas,
        "serviceName": plan.service,
        "podManagementPolicy": "Parallel",
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": {LABEL_NAME: plan.name, LABEL_ROLE: pods.role.value}},
        "template": {**template, "metadata": {**metadata, "annotations": annotations}},
    }
    return _object(plan, STATEFUL_SET, pods.name, spec=spec)
