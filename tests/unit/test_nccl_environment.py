"""A group that NCCL could not make is refused in a sentence; no other is, and the operator plans none."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from operator_samples import planned, weightsync
from pydantic import ValidationError
from weightsync_agent.cuda.nccl_environment import NVIDIA_MAJOR, check_hosts, gpu_nodes, host_to_map_on
from weightsync_agent.errors import ConfigError
from weightsync_agent.protocol import Identity
from weightsync_operator.pods import pod_template


def member(rank: int, **changed: Any) -> Identity:
    """A pod that sees its own GPU only, with the host's /dev/shm and NCCL_HOSTID=n1."""
    fields = {"pod": f"pod-{rank}", "node": "n1", "pid": 7, "uid": 0, "gpu": f"gpu-{rank}", "shm": "1:1"}
    return Identity.model_validate({"rank": rank, **fields, "nccl_host": "n1", "gpu_nodes": 1, **changed})


def test_pods_that_see_their_own_gpus_only_can_t_have_one_host_id() -> None:
    with pytest.raises(ConfigError, match=r"NCCL_HOSTID is 'n1' in ranks 0, 1, .*NCCL_P2P_DISABLE=1"):
        check_hosts([member(0), member(1)])


def test_the_receivers_of_another_node_are_looked_at_among_themselves() -> None:
    with pytest.raises(ConfigError, match="in ranks 1, 2"):
        check_hosts([member(0, nccl_host="n0"), member(1), member(2)])


@pytest.mark.parametrize(
    "changed",
    [
        {"nccl_host": ""},  # not set, or P2P is off: it goes through the host's memory
        {"nccl_host": "n2"},  # another node
        {"shm": "2:1"},  # NCCL takes a /dev/shm of its own for another host: sockets
        {"gpu_nodes": 2},  # one container, or one claim: over NVLink
        {"gpu_nodes": 0},  # GPUs that come without such nodes
    ],
    ids=str,
)
def test_what_nccl_can_do_is_not_refused(changed: dict[str, Any]) -> None:
    others = {"gpu_nodes": changed["gpu_nodes"]} if "gpu_nodes" in changed else {}
    check_hosts([member(0, **others), member(1, **changed)])
    check_hosts([])


@pytest.mark.parametrize(
    ("environ", "host"),
    [
        ({}, ""),
        ({"NCCL_HOSTID": "n1"}, "n1"),
        ({"NCCL_HOSTID": "n1", "NCCL_P2P_DISABLE": "0"}, "n1"),
        ({"NCCL_HOSTID": "n1", "NCCL_P2P_DISABLE": "1"}, ""),
        ({"NCCL_HOSTID": "n1", "NCCL_P2P_LEVEL": "LOC"}, ""),
        ({"NCCL_HOSTID": "n1", "NCCL_P2P_LEVEL": "NVL"}, "n1"),
        ({"NCCL_HOSTID": "n" * 999}, "n" * 256),
    ],
)
def test_a_host_id_counts_where_nccl_may_map_gpus(environ: dict[str, str], host: str) -> None:
    assert host_to_map_on(environ) == host


def test_a_node_that_dev_null_lies_over_is_none(tmp_path: Path) -> None:
    assert gpu_nodes(tmp_path / "none") == 0
    try:
        for name, major, minor in (("nvidia0", NVIDIA_MAJOR, 0), ("nvidia1", 1, 3), ("nvidiactl", NVIDIA_MAJOR, 255)):
            os.mknod(tmp_path / name, 0o600 | 0o020000, os.makedev(major, minor))
    except PermissionError:
        pytest.skip("needs the right to make device nodes")
    assert gpu_nodes(tmp_path) == 1


def every_spec() -> list[dict[str, Any]]:
    """Every combination of what decides a pod's devices, memory and NCCL settings."""
    choices = product(
        ("CUDA", "CPU"), ("Colocated", "Node", "Dedicated"), ("Auto", "IPC", "NCCL"), ("Pod", "Host"),
        (0, 1, 3), (1, 2), ("", "shared"),
    )  # fmt: skip
    return [
        {
            "device": device, "placement": placement, "transport": transport, "network": {"sharedMemory": memory},
            "receivers": {"replicas": replicas, "gpusPerPod": each}, "gpus": {"claimTemplate": claim},
        }
        for device, placement, transport, memory, replicas, each, claim in choices
    ]  # fmt: skip


def test_no_spec_whatever_is_planned_with_a_host_id_and_p2p_between_pods() -> None:
    """Not by the operator itself, and with the user's own NCCL_HOSTID only where one container sees all GPUs."""
    user = {"agent": {"env": [{"name": "NCCL_HOSTID", "value": "mine"}]}}
    valid = refused = with_host = 0
    for spec in every_spec():
        for more in ({}, user):
            try:
                ws = weightsync(**spec, **more)
            except ValidationError:
                continue
            plan = planned(ws)
            valid += 1
            for pods in plan.pod_sets:
                template, problems = pod_template(plan, pods, "agent:1")
                if problems:
                    refused += 1
                    continue
                for container in template["spec"]["containers"]:
                    env = {entry["name"]: entry.get("value") for entry in container["env"]}
                    apart = len(plan.pod_sets) > 1 and spec["device"] == "CUDA"
                    if "NCCL_HOSTID" in env and apart:
                        with_host += 1
                        assert env["NCCL_P2P_DISABLE"] == "1", spec
                        assert env["NCCL_CUMEM_HOST_ENABLE"] == "0", spec
    assert valid > 100
    assert refused
    assert with_host
