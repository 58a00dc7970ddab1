"""What a local run executes for an agent: the agent itself, or the command of the user's container in the template."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .pod_templates import ARGS_ALONE

PYTHONS = ("python", "python3")
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")


class TemplateError(Exception):
    """The template asks for something that only a cluster can do; the text names the field."""


class _FieldRef(BaseModel):
    field_path: str = Field(alias="fieldPath")


class _ValueFrom(BaseModel):
    model_config = ConfigDict(extra="allow")
    field_ref: _FieldRef | None = Field(default=None, alias="fieldRef")


class _EnvVar(BaseModel):
    name: str = Field(min_length=1)
    value: str = ""
    value_from: _ValueFrom | None = Field(default=None, alias="valueFrom")


class _Container(BaseModel):
    """The part of a container that a process can have; image, volumes, probes and resources are the cluster's."""

    name: str = ""
    command: list[str] = Field(default_factory=list)
    args: list[str] = Field(default_factory=list)
    env: list[_EnvVar] = Field(default_factory=list)
    env_from: list[Any] = Field(default_factory=list, alias="envFrom")
    working_dir: str = Field(default="", alias="workingDir")


class _PodSpec(BaseModel):
    containers: list[_Container] = Field(default_factory=list)
    init_containers: list[Any] = Field(default_factory=list, alias="initContainers")


class _Template(BaseModel):
    spec: _PodSpec = Field(default_factory=_PodSpec)


@dataclass(frozen=True)
class Command:
    """A process to run."""

    argv: tuple[str, ...]
    cwd: Path
    env: Mapping[str, str]
    """Added to the runner's own environment."""
    user: bool
    """The user's container: what it prints is shown to the user."""
    notice: str = ""
    """What of the template is not carried out here, for the user; or empty."""


@dataclass(frozen=True)
class Downward:
    """What `valueFrom.fieldRef` can name."""

    pod: str
    namespace: str
    node: str

    def value(self, path: str) -> str | None:
        return {
            "metadata.name": self.pod,
            "metadata.namespace": self.namespace,
            "spec.nodeName": self.node,
            "status.podIP": "127.0.0.1",
            "status.hostIP": "127.0.0.1",
        }.get(path)


def command_for(
    template: Mapping[str, Any],
    field: str,
    folder: Path,
    downward: Downward,
    identity: Mapping[str, str],
    agent_env: Sequence[Mapping[str, Any]] = (),
) -> Command:
    """The command of an agent, from its pod template overlay.

    Args:
        template: the overlay, as written in the manifest.
        field: its path there, for messages: spec.sender.template.
        folder: the manifest's directory; processes run in it, and relative paths mean it.
        identity: the agent's WEIGHTSYNC_ variables: nothing in the template can change them.
        agent_env: spec.agent.env, which the agent's container has in a cluster too.

    Raises:
        TemplateError: the template can't be read, or needs a cluster.
    """
    try:
        pod = _Template.model_validate(template).spec
        base = [_EnvVar.model_validate(entry) for entry in agent_env]
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        raise TemplateError(f"{field}.{path}: {first['msg']}") from None
    notice = f"{field}: initContainers run in a cluster only, not here" if pod.init_containers else ""
    env = _environment(base, "spec.agent.env", identity, downward) | dict(identity)
    index = next((i for i, container in enumerate(pod.containers) if container.command), None)
    if index is None:
        for i, container in enumerate(pod.containers):
            where = f"{field}.spec.containers[{i}]"
            if container.args:
                raise TemplateError(f"{where}: {ARGS_ALONE}")
            env = _environment(container.env, f"{where}.env", env, downward) | dict(identity)
        return Command((sys.executable, "-m", "weightsync_agent.main"), folder, env, user=False, notice=notice)
    container, where = pod.containers[index], f"{field}.spec.containers[{index}]"
    if container.env_from:
        raise TemplateError(f"{where}.envFrom: ConfigMaps and Secrets are in a cluster only: write env with values")
    env = _environment(container.env, f"{where}.env", env, downward) | dict(identity)
    argv = [expand(word, env) for word in (*container.command, *container.args)]
    if argv[0] in PYTHONS:
        argv[0] = sys.executable
    cwd = (folder / container.working_dir).resolve()
    if not cwd.is_dir():
        raise TemplateError(f"{where}.workingDir: {cwd} is no directory on this machine")
    return Command(tuple(argv), cwd, env, user=True, notice=notice)


def expand(text: str, env: Mapping[str, str]) -> str:
    """`$(NAME)` -> its value, `$$` -> `$`, an unknown name as it is: the rules of a container's command."""
    return _REFERENCE.sub(lambda m: "$" if m[1] is None else env.get(m[1], m[0]), text)


def python_first(path: str | None) -> str:
    """PATH with this interpreter's folder first, so that `sh -c 'python ...'` finds the same one."""
    return os.pathsep.join([str(Path(sys.executable).parent), path or os.defpath])


def _environment(entries: Sequence[_EnvVar], where: str, env: Mapping[str, str], downward: Downward) -> dict[str, str]:
    found = dict(env)
    for entry in entries:
        if entry.value_from is None:
            found[entry.name] = expand(entry.value, found)
            continue
        value = downward.value(entry.value_from.field_ref.field_path) if entry.value_from.field_ref else None
        if value is None:
            raise TemplateError(f"{where} {entry.name}: valueFrom of this kind needs a cluster: write a value")
        found[entry.name] = value
    return found
