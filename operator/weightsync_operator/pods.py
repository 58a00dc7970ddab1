"""Pure: a PodSet -> its pod template, with the overlays of the spec's templates merged in.

Three layers, later ones win: what is usual, the user's template, what the agent needs. Where the template says
something else than is needed, the pod can't work: a Problem with the field's path.

The agents of a pod share one container, because the device plugin shows a container its own GPUs only, and without the
peer's device node neither CUDA IPC nor NVLink works. With `gpus.claimTemplate` sender and receivers of one pod have a
container each, and both name one claim.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weightsync_api.agent_config import (
    ENV_AGENTS,
    ENV_COMMANDS,
    ENV_CONFIG,
    ENV_HTTP_OFFSET,
    ENV_NODE,
    ENV_POD,
    ENV_RANK_STRIDE,
)

from .overlay import OverlayError, merge
from .plan import CONTROL_PORT, HTTP_PORT, AgentSlot, Plan, PodRole, PodSet, Role
from .platform import Problem
from .pod_network import host_ipc, nccl_problems, shared_host_memory, sockets
from .pod_templates import CONTAINER, FieldError, Template, clash_problems, differences, over, taken_apart, unfit

Tree = dict[str, Any]

CONFIG_DIR = "/etc/weightsync/config"
CONFIG_FILE = "agent.json"
VOLUME_SHM, VOLUME_RUN, VOLUME_TMP = "weightsync-shm", "weightsync-run", "weightsync-tmp"
VOLUME_CONFIG, VOLUME_KEYS = "weightsync-config", "weightsync-keys"
CLAIM = "gpus"
SHM_BYTES = 1 << 30
"""Size limit of /dev/shm, 256 MiB more for each agent above 4: NCCL's segments are some 10 MB a peer, and torch's
data loaders share it. It is a limit: what is used counts as the container's memory. A template's volume of the same
name may set another."""
KEY_FILES: Mapping[Role, tuple[str, ...]] = {
    Role.SENDER: ("sender.key", "sender.key_secret", "receiver.key"),
    Role.RECEIVER: ("receiver.key", "receiver.key_secret", "sender.key"),
}
"""CURVE certificates that an agent needs (see the agent's wire.py): nobody gets the other side's secret."""


@dataclass(frozen=True)
class Part:
    """One container of agents, and the templates that it takes."""

    slots: tuple[AgentSlot, ...]
    first: int
    """Place of its first agent among those of the pod."""
    name: str


def pod_template(plan: Plan, pods: PodSet, image: str) -> tuple[Tree, list[Problem]]:
    """The PodTemplateSpec of a set, and what stands against it. `image`: the agents', where the spec names none."""
    try:
        templates = [
            taken_apart(pods.template(role), role)
            for role in (Role.SENDER, Role.RECEIVER)
            if any(slot.role == role for slot in pods.agents)
        ]
        problems = [problem for template in templates for problem in unfit(plan, template)]
        merged = _merged(plan, pods, templates, image, problems)
    except FieldError as error:
        return {}, [Problem("InvalidTemplate", str(error))]
    return merged, problems


# --- the pod --------------------------------------------------------------------------------------------------------


def _merged(plan: Plan, pods: PodSet, templates: list[Template], image: str, problems: list[Problem]) -> Tree:
    """Raises FieldError."""
    needed = _pod_needs(plan, pods)
    merged: Tree = {"metadata": {}, "spec": _pod_defaults(plan, pods)}
    for template in templates:
        merged = over(merged, template.rest, template.field)
        problems += clash_problems(needed, template.rest, template.field)
    if len(templates) == 2:
        problems += differences(templates[0], templates[1], container=False)
    merged = merge(merged, needed)
    parts = _parts(plan, pods, templates)
    containers = [_container(plan, pods, part, templates, image, problems) for part in parts]
    merged["spec"]["containers"] = [*containers, *(merged["spec"].get("containers") or [])]
    names = [entry["name"] for entry in merged["spec"]["containers"]]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(Problem("TemplateClash", f"{templates[-1].field}.spec.containers[{name}]: the name is taken"))
    return merged


def _parts(plan: Plan, pods: PodSet, templates: list[Template]) -> list[Part]:
    named = [template.name for template in templates if template.name]
    if pods.role == PodRole.GROUP and plan.gpus.claim_template:
        senders = tuple(slot for slot in pods.agents if slot.role == Role.SENDER)
        receivers = tuple(slot for slot in pods.agents if slot.role == Role.RECEIVER)
        return [Part(senders, 0, "sender"), *([Part(receivers, len(senders), "receivers")] if receivers else [])]
    return [Part(pods.agents, 0, named[0] if len(set(named)) == 1 else CONTAINER)]


def _container(
    plan: Plan, pods: PodSet, part: Part, templates: list[Template], image: str, problems: list[Problem]
) -> Tree:
    roles = {slot.role for slot in part.slots}
    mine = [template for template in templates if template.role in roles]
    commands = {template.role.value: template.command for template in mine if template.command}
    needed = _container_needs(plan, pods, part, commands)
    merged = _container_defaults(plan, part, image, own=not commands)
    try:
        merged = merge(merged, {"env": plan.agent.env})
    except OverlayError as error:
        raise FieldError(f"spec.agent.{error.path}: {error}") from None
    problems += clash_problems({"env": needed["env"]}, {"env": plan.agent.env}, "spec.agent")
    for template in mine:
        merged = over(merged, template.container, template.path)
        problems += clash_problems(needed, template.container, template.path)
    if len(mine) == 2:
        problems += differences(mine[0], mine[1], container=True)
    merged = merge(merged, needed)
    # A variable can use those before it: the agent's own come first.
    own = {entry["name"] for entry in needed["env"]}
    merged["env"].sort(key=lambda entry: entry["name"] not in own)
    if not merged.get("image"):
        problems.append(
            Problem("NoImage", "spec.agent.image: name an image with the agent: the operator was installed without one")
        )
    problems += nccl_problems(merged, plan)
    return {"name": part.name, **merged}


# --- what is usual --------------------------------------------------------------------------------------------------


def _pod_defaults(plan: Plan, pods: PodSet) -> Tree:
    volumes: list[Tree] = [
        {"name": VOLUME_RUN, "emptyDir": {"sizeLimit": "64Mi"}},
        {"name": VOLUME_TMP, "emptyDir": {}},
    ]
    if not host_ipc(plan):
        size = SHM_BYTES + max(0, len(pods.agents) - 4) * (256 << 20)
        volumes.insert(0, {"name": VOLUME_SHM, "emptyDir": {"medium": "Memory", "sizeLimit": _mebibytes(size)}})
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 30,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "volumes": volumes,
    }


def _container_defaults(plan: Plan, part: Part, image: str, own: bool) -> Tree:
    """`own`: no program of the user's runs in it."""
    agent = plan.agent
    port = HTTP_PORT + part.first
    container: Tree = {
        "image": agent.image or image,
        "imagePullPolicy": agent.image_pull_policy.value,
        "resources": agent.resources,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": own,
        },
        "env": [*sockets(plan), *([{"name": "HOME", "value": "/tmp"}] if own else [])],
        "volumeMounts": [{"name": VOLUME_TMP, "mountPath": "/tmp"}],
        # So that a crash's last lines are in the pod's status, and so in the condition.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        # Not ready until each agent holds a whole step: a Service or a budget over the pods counts only those that do.
        "readinessProbe": {
            "httpGet": {"path": f"/readyz?agents={len(part.slots)}", "port": port},
            "periodSeconds": 5,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
    }
    if own:
        # A user's program may do anything for any time before it makes its Sender or Receiver, whose thread answers.
        healthz = {"httpGet": {"path": "/healthz", "port": port}, "timeoutSeconds": 5}
        container["startupProbe"] = healthz | {"periodSeconds": 2, "failureThreshold": 150}
        container["livenessProbe"] = healthz | {"periodSeconds": 10, "failureThreshold": 6}
    return container


# --- what is needed -------------------------------------------------------------------------------------------------


def _pod_needs(plan: Plan, pods: PodSet) -> Tree:
    spec: Tree = {
        "restartPolicy": "Always",
        "volumes": [{"name": VOLUME_CONFIG, "configMap": {"name": config_name(plan)}}],
    }
    if plan.config.curve_dir:
        roles = {slot.role for slot in pods.agents}
        files = sorted({name for role in roles for name in KEY_FILES[role]})
        items = [{"key": name, "path": name} for name in files]
        secret = {"secretName": keys_name(plan), "defaultMode": 0o444, "items": items}
        spec["volumes"].append({"name": VOLUME_KEYS, "secret": secret})
    if host_ipc(plan):
        spec["hostIPC"] = True
    if pods.gpus_per_pod and plan.gpus.claim_template:
        spec["resourceClaims"] = [{"name": CLAIM, "resourceClaimTemplateName": plan.gpus.claim_template}]
        if pods.role == PodRole.GROUP:
            # Each container has a PID 1 of its own otherwise, and CUDA takes an equal PID for the same process.
            spec["shareProcessNamespace"] = True
    return {"metadata": {"labels": dict(pods.labels)}, "spec": spec}


def _container_needs(plan: Plan, pods: PodSet, part: Part, commands: Mapping[str, list[str]]) -> Tree:
    count = len(part.slots)
    ports = [
        {"name": "http" if n == 0 else f"http-{n}", "containerPort": HTTP_PORT + part.first + n, "protocol": "TCP"}
        for n in range(count)
    ]
    if part.first:
        ports = [{**port, "name": f"{port['name']}-r"[:15]} for port in ports]
    if pods.role == PodRole.SENDER:
        ports.append({"name": "control", "containerPort": CONTROL_PORT, "protocol": "TCP"})
    mounts = [
        {"name": VOLUME_RUN, "mountPath": plan.config.runtime_dir},
        {"name": VOLUME_CONFIG, "mountPath": CONFIG_DIR, "readOnly": True},
    ]
    if not host_ipc(plan):
        mounts.append({"name": VOLUME_SHM, "mountPath": "/dev/shm"})
    if plan.config.curve_dir:
        mounts.append({"name": VOLUME_KEYS, "mountPath": plan.config.curve_dir, "readOnly": True})
    needs: Tree = {
        "command": ["weightsync-agent", "launch"],
        "env": _environment(plan, pods, part, commands),
        "ports": ports,
        "volumeMounts": mounts,
    }
    if pods.gpus_per_pod:
        needs["resources"] = (
            {"claims": [{"name": CLAIM}]}
            if plan.gpus.claim_template
            else {"limits": {plan.gpus.resource: str(pods.gpus_per_pod)}}
        )
    return needs


def _environment(plan: Plan, pods: PodSet, part: Part, commands: Mapping[str, list[str]]) -> list[Tree]:
    agents = ",".join(f"{s.role}:{s.rank}" + (f"@{s.gpu}" if s.gpu is not None else "") for s in part.slots)
    env: list[Tree] = [
        {"name": ENV_POD, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}},
        {"name": ENV_NODE, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "spec.nodeName"}}},
        {"name": ENV_CONFIG, "value": f"{CONFIG_DIR}/{CONFIG_FILE}"},
        {"name": ENV_AGENTS, "value": agents},
    ]
    if pods.rank_stride:
        env.append({"name": ENV_RANK_STRIDE, "value": str(pods.rank_stride)})
    if part.first:
        env.append({"name": ENV_HTTP_OFFSET, "value": str(part.first)})
    if commands:
        # The kubelet would expand $(NAME) before the launcher knows the agent's own variables.
        text = json.dumps(commands, ensure_ascii=False).replace("$", "$$")
        env.append({"name": ENV_COMMANDS, "value": text})
    return env + shared_host_memory(plan)


def config_name(plan: Plan) -> str:
    return plan.service


def keys_name(plan: Plan) -> str:
    return plan.service.removesuffix("-agents") + "-keys"


def _mebibytes(nbytes: int) -> str:
    """As the API server writes it: 1Gi, 1280Mi."""
    return f"{nbytes >> 30}Gi" if nbytes % (1 << 30) == 0 else f"{nbytes >> 20}Mi"
