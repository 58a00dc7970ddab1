"""Pure: the spec's templates, taken apart: what of an overlay is the pod's and what the agents' container's.

Which container of a template is the agents': the one called `agent`, else the first with a command (whose program then
drives the library, as in `weightsync run`), else the first. All others run beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .overlay import OverlayError, clashes, merge, shown
from .plan import Plan, Role
from .platform import Problem
from .pod_network import host_ipc

Tree = dict[str, Any]

CONTAINER = "agent"
ARGS_ALONE = "args without command: the program that they are for is known to the image alone; write command"


class FieldError(Exception):
    """A template can't be read; the text names the field."""


@dataclass
class Template:
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


def template_field(role: Role) -> str:
    """Where the template of an agent of this role is in the manifest."""
    return "spec.sender.template" if role == Role.SENDER else "spec.receivers.template"


def taken_apart(overlay: Mapping[str, Any], role: Role) -> Template:
    """Raises FieldError."""
    where = template_field(role)
    for key in overlay:
        if key not in ("metadata", "spec", "apiVersion", "kind"):
            raise FieldError(f"{where}.{key}: unknown field: a pod template has metadata and spec")
    spec = overlay.get("spec") or {}
    containers = (spec.get("containers") if isinstance(spec, Mapping) else None) or []
    if not isinstance(spec, Mapping) or not isinstance(containers, list):
        raise FieldError(f"{where}.spec: must be an object, and its containers a list")
    for index, entry in enumerate(containers):
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            raise FieldError(f"{where}.spec.containers[{index}]: must be an object with a name")
    metadata = overlay.get("metadata") or {}
    if not isinstance(metadata, Mapping):
        raise FieldError(f"{where}.metadata: is {shown(metadata)}, where an object belongs")
    # A pod of a set is named and placed by it.
    kept = {key: metadata[key] for key in ("labels", "annotations") if key in metadata}
    rest: Tree = {"metadata": kept, "spec": {k: v for k, v in spec.items() if k != "containers"}}
    found = Template(where, role, rest)
    ours = _agents_container(containers)
    if ours is not None:
        chosen = dict(containers[ours])
        found.path = f"{where}.spec.containers[{ours}]"
        found.name = chosen.pop("name")
        command, args = chosen.pop("command", None) or [], chosen.pop("args", None) or []
        for name, words in (("command", command), ("args", args)):
            if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
                raise FieldError(f"{found.path}.{name}: is {shown(words)}, where a list of texts belongs")
        if args and not command:
            raise FieldError(f"{found.path}: {ARGS_ALONE}")
        found.command = [*command, *args]
        found.container = chosen
    rest["spec"]["containers"] = [entry for i, entry in enumerate(containers) if i != ours]
    return found


def _agents_container(containers: list[Mapping[str, Any]]) -> int | None:
    names = [entry["name"] for entry in containers]
    if CONTAINER in names:
        return names.index(CONTAINER)
    return next((i for i, entry in enumerate(containers) if entry.get("command")), 0 if containers else None)


def unfit(plan: Plan, template: Template) -> Iterator[Problem]:
    """What no merge could cure."""
    spec, where = template.rest["spec"], f"{template.field}.spec"
    if spec.get("hostPID"):
        yield Problem(
            "TemplateClash", f"{where}.hostPID: must not be true: agents watch and end the processes of their own pod"
        )
    if spec.get("hostIPC") and not host_ipc(plan):
        yield Problem("TemplateClash", f"{where}.hostIPC: write network.sharedMemory: Host instead, which sets it")
    if template.role == Role.SENDER and plan.config.source and plan.config.source.trainer and not template.command:
        yield Problem(
            "NoTrainer",
            f"{template.path or where + '.containers'}: source trainer: {{}} needs a container with a command: "
            "the program that drives the sender through the library",
        )


def over(base: Tree, overlay: Mapping[str, Any], where: str) -> Tree:
    """`base` with an overlay merged in. Raises FieldError. `where`: the overlay's own path."""
    try:
        merged: Tree = merge(base, overlay)
    except OverlayError as error:
        raise FieldError(f"{where}.{error.path}: {error}") from None
    return merged


def clash_problems(needed: Mapping[str, Any], overlay: Mapping[str, Any], where: str) -> Iterator[Problem]:
    """What an overlay sets otherwise than the agent needs."""
    for path, theirs, ours in clashes(needed, overlay):
        yield Problem("TemplateClash", f"{where}.{path}: is {shown(theirs)}, but the agent needs {shown(ours)}")


def differences(sender: Template, receivers: Template, container: bool) -> Iterator[Problem]:
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
