"""Pure: a PodSet -> its pod template, with the overlays of the spec's templates merged in.

Three layers, later ones win: what is usual, the user's template, what the agent needs. Where the template says
something else than is needed, the pod can't work: a Problem with the field's path.

The agents of a pod share one container, because the device plugin shows a container its own GPUs only, and without the
peer's device node neither CUDA IPC nor NVLink works. With `gpus.claimTemplate` sender and receivers of one pod have a
container each, and both name one claim. Which container of a template is the agents': the one called `agent`, else
the first with a command (whose program then drives the library, as in `weightsync run`), else the first. All others
run beside it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
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
from weightsync_api.v1alpha1 import Device, SharedMemory, Transport

from .overlay import OverlayError, clashes, merge, shown
from .plan import CONTROL_PORT, HTTP_PORT, AgentSlot, Plan, PodRole, PodSet, Role
from .platform import Problem

Tree = dict[str, Any]

CONTAINER = "agent"
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


@dataclass
class _Template:
    """One overlay, taken apart."""

    field: str
    role: Role
    rest: Tree
    """Without the agents' container."""
    container: Tree = dataclasses.field(default_factory=dict)
    """The agents' container, without name and command."""
    name: str = ""
    command: list[str] = dataclasses.field(default_factory=list)
    path: str = ""


def pod_template(plan: Plan, pods: PodSet, image: str) -> tuple[Tree, list[Problem]]:
    """The PodTemplateSpec of a set, and what stands against it. `image`: the agents', where the spec names none."""
    try:
        templates = [
            _taken_apart(pods.template(role), role)
            for role in (Role.SENDER, Role.RECEIVER)
            if any(slot.role == role for slot in pods.agents)
        ]
        problems = [problem for template in templates for problem in _unfit(plan, template)]
        merged = _merged(plan, pods, templates, image, problems)
    except _FieldError as error:
        return {}, [Problem("InvalidTemplate", str(error))]
    return merged, problems


class _FieldError(Exception):
    """A template can't be read; the text names the field."""


def _field(role: Role) -> str:
    return "spec.sender.template" if role == Role.SENDER else "spec.receivers.template"


# --- templates ------------------------------------------------------------------------------------------------------


def _taken_apart(overlay: Mapping[str, Any], role: Role) -> _Template:
    where = _field(role)
    for key in overlay:
        if key not in ("metadata", "spec", "apiVersion", "kind"):
            raise _FieldError(f"{where}.{key}: unknown field: a pod template has metadata and spec")
    spec = overlay.get("spec") or {}
    containers = (spec.get("containers") if isinstance(spec, Mapping) else None) or []
    if not isinstance(spec, Mapping) or not isinstance(containers, list):
        raise _FieldError(f"{where}.spec: must be an object, and its containers a list")
    for index, entry in enumerate(containers):
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            raise _FieldError(f"{where}.spec.containers[{index}]: must be an object with a name")
    metadata = overlay.get("metadata") or {}
    if not isinstance(metadata, Mapping):
        raise _FieldError(f"{where}.metadata: is {shown(metadata)}, where an object belongs")
    # A pod of a set is named and placed by it.
    kept = {key: metadata[key] for key in ("labels", "annotations") if key in metadata}
    rest: Tree = {"metadata": kept, "spec": {k: v for k, v in spec.items() if k != "containers"}}
    found = _Template(where, role, rest)
    ours = _agents_container(containers)
    if ours is not None:
        chosen = dict(containers[ours])
        found.path = f"{where}.spec.containers[{ours}]"
        found.name = chosen.pop("name")
        command, args = chosen.pop("command", None) or [], chosen.pop("args", None) or []
        for name, words in (("command", command), ("args", args)):
            if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
                raise _FieldError(f"{found.path}.{name}: is {shown(words)}, where a list of texts belongs")
        if args and not command:
            raise _FieldError(
                f"{found.path}: args without command: the program that they are for is known to the image alone; "
                "write command"
            )
        found.command = [*command, *args]
        found.container = chosen
    rest["spec"]["containers"] = [entry for i, entry in enumerate(containers) if i != ours]
    return found


def _agents_container(containers: list[Mapping[str, Any]]) -> int | None:
    names = [entry["name"] for entry in containers]
    if CONTAINER in names:
        return names.index(CONTAINER)
    return next((i for i, entry in enumerate(containers) if entry.get("command")), 0 if containers else None)


def _unfit(plan: Plan, template: _Template) -> Iterator[Problem]:
    """What no merge could cure."""
    spec, where = template.rest["spec"], f"{template.field}.spec"
    if spec.get("hostPID"):
        yield Problem(
            "TemplateClash", f"{where}.hostPID: must not be true: agents watch and end the processes of their own pod"
        )
    if spec.get("hostIPC") and not _host_ipc(plan):
        yield Problem("TemplateClash", f"{where}.hostIPC: write network.sharedMemory: Host instead, which sets it")
    if template.role == Role.SENDER and plan.config.source and plan.config.source.trainer and not template.command:
        yield Problem(
            "NoTrainer",
            f"{template.path or where + '.containers'}: source trainer: {{}} needs a container with a command: "
            "the program that drives the sender through the library",
        )


# --- the pod --------------------------------------------------------------------------------------------------------


def _merged(plan: Plan, pods: PodSet, templates: list[_Template], image: str, problems: list[Problem]) -> Tree:
    """Raises _FieldError."""
    needed = _pod_needs(plan, pods)
    merged: Tree = {"metadata": {}, "spec": _pod_defaults(plan, pods)}
    for template in templates:
        merged = _over(merged, template.rest, template.field)
        problems += _clashes(needed, template.rest, template.field)
    if len(templates) == 2:
        problems += _differences(templates[0], templates[1], container=False)
    merged = merge(merged, needed)
    parts = _parts(plan, pods, templates)
    containers = [_container(plan, pods, part, templates, image, problems) for part in parts]
    merged["spec"]["containers"] = [*containers, *(merged["spec"].get("containers") or [])]
    names = [entry["name"] for entry in merged["spec"]["containers"]]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(Problem("TemplateClash", f"{templates[-1].field}.spec.containers[{name}]: the name is taken"))
    return merged


def _parts(plan: Plan, pods: PodSet, templates: list[_Template]) -> list[Part]:
    named = [template.name for template in templates if template.name]
    if pods.role == PodRole.GROUP and plan.gpus.claim_template:
        senders = tuple(slot for slot in pods.agents if slot.role == Role.SENDER)
        receivers = tuple(slot for slot in pods.agents if slot.role == Role.RECEIVER)
        return [Part(senders, 0, "sender"), *([Part(receivers, len(senders), "receivers")] if receivers else [])]
    return [Part(pods.agents, 0, named[0] if len(set(named)) == 1 else CONTAINER)]


def _container(
    plan: Plan, pods: PodSet, part: Part, templates: list[_Template], image: str, problems: list[Problem]
) -> Tree:
    roles = {slot.role for slot in part.slots}
    mine = [template for template in templates if template.role in roles]
    commands = {template.role.value: template.command for template in mine if template.command}
    needed = _container_needs(plan, pods, part, commands)
    merged = _container_defaults(plan, part, image, own=not commands)
    try:
        merged = merge(merged, {"env": plan.agent.env})
    except OverlayError as error:
        raise _FieldError(f"spec.agent.{error.path}: {error}") from None
    problems += _clashes({"env": needed["env"]}, {"env": plan.agent.env}, "spec.agent")
    for template in mine:
        merged = _over(merged, template.container, template.path)
        problems += _clashes(needed, template.container, template.path)
    if len(mine) == 2:
        problems += _differences(mine[0], mine[1], container=True)
    merged = merge(merged, needed)
    # A variable can use those before it: the agent's own come first.
    own = {entry["name"] for entry in needed["env"]}
    merged["env"].sort(key=lambda entry: entry["name"] not in own)
    if not merged.get("image"):
        problems.append(
            Problem("NoImage", "spec.agent.image: name an image with the agent: the operator was installed without one")
        )
    problems += _nccl_problems(merged, plan)
    return {"name": part.name, **merged}


def _over(base: Tree, overlay: Mapping[str, Any], where: str) -> Tree:
    try:
        merged: Tree = merge(base, overlay)
    except OverlayError as error:
        raise _FieldError(f"{where}.{error.path}: {error}") from None
    return merged


def _clashes(needed: Mapping[str, Any], overlay: Mapping[str, Any], where: str) -> Iterator[Problem]:
    for path, theirs, ours in clashes(needed, overlay):
        yield Problem("TemplateClash", f"{where}.{path}: is {shown(theirs)}, but the agent needs {shown(ours)}")


def _differences(sender: _Template, receivers: _Template, container: bool) -> Iterator[Problem]:
    """Sender and receivers of one pod, and of one container, can't have two values of one field."""
    ours, theirs = (sender.container, receivers.container) if container else (sender.rest, receivers.rest)
    mine, other = (receivers.path, sender.path) if container else (receivers.field, sender.field)
    what, cure = "pod", ""
    if container:
        what, cure = "container", ": make them equal, or write gpus.claimTemplate for a container each"
    for path, value, wanted in clashes(ours, theirs):
        yield Problem(
            "TemplateClash",
            f"{mine}.{path}: is {shown(value)}, but {other} has {shown(wanted)}, "
            f"and sender and receivers share one {what}{cure}",
        )


# --- what is usual --------------------------------------------------------------------------------------------------


def _pod_defaults(plan: Plan, pods: PodSet) -> Tree:
    volumes: list[Tree] = [
        {"name": VOLUME_RUN, "emptyDir": {"sizeLimit": "64Mi"}},
        {"name": VOLUME_TMP, "emptyDir": {}},
    ]
    if not _host_ipc(plan):
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
        "env": [*_sockets(plan), *([{"name": "HOME", "value": "/tmp"}] if own else [])],
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
    if _host_ipc(plan):
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
    if not _host_ipc(plan):
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
    return env + _shared_host_memory(plan)


def _over_network(plan: Plan) -> bool:
    """NCCL between pods: within one it finds NVLink by itself."""
    return plan.device == Device.CUDA and plan.transport == Transport.NCCL and bool(plan.config.curve_dir)


def _host_ipc(plan: Plan) -> bool:
    return _over_network(plan) and plan.network.shared_memory == SharedMemory.HOST


def _shared_host_memory(plan: Plan) -> list[Tree]:
    """What NCCL needs to use the host's memory between pods of one node.

    Pods see their own GPUs only, so NCCL can't map one into the other. An equal NCCL_HOSTID makes it try, and fail at
    the first collective, unless P2P is off. Measured on one node with H200 GPUs: 49 GB/s, against 14 GB/s over sockets.
    """
    if not _host_ipc(plan):
        return []
    return [
        {"name": "NCCL_HOSTID", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "spec.nodeName"}}},
        {"name": "NCCL_P2P_DISABLE", "value": "1"},
        {"name": "NCCL_CUMEM_HOST_ENABLE", "value": "0"},
    ]


def _sockets(plan: Plan) -> list[Tree]:
    """More connections than NCCL's default: 14 instead of 4 GB/s between pods of one node."""
    if not _over_network(plan) or _host_ipc(plan):
        return []
    return [{"name": "NCCL_SOCKET_NTHREADS", "value": "4"}, {"name": "NCCL_NSOCKS_PERTHREAD", "value": "4"}]


def _nccl_problems(container: Tree, plan: Plan) -> Iterator[Problem]:
    env = {entry["name"]: entry for entry in container.get("env") or []}
    if _over_network(plan) and "NCCL_HOSTID" in env and env.get("NCCL_P2P_DISABLE", {}).get("value") != "1":
        yield Problem(
            "TemplateClash",
            "NCCL_HOSTID is set without NCCL_P2P_DISABLE=1: pods see their own GPUs only, and NCCL fails at the first "
            "collective; leave it and write network.sharedMemory: Host",
        )


def config_name(plan: Plan) -> str:
    return plan.service


def keys_name(plan: Plan) -> str:
    return plan.service.removesuffix("-agents") + "-keys"


def _mebibytes(nbytes: int) -> str:
    """As the API server writes it: 1Gi, 1280Mi."""
    return f"{nbytes >> 30}Gi" if nbytes % (1 << 30) == 0 else f"{nbytes >> 20}Mi"
