"""What NCCL's environment would make it do between processes that do not see one another's GPUs.

NCCL takes processes with equal NCCL_HOSTID and one /dev/shm for one host's, and maps a GPU into the other process (P2P)
without asking whether that sees the GPU's device node. A pod sees its own GPUs only: then the first collective fails
with `invalid device ordinal`. Measured with NCCL 2.28 between Linux namespaces with one GPU's node hidden; the rule is
`p2pCanConnect` of NCCL's src/transport/p2p.cc.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..errors import ConfigError
from ..protocol import Identity

NVIDIA_MAJOR = 195
"""Character devices of NVIDIA GPUs (Documentation/admin-guide/devices.txt of Linux)."""
MAX_HOST = 256
"""Characters of NCCL_HOSTID that are told; longer ones are compared by their beginning."""

_GPU_NODE = re.compile(r"nvidia\d+")


def host_to_map_on(environ: Mapping[str, str]) -> str:
    """NCCL_HOSTID, where it is set and NCCL may map GPUs of that host into each other; empty otherwise.

    P2P is off with NCCL_P2P_DISABLE=1 and with NCCL_P2P_LEVEL=LOC (NCCL user guide, "Environment Variables").
    """
    if environ.get("NCCL_P2P_DISABLE", "0").strip() not in ("", "0"):
        return ""
    if environ.get("NCCL_P2P_LEVEL", "").strip().upper() in ("LOC", "0"):
        return ""
    return environ.get("NCCL_HOSTID", "")[:MAX_HOST]


def gpu_nodes(devices: Path = Path("/dev")) -> int:
    """How many GPUs' device nodes this process sees; 0 where GPUs come another way. A node that something else is
    mounted over, such as /dev/null, doesn't count."""
    try:
        names = [name for name in os.listdir(devices) if _GPU_NODE.fullmatch(name)]
    except OSError:
        return 0
    return sum(_is_gpu(devices / name) for name in names)


def _is_gpu(path: Path) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    return stat.S_ISCHR(found.st_mode) and os.major(found.st_rdev) == NVIDIA_MAJOR


def check_hosts(members: Iterable[Identity]) -> None:
    """Whether NCCL can make a group of these. Raises ConfigError where it would fail at the first collective."""
    hosts: dict[tuple[str, str], list[Identity]] = {}
    for member in members:
        if member.nccl_host and member.gpu:
            hosts.setdefault((member.nccl_host, member.shm), []).append(member)
    for (host, _), there in hosts.items():
        gpus = {member.gpu for member in there}
        least = min(there, key=lambda member: member.gpu_nodes or len(gpus))
        if 0 < least.gpu_nodes < len(gpus):
            ranks = sorted(member.rank for member in there)
            raise ConfigError(
                f"NCCL_HOSTID is {host!r} in ranks {', '.join(map(str, ranks[:20]))}, so NCCL would map their "
                f"{len(gpus)} GPUs into one another, but rank {least.rank} of pod {least.pod} sees the device nodes of "
                f"{least.gpu_nodes} only, and the first collective would fail: unset NCCL_HOSTID, or set "
                "NCCL_P2P_DISABLE=1 and NCCL_CUMEM_HOST_ENABLE=0 too (what network.sharedMemory: Host does)"
            )
