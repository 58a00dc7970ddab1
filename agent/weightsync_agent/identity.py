"""Who and where this process is: by environment, and by what the system says."""

from __future__ import annotations

import os
import platform
import socket
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch
from pydantic import ValidationError
from weightsync_api.agent_config import ENV_CONFIG, ENV_NODE, ENV_POD, ENV_RANK, AgentConfig

from .cuda.nccl_environment import gpu_nodes, host_to_map_on
from .errors import ConfigError
from .protocol import PROTOCOL_VERSION, Identity


def load_config() -> AgentConfig:
    """The AgentConfig that WEIGHTSYNC_CONFIG names. Raises ConfigError that says what is missing or wrong."""
    path = os.environ.get(ENV_CONFIG)
    if not path:
        raise ConfigError(
            f"{ENV_CONFIG} is not set: `from_env` works in a process that `weightsync run` or the operator started"
        )
    try:
        return AgentConfig.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"the agent's configuration {path} can't be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"the agent's configuration {path} is wrong: {where}: {first['msg']}") from None


def rank_from_env() -> int:
    """WEIGHTSYNC_RANK. Raises ConfigError."""
    text = os.environ.get(ENV_RANK, "")
    if not text.isdigit():
        raise ConfigError(f"{ENV_RANK} is {text!r}, not the rank of a process")
    return int(text)


def local_identity(rank: int, device: torch.device, pod: str = "", node: str = "") -> Identity:
    """This process' identity. `pod` and `node` default to the environment, then to the process and the host."""
    return Identity(
        rank=rank,
        pod=pod or os.environ.get(ENV_POD) or f"process-{os.getpid()}",
        node=node or local_node(),
        pid=os.getpid(),
        pid_namespace=_pid_namespace(),
        uid=os.getuid(),
        gpu=gpu_uuid(device),
        shm=_shm_identity(),
        nccl_host=host_to_map_on(os.environ),
        gpu_nodes=gpu_nodes() if device.type == "cuda" else 0,
        versions=versions(),
    )


def gpu_uuid(device: torch.device) -> str:
    """UUID of a CUDA device without the prefix `GPU-`; empty for the CPU."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")


def versions() -> dict[str, str]:
    """What is running here, for hellos, metrics and benchmark results."""
    return {
        "weightsync": own_version(),
        "protocol": str(PROTOCOL_VERSION),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


@cache
def own_version() -> str:
    try:
        return version("weightsync")
    except PackageNotFoundError:
        return "0+source"  # run from a source tree on PYTHONPATH


def is_gone(identity: Identity) -> bool:
    """Whether the process is known to be dead. False where it can't be told: another PID namespace or machine."""
    if identity.pid_namespace != _pid_namespace() or identity.node != local_node():
        return False
    try:
        return psutil.Process(identity.pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def local_node() -> str:
    return os.environ.get(ENV_NODE) or socket.gethostname()


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _shm_identity() -> str:
    try:
        root = os.stat("/dev/shm")
    except OSError:
        return ""
    return f"{root.st_dev}:{root.st_ino}"
