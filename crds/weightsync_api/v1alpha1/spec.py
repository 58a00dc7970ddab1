"""`WeightSync.spec`: what a user asks for. Every field's description is what `kubectl explain` prints."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from ..base import ApiModel, Rule, Ruled
from ..quantity import PATTERN, within
from .names import MAX_NAME_RULES, NameRule

MAX_RECEIVERS = 1024
"""Ranks of receivers in one WeightSync; status.agents holds one entry for each."""

EXTENDED_RESOURCE = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"


class Device(StrEnum):
    CUDA = "CUDA"
    CPU = "CPU"


class Placement(StrEnum):
    COLOCATED = "Colocated"
    NODE = "Node"
    DEDICATED = "Dedicated"


class Transport(StrEnum):
    AUTO = "Auto"
    IPC = "IPC"
    NCCL = "NCCL"


class TransferMode(StrEnum):
    AUTO = "Auto"
    DIRECT = "Direct"
    PACKED = "Packed"


class VerifyMode(StrEnum):
    NONE = "None"
    DIGEST = "Digest"


class Pause(StrEnum):
    KEEP = "Keep"
    ABORT = "Abort"
    WAIT = "Wait"
    NONE = "None"


class SharedMemory(StrEnum):
    POD = "Pod"
    HOST = "Host"


class DType(StrEnum):
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class ImagePullPolicy(StrEnum):
    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


def _integer_as_text(value: Any) -> Any:
    """`1073741824` in YAML is a number: a quantity all the same."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _quantity(least: str, example: str) -> Any:
    """Bytes as a Kubernetes quantity (text, or a whole number) from `least` to MAX_QUANTITY; held as text."""
    rule = Rule(
        f"must be a quantity of bytes from {least} to {MAX_QUANTITY}, for example {example}",
        f"string(self).matches(r'{PATTERN}') && isQuantity(string(self))"
        f" && quantity(string(self)).compareTo(quantity('{least}')) >= 0"
        f" && quantity(string(self)).compareTo(quantity('{MAX_QUANTITY}')) <= 0",
        lambda text: within(text, least, MAX_QUANTITY),
    )
    return Annotated[
        str,
        Field(max_length=32, json_schema_extra={"x-kubernetes-int-or-string": True}),
        BeforeValidator(_integer_as_text),
        Ruled((rule,)),
    ]


MAX_QUANTITY = "1Ti"

if TYPE_CHECKING:
    BucketSize = str
    Growth = str
else:
    BucketSize = _quantity("4Ki", "256Mi")
    Growth = _quantity("1", "64Mi")

GpuResource = Annotated[
    str,
    Ruled(
        (
            Rule(
                "must be the name of an extended resource, such as nvidia.com/gpu",
                f"self.matches(r'{EXTENDED_RESOURCE}')",
                lambda text: re.fullmatch(EXTENDED_RESOURCE, text) is not None,
            ),
        )
    ),
]

Overlay = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]
"""A strategic-merge overlay of a PodTemplateSpec. Its schema is the API server's, not ours."""


class SyntheticSource(ApiModel):
    """Weights made up by the agent, in the shapes of a real model: for trials and benchmarks."""

    model: str = Field(
        min_length=1,
        max_length=256,
        description="Model whose tensor shapes are used: qwen3-0.6b, qwen3-4b, qwen3-30b-a3b, "
        "or the path of a Hugging Face config.json in the sender's container.",
    )
    dtype: DType = Field(default=DType.BFLOAT16, description="Data type of every tensor.")


class CheckpointSource(ApiModel):
    """Weights read from safetensors files in the sender's container."""

    path: str = Field(
        min_length=1,
        max_length=4096,
        description="A safetensors file, a directory with one checkpoint (an index or *.safetensors), "
        "or a directory of versions such as step-12 or checkpoint-300.",
    )
    watch: bool = Field(default=True, description="Send every new version as a step; false: send the newest once.")


class TrainerSource(ApiModel):
    """The user's own container drives the sender through the library. It has no fields yet."""


class Source(ApiModel):
    """Where the weights come from: exactly one."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "write exactly one of synthetic: {model: ...}, checkpoint: {path: ...} and trainer: {}",
            "[has(self.synthetic), has(self.checkpoint), has(self.trainer)].filter(x, x).size() == 1",
            lambda s: sum(x is not None for x in (s.synthetic, s.checkpoint, s.trainer)) == 1,
        ),
    )
    synthetic: SyntheticSource | None = Field(default=None, description="Made-up weights in a real model's shapes.")
    checkpoint: CheckpointSource | None = Field(default=None, description="Safetensors files.")
    trainer: TrainerSource | None = Field(default=None, description="The user's container, through the library.")


class SenderSpec(ApiModel):
    """The one sender: rank 0."""

    source: Source = Field(description="Where the weights come from: exactly one of synthetic, checkpoint, trainer.")
    names: list[NameRule] = Field(
        default_factory=list,
        max_length=MAX_NAME_RULES,
        description="Renames the sender's tensors to what the engine calls them, in order. Wrappers' parts such as "
        "_orig_mod and base_model.model are left out before, without a rule.",
    )
    template: Overlay = Field(
        default_factory=dict,
        description="Pod template overlay (strategic merge): the trainer's containers, volumes, node selectors. "
        "What the agent needs is merged in and wins.",
    )


class EngineSpec(ApiModel):
    """What an inference engine does around a step. Others than engines don't look at it."""

    pause: Pause = Field(
        default=Pause.KEEP,
        description="Running requests. Keep: they go on after the step, their keys and values computed anew. "
        "Abort: they end as aborted. Wait: the step begins when they have ended. "
        "None: they go on over keys and values of both weights.",
    )
    reset_prefix_cache: bool = Field(
        default=True, description="Forget the keys and values of the old weights; false: later prompts may reuse them."
    )


class ReceiversSpec(ApiModel):
    """The receivers: ranks 1 to replicas * gpusPerPod."""

    replicas: int = Field(
        default=1,
        ge=0,
        le=2**31 - 1,  # the rule about ranks allows less
        description="Receiver pods (Dedicated) or receiver processes (Colocated, Node).",
    )
    gpus_per_pod: int = Field(
        default=1,
        ge=1,
        le=16,
        description="GPUs, and so agent processes, in each receiver pod. Above 1 only with placement Dedicated.",
    )
    template: Overlay = Field(
        default_factory=dict,
        description="Pod template overlay (strategic merge) of the receivers: the engine's containers and volumes.",
    )
    engine: EngineSpec = Field(
        default_factory=EngineSpec, description="What an inference engine does around a step: pause and cache."
    )


class Verify(ApiModel):
    """Proof that receivers hold the sender's bytes."""

    mode: VerifyMode = Field(
        default=VerifyMode.DIGEST,
        description="Digest: compare a 64-bit digest of every tensor on both sides. None: never.",
    )
    every_steps: int = Field(
        default=100, ge=1, le=1_000_000, description="Verify each step whose number is a multiple; the first always."
    )


class Transfer(ApiModel):
    """How bytes move within a step."""

    mode: TransferMode = Field(
        default=TransferMode.AUTO,
        description="Direct: the sender's tensors are mapped once and read in place. Packed: through staging "
        "buckets. Auto: Direct wherever the sender's memory can be shared, Packed otherwise.",
    )
    bucket_size: BucketSize = Field(default="256Mi", description="Size of one staging bucket: a quantity of bytes.")
    slots: int = Field(default=2, ge=1, le=16, description="Staging buckets in flight. 2 lets both sides work at once.")
    push: bool = Field(
        default=True,
        description="IPC on one GPU, in every mode: the sender writes into the receivers' own tensors where all of "
        "them let it; false: each receiver copies for itself.",
    )
    join_timeout_seconds: int = Field(
        default=300, ge=1, le=86_400, description="Seconds that the first step waits for the receivers to join."
    )
    ack_timeout_seconds: int = Field(
        default=60, ge=1, le=86_400, description="Seconds from the end of a step's data to a receiver's ACK."
    )
    step_timeout_seconds: int = Field(default=600, ge=1, le=86_400, description="Seconds that a whole step may take.")
    verify: Verify = Field(default_factory=Verify, description="Proof that receivers hold the sender's bytes.")


class Steps(ApiModel):
    """Pace of the steps, for the synthetic and checkpoint sources."""

    interval_seconds: int = Field(default=5, ge=0, le=86_400, description="Seconds between the starts of two steps.")
    count: int = Field(default=0, ge=0, le=1_000_000_000, description="Steps to do; 0: no end.")


class MemoryLimits(ApiModel):
    """When the condition MemoryStable turns False."""

    max_reserved_growth: Growth = Field(
        default="64Mi",
        description="Growth of an agent's reserved memory over the window that is still stable: a quantity of bytes.",
    )
    window: int = Field(default=8, ge=2, le=1000, description="Steps over which the growth is measured.")


class Gpus(ApiModel):
    """How pods ask for GPUs."""

    resource: GpuResource = Field(
        default="nvidia.com/gpu", min_length=1, max_length=253, description="Extended resource of a GPU."
    )
    claim_template: str = Field(
        default="",
        max_length=253,
        description="Name of a DRA ResourceClaimTemplate that several containers of a pod share; empty: the resource.",
    )


class Network(ApiModel):
    """How pods reach each other."""

    interface: str = Field(
        default="", max_length=64, description="Network interface for NCCL and gloo, such as eth0; empty: theirs."
    )
    shared_memory: SharedMemory = Field(
        default=SharedMemory.POD,
        description="Host: pods of one node share the host's IPC namespace, so that NCCL uses shared memory "
        "instead of sockets. Not allowed in namespaces with Pod Security level baseline or restricted.",
    )


class AgentSpec(ApiModel):
    """The agent's container."""

    image: str = Field(default="", max_length=512, description="Image; empty: the operator's default.")
    image_pull_policy: ImagePullPolicy = Field(
        default=ImagePullPolicy.IF_NOT_PRESENT, description="When the kubelet pulls the image."
    )
    resources: Overlay = Field(default_factory=dict, description="Resource requirements of the agent's container.")
    env: Annotated[
        list[dict[str, Any]],
        Field(
            max_length=128,
            json_schema_extra={"items": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
        ),
    ] = Field(default_factory=list, description="Environment variables (EnvVar) of the agent's container.")


class WeightSyncSpec(ApiModel):
    """What should be: one sender, its receivers, and how weights go from one to the others."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "transport IPC needs placement Colocated or Node: pods of their own can't map each other's memory",
            "!(self.transport == 'IPC' && self.placement == 'Dedicated')",
            lambda s: not (s.transport == Transport.IPC and s.placement == Placement.DEDICATED),
        ),
        Rule(
            "transport NCCL can't connect two processes on one GPU: "
            "with placement Colocated write transport IPC or Auto",
            "!(self.transport == 'NCCL' && self.placement == 'Colocated' && self.device == 'CUDA')",
            lambda s: (
                not (s.transport == Transport.NCCL and s.placement == Placement.COLOCATED and s.device == Device.CUDA)
            ),
        ),
        Rule(
            "receivers.gpusPerPod above 1 needs placement Dedicated: with Colocated and Node raise receivers.replicas",
            "self.receivers.gpusPerPod == 1 || self.placement == 'Dedicated'",
            lambda s: s.receivers.gpus_per_pod == 1 or s.placement == Placement.DEDICATED,
        ),
        Rule(
            f"receivers.replicas times receivers.gpusPerPod must be at most {MAX_RECEIVERS}",
            f"self.receivers.replicas * self.receivers.gpusPerPod <= {MAX_RECEIVERS}",
            lambda s: s.receivers.replicas * s.receivers.gpus_per_pod <= MAX_RECEIVERS,
        ),
        Rule(
            "placement can't be changed: delete the WeightSync and create it anew",
            "self.placement == oldSelf.placement",
            None,
        ),
        Rule(
            "device can't be changed: delete the WeightSync and create it anew", "self.device == oldSelf.device", None
        ),
    )

    device: Device = Field(
        default=Device.CUDA, description="CUDA, or CPU: shared memory and gloo, for laptops and CI. Immutable."
    )
    placement: Placement = Field(
        default=Placement.DEDICATED,
        description="Colocated: sender and receivers share one GPU in one pod. Node: one pod with a GPU for each "
        "process, over NVLink. Dedicated: pods of their own, over the network. Immutable.",
    )
    transport: Transport = Field(
        default=Transport.AUTO,
        description="IPC: memory mapped between processes of one pod. NCCL: broadcast between GPUs. "
        "Auto: IPC wherever memory can be mapped (Colocated; Node with one receiver), NCCL otherwise.",
    )
    sender: SenderSpec = Field(description="The one sender: rank 0.")
    receivers: ReceiversSpec = Field(default_factory=ReceiversSpec, description="The receivers: ranks 1 and up.")
    transfer: Transfer = Field(default_factory=Transfer, description="How bytes move within a step.")
    steps: Steps = Field(default_factory=Steps, description="Pace of the steps (synthetic and checkpoint sources).")
    memory: MemoryLimits = Field(default_factory=MemoryLimits, description="When MemoryStable turns False.")
    gpus: Gpus = Field(default_factory=Gpus, description="How pods ask for GPUs.")
    network: Network = Field(default_factory=Network, description="How pods reach each other.")
    agent: AgentSpec = Field(default_factory=AgentSpec, description="The agent's container.")
    suspend: bool = Field(default=False, description="True: no pods, so no GPUs; the last status is kept.")
