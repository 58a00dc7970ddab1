"""A plan says which agents run in which pods, and how they reach each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from operator_samples import CLUSTER, planned, weightsync
from weightsync_api.v1alpha1 import Device, Transport
from weightsync_operator.local import LocalAddresses
from weightsync_operator.plan import PlanDefaults, PodRole, child_name, plan


@pytest.mark.parametrize(
    ("placement", "replicas", "asked", "wanted"),
    [
        ("Colocated", 1, "Auto", "IPC"),
        ("Colocated", 4, "Auto", "IPC"),
        ("Node", 1, "Auto", "IPC"),
        ("Node", 2, "Auto", "NCCL"),
        ("Node", 2, "IPC", "IPC"),
        ("Node", 1, "NCCL", "NCCL"),
        ("Dedicated", 1, "Auto", "NCCL"),
    ],
)
def test_auto_is_ipc_wherever_memory_can_be_mapped(placement: str, replicas: int, asked: str, wanted: str) -> None:
    made = planned(weightsync(placement=placement, transport=asked, receivers={"replicas": replicas}))
    assert made.transport == wanted
    assert made.config.transport == wanted


@pytest.mark.parametrize(("placement", "gpus"), [("Colocated", [0, 0, 0]), ("Node", [0, 1, 2])])
def test_colocated_and_node_are_one_pod_with_a_process_for_each_agent(placement: str, gpus: list[int]) -> None:
    made = planned(weightsync(placement=placement, receivers={"replicas": 2}))
    (group,) = made.pod_sets
    assert (group.role, group.replicas, group.gpus_per_pod) == (PodRole.GROUP, 1, max(gpus) + 1)
    assert [(a.role, a.rank, a.pod, a.gpu) for a in made.agents()] == [
        ("sender", 0, "demo-group-0", gpus[0]),
        ("receiver", 1, "demo-group-0", gpus[1]),
        ("receiver", 2, "demo-group-0", gpus[2]),
    ]
    assert len(made.receiver_replicas()) == 2


def test_dedicated_ranks_follow_pods_and_their_gpus() -> None:
    made = planned(weightsync(placement="Dedicated", receivers={"replicas": 2, "gpusPerPod": 3}))
    assert [(a.rank, a.pod, a.gpu) for a in made.agents()] == [
        (0, "demo-sender-0", 0),
        (1, "demo-receivers-0", 0),
        (2, "demo-receivers-0", 1),
        (3, "demo-receivers-0", 2),
        (4, "demo-receivers-1", 0),
        (5, "demo-receivers-1", 1),
        (6, "demo-receivers-1", 2),
    ]
    assert made.config.receivers == 6
    assert [[a.rank for a in replica] for replica in made.receiver_replicas()] == [[1, 2, 3], [4, 5, 6]]


def test_on_cpu_no_pod_asks_for_a_gpu() -> None:
    for placement in ("Colocated", "Node", "Dedicated"):
        made = planned(weightsync(placement=placement, device="CPU"))
        assert [pods.gpus_per_pod for pods in made.pod_sets] == [0] * len(made.pod_sets)
        assert {agent.gpu for agent in made.agents()} == {None}


def test_a_platform_without_gpus_plans_for_cpu() -> None:
    made = plan(weightsync(device="CUDA"), PlanDefaults(CLUSTER.addresses, Device.CPU))
    assert (made.device, made.config.device) == (Device.CPU, Device.CPU)


def test_suspended_has_no_agents_and_keeps_its_pod_sets() -> None:
    made = planned(weightsync(suspend=True))
    assert made.agents() == []
    assert [pods.replicas for pods in made.pod_sets] == [0, 0]


def test_the_spec_reaches_the_agents_configuration() -> None:
    made = planned(
        weightsync(
            transfer={"bucketSize": "1Gi", "slots": 3, "ackTimeoutSeconds": 7, "verify": {"everySteps": 5}},
            steps={"count": 9},
            network={"interface": "eth1"},
        )
    ).config
    assert (made.bucket_bytes, made.slots, made.ack_timeout_seconds) == (1 << 30, 3, 7)
    assert (made.verify.every_steps, made.steps.count, made.interface) == (5, 9, "eth1")
    assert made.uid == "u1"


def test_on_a_cluster_pods_of_their_own_use_tcp_with_keys_and_one_pod_uses_a_socket() -> None:
    apart = planned(weightsync(placement="Dedicated")).config
    assert apart.bind == "tcp://*:7400"
    assert apart.connect == "tcp://demo-sender-0.demo-agents.default.svc:7400"
    assert apart.collective_address == "demo-sender-0.demo-agents.default.svc"
    assert apart.curve_dir
    together = planned(weightsync(placement="Node")).config
    assert together.bind == together.connect
    assert together.bind.startswith("ipc://")
    assert together.curve_dir == ""
    assert apart.http == together.http == "0.0.0.0:8080"


def test_on_one_machine_every_placement_uses_sockets_in_one_directory() -> None:
    for placement in ("Colocated", "Node", "Dedicated"):
        config = plan(weightsync(placement=placement), PlanDefaults(LocalAddresses(Path("/r")))).config
        assert (config.bind, config.connect, config.http) == ("ipc:///r/control", "ipc:///r/control", "unix:/r")


def test_a_name_of_63_characters_gives_names_that_fit_and_differ() -> None:
    names = ["a" * 63, "a" * 62 + "b"]
    made = [child_name(name, "receivers") for name in names]
    assert len(set(made)) == 2
    assert all(len(name) <= 52 for name in made)
    assert made[0] == child_name(names[0], "receivers")
    assert child_name("demo", "sender") == "demo-sender"


def test_the_selector_matches_the_labels_of_the_pods_that_hold_receivers() -> None:
    for placement in ("Colocated", "Node", "Dedicated"):
        made = planned(weightsync(placement=placement))
        wanted = dict(part.split("=") for part in made.selector.split(","))
        holders = [p for p in made.pod_sets if any(a.role == "receiver" for a in p.agents)]
        assert [p.labels for p in made.pod_sets if wanted.items() <= p.labels.items()] == [p.labels for p in holders]


def test_a_plan_reads_back_from_its_own_json() -> None:
    made = planned(weightsync(placement="Node", receivers={"replicas": 3}))
    assert type(made).model_validate_json(made.model_dump_json(by_alias=True)) == made
    assert made.transport == Transport.NCCL


def test_the_operator_and_the_command_line_never_import_torch() -> None:
    modules = (
        "weightsync_operator.cli, weightsync_operator.reconcile, weightsync_operator.local_run, "
        "weightsync_operator.main, weightsync_api.crd"
    )
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'weightsync_agent' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
