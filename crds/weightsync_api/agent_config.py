"""What the operator hands an agent: one `AgentConfig` a WeightSync (a file), and its place in it by environment.

Environment of an agent's process:
  WEIGHTSYNC_CONFIG  path of the AgentConfig, JSON
  WEIGHTSYNC_ROLE    sender | receiver
  WEIGHTSYNC_RANK    0 for the sender, 1.. for receivers
  WEIGHTSYNC_POD, WEIGHTSYNC_NODE   names for reports (downward API)
  WEIGHTSYNC_EXIT_ON_STDIN_EOF      1: end when stdin does; its other end is held by a local run's process

Environment of a container of several agents (`weightsync-agent launch`):
  WEIGHTSYNC_AGENTS       ROLE:RANK or ROLE:RANK@GPU, separated by commas
  WEIGHTSYNC_RANK_STRIDE  by how much receivers' ranks grow with the pod's ordinal
  WEIGHTSYNC_COMMANDS     programs in the agents' place by role, JSON
  WEIGHTSYNC_HTTP_OFFSET  added to the port of AgentConfig.http: an agent's place among those of its pod; the
                          container's own variable is that of its first agent (0 unless set)
"""

from __future__ import annotations

from pydantic import Field

from .base import ApiModel
from .v1alpha1.names import NameRule
from .v1alpha1.spec import Device, EngineSpec, Source, Steps, TransferMode, Transport, Verify

ENV_CONFIG = "WEIGHTSYNC_CONFIG"
ENV_ROLE = "WEIGHTSYNC_ROLE"
ENV_RANK = "WEIGHTSYNC_RANK"
ENV_POD = "WEIGHTSYNC_POD"
ENV_NODE = "WEIGHTSYNC_NODE"
ENV_EXIT_ON_STDIN_EOF = "WEIGHTSYNC_EXIT_ON_STDIN_EOF"
ENV_AGENTS = "WEIGHTSYNC_AGENTS"
ENV_RANK_STRIDE = "WEIGHTSYNC_RANK_STRIDE"
ENV_COMMANDS = "WEIGHTSYNC_COMMANDS"
ENV_HTTP_OFFSET = "WEIGHTSYNC_HTTP_OFFSET"


class AgentConfig(ApiModel):
    """The same for every agent of one WeightSync; made by `plan.py`, read by the library's `from_env`."""

    namespace: str = Field(description="Namespace of the WeightSync.")
    name: str = Field(description="Name of the WeightSync.")
    uid: str = Field(default="", description="UID of the WeightSync.")
    device: Device = Field(description="CUDA or CPU.")
    transport: Transport = Field(description="IPC or NCCL: already decided, never Auto.")
    mode: TransferMode = Field(default=TransferMode.AUTO, description="Auto is decided by the sender.")
    bucket_bytes: int = Field(default=256 << 20, gt=0, description="Bytes of one staging bucket.")
    slots: int = Field(default=2, ge=1, description="Staging buckets in flight.")
    push: bool = Field(default=True, description="IPC, on one GPU: the sender writes into the receivers' tensors.")
    receivers: int = Field(ge=0, description="Receivers that the first step waits for: ranks 1 to this number.")
    join_timeout_seconds: float = Field(default=300, gt=0, description="First step's wait for the receivers.")
    ack_timeout_seconds: float = Field(default=60, gt=0, description="From the end of a step's data to an ACK.")
    step_timeout_seconds: float = Field(default=600, gt=0, description="A whole step.")
    verify: Verify = Field(default_factory=Verify, description="When digests are compared.")
    source: Source | None = Field(default=None, description="Where the sender's weights come from.")
    names: list[NameRule] = Field(default_factory=list, description="How the sender's tensors are renamed.")
    steps: Steps = Field(default_factory=Steps, description="Pace and number of steps.")
    engine: EngineSpec = Field(default_factory=EngineSpec, description="What an engine does around a step.")
    bind: str = Field(
        description="ZeroMQ endpoint that the sender binds, such as tcp://*:7400 or ipc:///run/x/control."
    )
    connect: str = Field(description="ZeroMQ endpoint that receivers connect.")
    runtime_dir: str = Field(description="Directory for Unix sockets, shared by the processes of one pod.")
    curve_dir: str = Field(
        default="",
        description="Directory with the CURVE keys, as the files sender.key and receiver.key; empty: none (ipc://).",
    )
    interface: str = Field(default="", description="Network interface for NCCL and gloo; empty: theirs.")
    http: str = Field(
        default="",
        description="Where an agent serves HTTP: `0.0.0.0:8080`, or `unix:DIR` for one socket a rank "
        "(DIR/rank-N.http); empty: not at all.",
    )
    collective_address: str = Field(
        default="127.0.0.1", description="Address at which receivers reach the sender's rendezvous store."
    )
