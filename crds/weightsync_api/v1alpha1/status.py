"""`WeightSync.status`: what is. Integers with their unit in the name; no floats, no phase (API conventions)."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field

from ..base import StatusModel
from .spec import MAX_RECEIVERS

MAX_MESSAGE = 4096
"""Characters of what is told of an agent's state."""

MAX_NAMES = 1024
"""Characters of what is told of the tensors' names."""

MAX_HISTORY = 10
"""Steps whose figures are kept."""


def _map(key: str) -> dict[str, Any]:
    """Schema of a list whose entries server-side apply merges by `key`."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


class ConditionType(StrEnum):
    """What a condition is about: each is judged in the operator's conditions.py."""

    READY = "Ready"
    PROGRESSING = "Progressing"
    MEMORY_STABLE = "MemoryStable"
    ACKS_TIMELY = "AcksTimely"
    TRANSPORT_OPTIMAL = "TransportOptimal"
    IPC_VERIFIED = "IPCVerified"
    PODS_RESTRICTED = "PodsRestricted"
    SUSPENDED = "Suspended"


class Condition(StatusModel):
    """A metav1.Condition."""

    type: ConditionType = Field(description="Kind of the condition.")
    status: Literal["True", "False", "Unknown"] = Field(description="True, False or Unknown.")
    reason: str = Field(description="One CamelCase word that says why.", max_length=1024)
    message: str = Field(default="", description="A sentence for people: what, where, what to do.", max_length=32768)
    last_transition_time: datetime = Field(description="When the status last changed.")
    observed_generation: int = Field(default=0, ge=0, description="Generation of the spec that this is about.")


class ReservedBytes(StatusModel):
    """Reserved memory around one step, in bytes."""

    sender: int = Field(default=0, description="Reserved by the sender after the step.")
    receiver_max: int = Field(default=0, description="Most reserved by any receiver after the step.")
    delta: int = Field(default=0, description="Largest change over the step of any agent; 0 or below: flat.")
    peak: int = Field(default=0, description="Most reserved by any agent within the step.")


class AckMicroseconds(StatusModel):
    """From the end of a step's data to the receivers' ACKs, in microseconds."""

    p50: int = Field(default=0, description="Median over the receivers.")
    p99: int = Field(default=0, description="99th percentile over the receivers.")
    max: int = Field(default=0, description="Slowest receiver.")


class StepStatus(StatusModel):
    """What one step cost."""

    step: int = Field(description="Number of the step, from 1.")
    started_at: datetime = Field(description="When the step began.")
    duration_microseconds: int = Field(description="From the begin of the step to the last ACK, in microseconds.")
    bytes: int = Field(description="Bytes of weights that each receiver got.")
    receivers: int = Field(description="Receivers that acknowledged the step.")
    reserved_bytes: ReservedBytes = Field(default_factory=ReservedBytes, description="Reserved memory, in bytes.")
    ack_microseconds: AckMicroseconds = Field(default_factory=AckMicroseconds, description="ACK latency.")
    verified: bool = Field(default=False, description="Whether the receivers' digests were compared and equal.")
    complete: bool = Field(default=True, description="Whether every present receiver acknowledged.")


class AgentStatus(StatusModel):
    """One agent, by rank."""

    rank: int = Field(description="0: the sender.")
    role: Literal["Sender", "Receiver"] = Field(description="Sender or Receiver.")
    pod: str = Field(default="", description="Pod, or process for a local run.")
    node: str = Field(default="", description="Node that it runs on.")
    gpu: str = Field(default="", description="UUID of its GPU; empty on CPU.")
    state: str = Field(default="Starting", description="Starting, Joined, Synced, Tainted, Lost or Refused.")
    message: str = Field(default="", description="Why, where the state needs a reason.", max_length=MAX_MESSAGE)
    step: int = Field(default=0, description="Last step that it holds whole.")
    reserved_bytes: int = Field(default=0, description="Reserved memory after its last step, in bytes.")
    allocated_bytes: int = Field(default=0, description="Allocated memory after its last step, in bytes.")
    ack_microseconds: int = Field(default=0, description="Its last ACK latency, in microseconds.")


class Summary(StatusModel):
    """Strings for the printer columns of `kubectl get weightsyncs`."""

    status: str = Field(default="", description="One word: Syncing, Starting, Suspended, Degraded or Complete.")
    receivers: str = Field(default="", description="Ready and wanted receivers, such as 2/2.")
    reserved: str = Field(default="", description="Most reserved memory of any agent, such as 8.1GiB.")
    reserved_delta: str = Field(default="", description="Largest change of it over the last step, such as +0B.")
    ack: str = Field(default="", description="Slowest ACK of the last step, such as 0.8ms.")
    rate: str = Field(default="", description="Weights delivered to each receiver, such as 348GB/s.")
    nodes: str = Field(default="", description="Nodes of its agents, such as node-a or node-a,node-b,+2.")
    ack_p99: str = Field(default="", description="99th percentile of the last step's ACKs, such as 0.9ms.")
    peak: str = Field(default="", description="Most reserved by any agent within the last step, such as 8.4GiB.")
    verified: str = Field(default="", description="Last step whose digests were compared and equal, such as 100.")


class WeightSyncStatus(StatusModel):
    """What is: written by the operator alone."""

    observed_generation: int = Field(default=0, ge=0, description="Generation of the spec that was last reconciled.")
    conditions: list[Condition] = Field(
        default_factory=list, max_length=16, description="Conditions, by type.", json_schema_extra=_map("type")
    )
    transport: str = Field(default="", description="Transport in use: IPC or NCCL.")
    mode: str = Field(default="", description="Transfer mode in use: Direct or Packed.")
    route: str = Field(default="", description="Route in use, such as P2P/CUMEM, NET/Socket or SharedMemory.")
    names: str = Field(
        default="",
        max_length=MAX_NAMES,
        description="What was done to the names of the sender's tensors: wrappers' parts left out, renamed, not sent.",
    )
    replicas: int = Field(default=0, ge=0, description="Receiver pods that exist.")
    ready_replicas: int = Field(default=0, ge=0, description="Receivers that hold a whole step.")
    selector: str = Field(default="", description="Label selector of the receiver pods, for the scale subresource.")
    step: int = Field(default=0, ge=0, description="Last complete step.")
    last_step: StepStatus | None = Field(default=None, description="What the last step cost.")
    history: list[StepStatus] = Field(
        default_factory=list,
        max_length=MAX_HISTORY,
        description="The last 10 steps, newest last.",
        json_schema_extra=_map("step"),
    )
    agents: list[AgentStatus] = Field(
        default_factory=list,
        max_length=MAX_RECEIVERS + 1,
        description="Agents, by rank.",
        json_schema_extra=_map("rank"),
    )
    summary: Summary = Field(default_factory=Summary, description="Strings for the printer columns.")
