"""What agents report: the body of the sender's `GET /report?after=STEP`, which the operator turns into status."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from pydantic import AwareDatetime, Field

from .base import StatusModel
from .v1alpha1.spec import MAX_RECEIVERS
from .v1alpha1.status import MAX_MESSAGE

MAX_STEPS = 64
"""Steps that a sender keeps, and a report has at most."""
MAX_AGENTS = MAX_RECEIVERS + 1

if TYPE_CHECKING:
    Int64 = int
else:
    Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
    """What the API server stores; a report is somebody else's word."""


class AgentState(StrEnum):
    """State of an agent, as its peer or itself sees it."""

    STARTING = "Starting"
    """Not joined yet."""
    JOINED = "Joined"
    """Joined and self-tested; holds no whole step yet."""
    SYNCED = "Synced"
    """Holds the last step whole."""
    TAINTED = "Tainted"
    """Its last step broke off: its weights may be mixed. Not ready until a later step is whole."""
    LOST = "Lost"
    """Its process is gone or silent."""
    REFUSED = "Refused"
    """The sender refused it; `message` says why."""


MAX_BYTES = (1 << 63) - 1


class MemorySample(StatusModel):
    """An agent's memory around one step, in bytes, read at the same two points of every step.

    CUDA: torch.cuda.memory_reserved, memory_allocated and max_memory_reserved of the agent's device, each plus the
    driver memory that the agent owns (slots, arenas), so that staging memory counts whoever allocated it.
    CPU: the process's own resident memory plus the segments it owns; allocated: the segments alone.
    """

    reserved_before: int = Field(default=0, ge=0, le=MAX_BYTES, description="Reserved when the step began.")
    reserved_after: int = Field(default=0, ge=0, le=MAX_BYTES, description="Reserved when the step was done.")
    allocated_after: int = Field(default=0, ge=0, le=MAX_BYTES, description="Allocated when the step was done.")
    peak: int = Field(default=0, ge=0, le=MAX_BYTES, description="Most reserved within the step.")
    untracked: int = Field(
        default=0, ge=0, le=MAX_BYTES, description="Device memory of the process that torch does not count; 0: unknown."
    )

    @property
    def delta(self) -> int:
        return self.reserved_after - self.reserved_before


class ReceiverStep(StatusModel):
    """One receiver's part of a step."""

    rank: Int64 = Field(description="Rank of the receiver, from 1.")
    state: AgentState = Field(description="Synced when it acknowledged; Tainted, Lost or Refused otherwise.")
    ack_microseconds: Int64 = Field(default=0, description="From the end of the step's data to its ACK.")
    load_microseconds: Int64 = Field(default=0, description="Its time from Begin to loaded, synchronised, released.")
    memory: MemorySample = Field(default_factory=MemorySample, description="Its memory around the step.")
    verified: bool = Field(default=False, description="Its digests were compared and equal.")
    error: str = Field(default="", description="Why it failed: step, bucket and cause.", max_length=MAX_MESSAGE)


class StepReport(StatusModel):
    """One step, as the sender saw it whole."""

    step: Int64 = Field(description="Number of the step, from 1.")
    started_at: AwareDatetime = Field(description="When step() was called.")
    duration_microseconds: Int64 = Field(description="From the call of step() to the last ACK.")
    bytes: Int64 = Field(description="Bytes of weights that each receiver got.")
    memory: MemorySample = Field(default_factory=MemorySample, description="The sender's memory around the step.")
    receivers: list[ReceiverStep] = Field(default_factory=list, max_length=MAX_AGENTS, description="By rank.")
    verified: bool = Field(default=False, description="Every receiver's digests were compared and equal.")
    complete: bool = Field(description="Every receiver that was present acknowledged.")

    @property
    def delta(self) -> int:
        """Largest change of reserved memory of any agent, in bytes."""
        return max([self.memory.delta, *(r.memory.delta for r in self.receivers if r.state == AgentState.SYNCED)])


class AgentReport(StatusModel):
    """One agent's identity and state."""

    rank: Int64 = Field(description="0: the sender.")
    pod: str = Field(default="", description="Pod, or process for a local run.")
    node: str = Field(default="", description="Node that it runs on.")
    pid: Int64 = Field(default=0, description="Process id in its own namespace.")
    gpu: str = Field(default="", description="UUID of its GPU; empty on CPU.")
    state: AgentState = Field(default=AgentState.STARTING, description="Its state.")
    message: str = Field(default="", description="Why, where the state needs a reason.", max_length=MAX_MESSAGE)
    step: Int64 = Field(default=0, description="Last step that it holds whole.")
    ack_microseconds: Int64 = Field(default=0, description="Its last ACK latency.")
    join_microseconds: Int64 = Field(default=0, description="From its Hello to its admission: import and self-test.")
    memory: MemorySample = Field(default_factory=MemorySample, description="Its memory around its last step.")


class Report(StatusModel):
    """The body of `GET /report?after=STEP`: every kept step above STEP, and the agents as they are now."""

    namespace: str = Field(description="Namespace of the WeightSync.")
    name: str = Field(description="Name of the WeightSync.")
    uid: str = Field(default="", description="UID of the WeightSync: a report for another one is refused.")
    session: str = Field(description="Changes whenever the sender's process starts anew.")
    transport: str = Field(default="", description="IPC or NCCL.")
    mode: str = Field(default="", description="Direct or Packed.")
    route: str = Field(default="", description="Route that the bytes really take.")
    names: str = Field(default="", description="What was done to the names of tensors; empty: nothing.")
    self_tested: bool = Field(default=False, description="Every joined receiver passed the transport's self-test.")
    agents: list[AgentReport] = Field(default_factory=list, max_length=MAX_AGENTS, description="By rank.")
    steps: list[StepReport] = Field(default_factory=list, description="Oldest first; the sender keeps the last 64.")
    finished: bool = Field(default=False, description="The sender will do no more steps.")
