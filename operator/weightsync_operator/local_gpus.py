"""Which GPUs this machine has, and which process of a local run gets which. Never imports torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from weightsync_api.v1alpha1 import Device, Placement, WeightSync

from .plan import Plan, PodRole


class NotEnoughGpusError(Exception):
    """The placement needs more GPUs than the machine has; the text says what to write instead."""


def visible_gpus(dev: Path = Path("/dev")) -> list[str]:
    """The GPUs that a process may use, as CUDA_VISIBLE_DEVICES names them: its own setting, else one a device node."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    nodes = [node for node in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", node.name)]
    count = len(nodes) or _listed_by_driver()
    if chosen is None:
        return [str(index) for index in range(count)]
    return [name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1")] if count else []


def _listed_by_driver() -> int:
    """GPUs that nvidia-smi lists: where there are no device nodes of the usual names, as under WSL."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0


def device_for(ws: WeightSync, gpus: list[str]) -> tuple[Device, str]:
    """The device that a local run uses, and a line for the user where that is not the one of the spec."""
    if ws.spec.device == Device.CUDA and not gpus:
        return Device.CPU, (
            f"{ws.metadata.name}: no GPU on this machine, so device CUDA runs on CPU "
            "(shared memory for IPC, gloo for NCCL)"
        )
    return ws.spec.device, ""


def assign(plan: Plan, gpus: list[str], placement: Placement) -> dict[int, str]:
    """CUDA_VISIBLE_DEVICES of each rank: pods get GPUs one after the other, as a device plugin hands them out.

    Empty for every rank on CPU. Raises NotEnoughGpusError.
    """
    if plan.device == Device.CPU:
        return {agent.rank: "" for agent in plan.agents()}
    given: dict[int, str] = {}
    first = 0
    for pods in plan.pod_sets:
        for ordinal in range(pods.replicas):
            for agent in pods.agents_of(ordinal):
                index = first + (agent.gpu or 0)
                given[agent.rank] = gpus[index] if index < len(gpus) else ""
            first += pods.gpus_per_pod
    if first > len(gpus):
        one_pod = any(pods.role == PodRole.GROUP for pods in plan.pod_sets)
        fewer = "fewer receivers.replicas" if one_pod else "fewer receivers"
        raise NotEnoughGpusError(
            f"spec.placement {placement} needs {first} GPUs and this machine has {len(gpus)}: "
            f"write placement: Colocated (all on one GPU), {fewer}, or device: CPU"
        )
    return given
