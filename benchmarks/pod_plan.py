"""A WeightSync's pods on one machine, as `pods.py` plans them: namespaces, devices and environment of each.

Only what a kubelet fills in is filled in here: the node's name, addresses, which GPUs a pod gets, where files lie.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pod_namespaces import Pod
from weightsync_api.agent_config import ENV_CONFIG, ENV_EXIT_ON_STDIN_EOF
from weightsync_api.quantity import parse_bytes
from weightsync_api.v1alpha1 import Device, WeightSync
from weightsync_operator.curve_keys import CurveKeys
from weightsync_operator.plan import ClusterAddresses, Plan, PlanDefaults, PodSet, plan
from weightsync_operator.platform import Observed, ObservedAgent
from weightsync_operator.pods import CONFIG_FILE, VOLUME_SHM, pod_template

NODE = "node-a"
NETWORK = "10.213.7"
AGENT = Path(__file__).parent / "pod_agent.py"
Tree = dict[str, Any]


class PlanError(Exception):
    """The operator would not make these pods; the text is its reasons."""


@dataclasses.dataclass(frozen=True)
class Placed:
    """A WeightSync with its plan and the pods of it."""

    resource: WeightSync
    plan: Plan
    pods: list[Pod]

    def observed(self) -> Observed:
        """As the cluster would be seen: every agent runs, on one node."""
        agents = (ObservedAgent(a.rank, a.pod, node=NODE, running=True) for a in self.plan.agents())
        return Observed(self.resource, tuple(agents))


def resource(spec: Mapping[str, Any], arguments: Sequence[str]) -> WeightSync:
    """A WeightSync whose agents are `pod_agent.py` with these arguments."""
    command = [sys.executable, str(AGENT), *arguments]
    template = {"spec": {"containers": [{"name": "agent", "command": command}]}}
    receivers = {**spec.get("receivers", {}), "template": template}
    sender = {"source": {"trainer": {}}, "template": template}
    return WeightSync.model_validate({
        "apiVersion": "weightsync.dev/v1alpha1",
        "kind": "WeightSync",
        "metadata": {"name": "routes", "uid": "routes"},
        "spec": {**spec, "sender": sender, "receivers": receivers},
    })  # fmt: skip


def place(ws: WeightSync, directory: Path, *, networks: bool, cpu: bool, change: Mapping[str, str] | None) -> Placed:
    """Plans the pods and writes their files into `directory`.

    Args:
        networks: each pod has a network of its own; otherwise all have the machine's.
        cpu: the tensors are on the CPU. The plan is the GPUs' all the same: same environment, same namespaces.
        change: variables that are set, or taken away (empty), after the plan: what an operator would not do.

    Raises PlanError.
    """
    scratch, curve, config_file = directory / "run", directory / "curve", directory / CONFIG_FILE
    for made in (scratch, curve):
        made.mkdir()
    planned = plan(ws, PlanDefaults(ClusterAddresses(runtime_dir=str(scratch), curve_dir=str(curve))))
    for name, text in CurveKeys.generate().files.items():
        (curve / name).write_text(text)
    # HTTP is not what is looked at, and all pods would have one port where they share a network.
    config = planned.config.model_copy(update={"http": "", **({"device": Device.CPU} if cpu else {})})
    config_file.write_text(config.model_dump_json())
    pods: list[Pod] = []
    own_network = networks and sum(pod_set.replicas for pod_set in planned.pod_sets) == 2
    gpu, hosts = 0, ["127.0.0.1 localhost"]
    for pod_set in planned.pod_sets:
        template = _template(planned, pod_set)
        for ordinal in range(pod_set.replicas):
            name = pod_set.pod_name(ordinal)
            address = f"{NETWORK}.{len(pods) + 1}" if own_network else ""
            hosts.append(f"{address or '127.0.0.1'} {name} {name}.{planned.service}.{planned.namespace}.svc")
            gpus = tuple(range(gpu, gpu + pod_set.gpus_per_pod))
            gpu += pod_set.gpus_per_pod
            pods.append(_pod(template, name, directory, address, gpus, config_file, change or {}))
    (directory / "hosts").write_text("\n".join(hosts) + "\n")
    return Placed(ws, planned.model_copy(update={"device": Device.CPU}) if cpu else planned, pods)


def _template(planned: Plan, pod_set: PodSet) -> Tree:
    template, problems = pod_template(planned, pod_set, "agent:1")
    if problems:
        raise PlanError("; ".join(problem.message for problem in problems))
    spec: Tree = template["spec"]
    return spec


def _pod(
    template: Tree, name: str, directory: Path, address: str, gpus: tuple[int, ...], config: Path,
    change: Mapping[str, str],
) -> Pod:  # fmt: skip
    (container,) = template["containers"]
    assert container["command"] == ["weightsync-agent", "launch"]
    filled = {"metadata.name": name, "spec.nodeName": NODE}
    planned = {e["name"]: e["value"] if "value" in e else filled[_field(e)] for e in container["env"]}
    # What this machine's own environment says of NCCL or of GPUs is not what a pod's says.
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL_", "CUDA_VISIBLE", "WEIGHTSYNC_"))}
    here = {ENV_CONFIG: str(config), ENV_EXIT_ON_STDIN_EOF: "1", "HOME": os.environ.get("HOME", "/tmp")}
    env = {**kept, **planned, **here, **change}
    shm = next((v["emptyDir"]["sizeLimit"] for v in template["volumes"] if v["name"] == VOLUME_SHM), "0")
    return Pod(
        name=name,
        command=(sys.executable, "-m", "weightsync_agent.main", "launch"),
        env={key: value for key, value in env.items() if value or key not in change},
        host_ipc=bool(template.get("hostIPC")),
        shm_bytes=parse_bytes(shm),
        gpus=gpus,
        scratch=str(directory / "run"),
        hosts=str(directory / "hosts"),
        address=address,
    )


def _field(entry: Tree) -> str:
    found: str = entry["valueFrom"]["fieldRef"]["fieldPath"]
    return found
