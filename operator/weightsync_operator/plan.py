"""Pure: a WeightSync -> the agents that should run, in which pods, and the configuration they share.

The plan knows neither Kubernetes nor processes. `pods.py` renders a PodSet to a StatefulSet, `local.py` to processes;
where the two differ in how agents reach each other is `Addresses`, and nothing else.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from pydantic import ConfigDict, Field
from weightsync_api.agent_config import AgentConfig
from weightsync_api.base import ApiModel
from weightsync_api.quantity import parse_bytes
from weightsync_api.v1alpha1 import Device, Placement, Transport, WeightSync
from weightsync_api.v1alpha1.spec import AgentSpec, Gpus, Network

LABEL_NAME = "weightsync.dev/name"
LABEL_ROLE = "weightsync.dev/role"
CONTROL_PORT = 7400
HTTP_PORT = 8080

MAX_SET_NAME = 52
"""A StatefulSet's pods carry the label `controller-revision-hash: NAME-<10 characters>`, which may have 63."""


class Key(NamedTuple):
    """Which WeightSync."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Role(StrEnum):
    """What an agent is (the values of WEIGHTSYNC_ROLE)."""

    SENDER = "sender"
    RECEIVER = "receiver"


class PodRole(StrEnum):
    """What a pod holds: the sender, receivers, or the whole group (the label weightsync.dev/role)."""

    SENDER = "sender"
    RECEIVER = "receiver"
    GROUP = "group"


class PlanModel(ApiModel):
    model_config = ConfigDict(**{**ApiModel.model_config, "frozen": True})


class AgentSlot(PlanModel):
    """One agent of each pod of a set."""

    role: Role = Field(description="sender or receiver.")
    rank: int = Field(ge=0, description="Rank in the set's first pod; in pod N it is higher by N * rankStride.")
    gpu: int | None = Field(default=None, description="Which of the pod's GPUs it uses; null on CPU.")


class PlannedAgent(NamedTuple):
    """One agent that should run."""

    role: Role
    rank: int
    pod: str
    ordinal: int
    gpu: int | None


class PodSet(PlanModel):
    """Pods of one kind, numbered from 0."""

    name: str = Field(description="Name of the set; its pods are NAME-0, NAME-1 and so on.")
    role: PodRole = Field(description="What a pod of it holds.")
    replicas: int = Field(ge=0, description="Number of pods; 0 while suspended.")
    agents: tuple[AgentSlot, ...] = Field(description="Agents of each pod, one process each, in one container.")
    rank_stride: int = Field(default=0, ge=0, description="By how much ranks grow from one pod to the next.")
    gpus_per_pod: int = Field(default=0, ge=0, description="GPUs that each pod asks for.")
    sender_template: dict[str, Any] = Field(default_factory=dict, description="Overlay of the sender's part.")
    receiver_template: dict[str, Any] = Field(default_factory=dict, description="Overlay of the receivers' part.")
    labels: dict[str, str] = Field(description="Labels of the pods.")

    def pod_name(self, ordinal: int) -> str:
        return f"{self.name}-{ordinal}"

    def agents_of(self, ordinal: int) -> list[PlannedAgent]:
        """The agents of pod `ordinal`, by rank."""
        pod = self.pod_name(ordinal)
        return [PlannedAgent(a.role, a.rank + ordinal * self.rank_stride, pod, ordinal, a.gpu) for a in self.agents]

    def template(self, role: Role) -> dict[str, Any]:
        return self.sender_template if role == Role.SENDER else self.receiver_template


class Plan(PlanModel):
    """What should run for one WeightSync."""

    namespace: str = Field(description="Namespace of the WeightSync.")
    name: str = Field(description="Name of the WeightSync.")
    generation: int = Field(default=0, ge=0, description="Generation of the spec that this was made from.")
    device: Device = Field(description="CUDA or CPU.")
    transport: Transport = Field(description="IPC or NCCL, never Auto.")
    suspended: bool = Field(default=False, description="True: no pods.")
    service: str = Field(description="Name that the pods' DNS names are under.")
    selector: str = Field(description="Label selector of the pods that hold receivers.")
    pod_sets: tuple[PodSet, ...] = Field(description="Which pods.")
    config: AgentConfig = Field(description="What every agent is told.")
    agent: AgentSpec = Field(default_factory=AgentSpec, description="The agents' container, as in the spec.")
    gpus: Gpus = Field(default_factory=Gpus, description="How pods ask for GPUs.")
    network: Network = Field(default_factory=Network, description="How pods reach each other.")

    @property
    def key(self) -> Key:
        return Key(self.namespace, self.name)

    def agents(self) -> list[PlannedAgent]:
        """Every agent that should run, by rank; none while suspended."""
        found = [a for pods in self.pod_sets for n in range(pods.replicas) for a in pods.agents_of(n)]
        return sorted(found, key=lambda agent: agent.rank)

    def receiver_replicas(self) -> list[list[PlannedAgent]]:
        """The receivers in the unit that `receivers.replicas` counts: a pod where receivers have pods of their own
        (Dedicated), a process where they share one."""
        replicas: list[list[PlannedAgent]] = []
        for pods in self.pod_sets:
            for ordinal in range(pods.replicas):
                receivers = [a for a in pods.agents_of(ordinal) if a.role == Role.RECEIVER]
                if pods.role == PodRole.GROUP:
                    replicas += [[receiver] for receiver in receivers]
                elif receivers:
                    replicas.append(receivers)
        return replicas


@dataclass(frozen=True)
class Endpoints:
    """How the agents of one WeightSync reach each other; the fields are AgentConfig's."""

    bind: str
    connect: str
    runtime_dir: str
    http: str
    curve_dir: str = ""
    collective_address: str = "127.0.0.1"


class Addresses(Protocol):
    """Where a platform puts the agents' endpoints."""

    def endpoints(self, key: Key, one_pod: bool, sender_pod: str, service: str) -> Endpoints:
        """`one_pod`: all agents are processes of one pod."""
        ...


@dataclass(frozen=True)
class ClusterAddresses:
    """Pods: Unix sockets within one, TCP with CURVE keys between several, by the headless Service's DNS names."""

    runtime_dir: str = "/run/weightsync"
    curve_dir: str = "/etc/weightsync/curve"

    def endpoints(self, key: Key, one_pod: bool, sender_pod: str, service: str) -> Endpoints:
        http = f"0.0.0.0:{HTTP_PORT}"
        if one_pod:
            control = f"ipc://{self.runtime_dir}/control"
            return Endpoints(bind=control, connect=control, runtime_dir=self.runtime_dir, http=http)
        host = f"{sender_pod}.{service}.{key.namespace}.svc"
        return Endpoints(
            bind=f"tcp://*:{CONTROL_PORT}",
            connect=f"tcp://{host}:{CONTROL_PORT}",
            runtime_dir=self.runtime_dir,
            http=http,
            curve_dir=self.curve_dir,
            collective_address=host,
        )


@dataclass(frozen=True)
class PlanDefaults:
    """What a plan takes from the platform rather than from the spec."""

    addresses: Addresses
    device: Device | None = None
    """Set where the platform has no choice: a machine without a GPU runs a CUDA spec on CPU."""


def child_name(name: str, suffix: str) -> str:
    """`NAME-SUFFIX`, deterministic; a long NAME is cut and told apart by a hash, so that every label still fits."""
    room = MAX_SET_NAME - len(suffix) - 1
    if len(name) > room:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{name[: room - 9].rstrip('-')}-{digest}"
    return f"{name}-{suffix}"


def resolve_transport(ws: WeightSync) -> Transport:
    """Auto: IPC wherever memory can be mapped (Colocated; Node with one receiver at most), NCCL otherwise."""
    spec = ws.spec
    if spec.transport != Transport.AUTO:
        return spec.transport
    mappable = spec.placement == Placement.COLOCATED or (
        spec.placement == Placement.NODE and spec.receivers.replicas <= 1
    )
    return Transport.IPC if mappable else Transport.NCCL


def plan(ws: WeightSync, defaults: PlanDefaults) -> Plan:
    """What should run for this WeightSync."""
    spec, key = ws.spec, Key(ws.metadata.namespace, ws.metadata.name)
    device = defaults.device or spec.device
    one_pod = spec.placement != Placement.DEDICATED
    transport = resolve_transport(ws)
    pod_sets = _one_pod(ws, device) if one_pod else _pods_of_their_own(ws, device)
    service = child_name(key.name, "agents")
    ends = defaults.addresses.endpoints(key, one_pod, pod_sets[0].pod_name(0), service)
    config = AgentConfig(
        namespace=key.namespace,
        name=key.name,
        uid=ws.metadata.uid,
        device=device,
        transport=transport,
        mode=spec.transfer.mode,
        bucket_bytes=parse_bytes(spec.transfer.bucket_size),
        push=spec.transfer.push,
        slots=spec.transfer.slots,
        receivers=spec.receivers.replicas * spec.receivers.gpus_per_pod,
        join_timeout_seconds=spec.transfer.join_timeout_seconds,
        ack_timeout_seconds=spec.transfer.ack_timeout_seconds,
        step_timeout_seconds=spec.transfer.step_timeout_seconds,
        verify=spec.transfer.verify,
        source=spec.sender.source,
        names=spec.sender.names,
        steps=spec.steps,
        engine=spec.receivers.engine,
        interface=spec.network.interface,
        bind=ends.bind,
        connect=ends.connect,
        runtime_dir=ends.runtime_dir,
        curve_dir=ends.curve_dir,
        http=ends.http,
        collective_address=ends.collective_address,
    )
    receiver_role = PodRole.GROUP if one_pod else PodRole.RECEIVER
    return Plan(
        namespace=key.namespace,
        name=key.name,
        generation=ws.metadata.generation,
        device=device,
        transport=transport,
        suspended=spec.suspend,
        service=service,
        selector=f"{LABEL_NAME}={key.name},{LABEL_ROLE}={receiver_role}",
        pod_sets=pod_sets,
        config=config,
        agent=spec.agent,
        gpus=spec.gpus,
        network=spec.network,
    )


def _labels(ws: WeightSync, role: PodRole) -> dict[str, str]:
    return {LABEL_NAME: ws.metadata.name, LABEL_ROLE: role.value}


def _one_pod(ws: WeightSync, device: Device) -> tuple[PodSet, ...]:
    """Sender and receivers in one container: only there can they map each other's memory or use NVLink."""
    spec = ws.spec
    ranks = range(spec.receivers.replicas + 1)
    shared = spec.placement == Placement.COLOCATED
    cuda = device == Device.CUDA
    agents = tuple(
        AgentSlot(role=Role.RECEIVER if rank else Role.SENDER, rank=rank, gpu=(0 if shared else rank) if cuda else None)
        for rank in ranks
    )
    return (
        PodSet(
            name=child_name(ws.metadata.name, "group"),
            role=PodRole.GROUP,
            replicas=0 if spec.suspend else 1,
            agents=agents,
            gpus_per_pod=(1 if shared else len(ranks)) if cuda else 0,
            sender_template=spec.sender.template,
            receiver_template=spec.receivers.template,
            labels=_labels(ws, PodRole.GROUP),
        ),
    )


def _pods_of_their_own(ws: WeightSync, device: Device) -> tuple[PodSet, ...]:
    spec = ws.spec
    cuda, each = device == Device.CUDA, spec.receivers.gpus_per_pod
    return (
        PodSet(
            name=child_name(ws.metadata.name, "sender"),
            role=PodRole.SENDER,
            replicas=0 if spec.suspend else 1,
            agents=(AgentSlot(role=Role.SENDER, rank=0, gpu=0 if cuda else None),),
            gpus_per_pod=1 if cuda else 0,
            sender_template=spec.sender.template,
            labels=_labels(ws, PodRole.SENDER),
        ),
        PodSet(
            name=child_name(ws.metadata.name, "receivers"),
            role=PodRole.RECEIVER,
            replicas=0 if spec.suspend else spec.receivers.replicas,
            agents=tuple(
                AgentSlot(role=Role.RECEIVER, rank=1 + local, gpu=local if cuda else None) for local in range(each)
            ),
            rank_stride=each,
            gpus_per_pod=each if cuda else 0,
            receiver_template=spec.receivers.template,
            labels=_labels(ws, PodRole.RECEIVER),
        ),
    )
