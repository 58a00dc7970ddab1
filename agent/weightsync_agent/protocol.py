"""The control wire: every message is one ZeroMQ frame of JSON, validated by a model of this module. Never an object.

Receiver -> sender: Hello, Differs, Joined, Regrouped, Drained, Ack, Error, Bye.
Sender -> receiver: Welcome, Refuse, Admitted, Regroup, Begin, Bucket, Commit, Abort, Error, Ping, Bye.

Join:   Hello -> Welcome (or Refuse) -> Joined (or Differs) -> Admitted (or Refuse)
Group:  Regroup -> Regrouped, before a step, whenever the members of a collective transport changed
Step:   Begin -> [Bucket -> Drained]* -> Commit -> Ack | Error; with `whole` set, Begin is the Commit too
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from weightsync_api.reports import MemorySample

from .collector import held_back
from .manifest import Manifest

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 512 << 20
"""A manifest of MAX_TENSORS tensors with long names fits; ZeroMQ drops a peer that sends more (ZMQ_MAXMSGSIZE)."""


MAX_STEP = 1 << 53
"""Steps go into JSON that others read as floating-point numbers; a receiver's word can't push them out of it."""

LARGEST = (1 << 63) - 1
MAX_SECONDS = 1e12

_Step = Annotated[int, Field(ge=0, le=LARGEST)]
_Index = Annotated[int, Field(ge=0, le=LARGEST)]
_Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]

_WIRE = ConfigDict(extra="forbid", frozen=True, ser_json_bytes="base64", val_json_bytes="base64")


class ProtocolError(Exception):
    """A frame that is no message of this protocol."""


class Message(BaseModel):
    model_config = _WIRE


class Identity(BaseModel):
    """Who and where a process is; what the sender needs to know to choose how memory can be shared with it."""

    model_config = _WIRE

    rank: int = Field(ge=0, le=65536)
    pod: str = Field(max_length=253)
    node: str = Field(max_length=253)
    pid: int = Field(ge=0, le=LARGEST)
    pid_namespace: str = Field(default="", max_length=64, description="where `pid` counts: the link /proc/self/ns/pid")
    uid: int = Field(ge=0, le=LARGEST)
    gpu: str = Field(default="", max_length=64, description="GPU UUID without the prefix `GPU-`; empty on CPU")
    shm: str = Field(default="", max_length=64, description="identity of /dev/shm: device and inode of its root")
    nccl_host: str = Field(default="", max_length=256, description="NCCL_HOSTID, where NCCL may map GPUs by it")
    gpu_nodes: int = Field(default=0, ge=0, le=65536, description="GPUs whose device nodes it sees; 0: unknown")
    versions: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=256)]] = Field(
        default_factory=dict, max_length=32
    )


class Region(BaseModel):
    """One piece of memory that is passed as a file descriptor, in the order in which the descriptors come."""

    model_config = _WIRE

    kind: Literal["memfd", "driver"] = Field(description="memfd: host memory; driver: cuMemCreate memory of a GPU")
    role: Literal["control", "flags", "self-test", "slot", "arena"]
    nbytes: int = Field(gt=0, le=1 << 46)
    gpu: str = Field(default="", max_length=64, description="UUID of the GPU that the memory is on")


class TorchHandle(BaseModel):
    """One allocation of torch's, as `UntypedStorage._share_cuda_` exports it. Validated before it is opened."""

    model_config = _WIRE

    gpu: str = Field(max_length=64)
    handle: bytes = Field(max_length=512)
    storage_bytes: int = Field(gt=0, le=1 << 46)
    storage_offset_bytes: int = Field(ge=0, le=1 << 46)
    counter_name: str = Field(pattern=r"^/torch_[A-Za-z0-9_]{1,120}$")
    counter_slot: int = Field(ge=0, le=1 << 20)
    event: bytes = Field(max_length=512)
    event_sync_required: bool


class Offer(BaseModel):
    """What the sender lets one receiver map: descriptors over a Unix socket, and torch handles."""

    model_config = _WIRE

    socket: str = Field(default="", max_length=107, description="path of the Unix socket that passes descriptors")
    token: str = Field(default="", max_length=64, description="opens it, once")
    regions: tuple[Region, ...] = Field(default=(), max_length=64)
    handles: tuple[TorchHandle, ...] = Field(default=(), max_length=1_000_000)
    placements: tuple[tuple[_Index, _Index], ...] | None = Field(
        default=None,
        max_length=1_000_000,
        description="Direct mode: (handle index, byte offset) of each tensor; None: one arena region, "
        "tensors at Manifest.arena_offsets",
    )
    pusher: Identity | None = Field(
        default=None, description="the sender, where it asks for the receiver's own tensors, to write into them"
    )


class Hello(Message):
    kind: Literal["Hello"] = "Hello"
    protocol: _Index
    namespace: str = Field(max_length=253)
    name: str = Field(max_length=253)
    identity: Identity
    manifest_hash: str = Field(default="", max_length=64, description="of the manifest that it still has; or empty")
    step: int = Field(
        default=0, ge=0, le=MAX_STEP, description="last step that it holds whole: a new sender goes on after it"
    )


class Welcome(Message):
    kind: Literal["Welcome"] = "Welcome"
    protocol: _Index
    session: str = Field(max_length=64)
    transport: Literal["IPC", "NCCL"]
    mode: Literal["Direct", "Packed"]
    manifest_hash: str = Field(max_length=64)
    manifest: Manifest | None = Field(default=None, description="absent where the receiver's hash is the same")
    bucket_bytes: int = Field(gt=0, le=LARGEST)
    slots: int = Field(ge=1, le=64)
    offer: Offer | None = None
    offer_number: _Index = Field(default=0, description="a later Welcome takes this one's offer back")


class Refuse(Message):
    kind: Literal["Refuse"] = "Refuse"
    reason: str = Field(max_length=65536)
    retry: bool = Field(default=False, description="the same Hello may be taken later")


class Differs(Message):
    kind: Literal["Differs"] = "Differs"
    differences: str = Field(max_length=65536)
    offer_number: _Index = Field(default=0, description="of the Welcome that it answers")
    retry: bool = Field(default=False, description="it says Hello again by itself: nothing is wrong with it for good")


class Joined(Message):
    kind: Literal["Joined"] = "Joined"
    route: str = Field(max_length=64)
    self_test: str = Field(default="", max_length=64, description="digest that it read in the self-test, hexadecimal")
    offer_number: _Index = Field(default=0, description="of the Welcome that it answers")
    queues: bool = Field(default=False, description="it queues buckets on its GPU's stream, ordered by flags (Packed)")
    targets: tuple[TorchHandle, ...] = Field(
        default=(), max_length=1_000_000, description="its own tensors, which the sender may write within steps"
    )
    placements: tuple[tuple[_Index, _Index], ...] | None = Field(
        default=None, max_length=1_000_000, description="(index in `targets`, byte offset) of each tensor"
    )
    permit: tuple[_Index, _Index] | None = Field(
        default=None,
        description="(index in `targets`, byte offset) of the int32 that is 1 while it lets them be written",
    )
    cannot: str = Field(default="", max_length=4096, description="why it can't take part in the way that was offered")


class Admitted(Message):
    kind: Literal["Admitted"] = "Admitted"
    step: _Step = Field(description="the sender's last step")


class Regroup(Message):
    kind: Literal["Regroup"] = "Regroup"
    epoch: int = Field(ge=1, le=LARGEST)
    ranks: tuple[_Index, ...] = Field(
        max_length=65536, description="the sender's 0 first; a member's place is its rank"
    )
    rendezvous: str = Field(max_length=1024, description="host:port of the store (gloo) or unique id (NCCL, base64)")
    timeout_seconds: _Seconds


class Regrouped(Message):
    kind: Literal["Regrouped"] = "Regrouped"
    epoch: int = Field(ge=1, le=LARGEST)
    route: str = Field(max_length=64)


class Begin(Message):
    kind: Literal["Begin"] = "Begin"
    step: int = Field(ge=1, le=LARGEST)
    manifest_hash: str = Field(max_length=64)
    verify: bool
    whole: bool = Field(
        description="nothing more comes, `Commit` included: who has received every byte holds the step whole"
    )
    digests: bytes = Field(default=b"", description="with `whole` and `verify`: as in Commit")
    timeout_seconds: _Seconds = Field(description="the receiver gives up after this long")
    flag_base: _Index = Field(default=0, description="flags of this step count up from here (IPC, Packed, GPU)")


class Bucket(Message):
    kind: Literal["Bucket"] = "Bucket"
    step: _Step
    bucket: _Index
    slot: _Index


class Drained(Message):
    kind: Literal["Drained"] = "Drained"
    step: _Step
    bucket: _Index


class Commit(Message):
    kind: Literal["Commit"] = "Commit"
    step: _Step
    digests: bytes = Field(default=b"", description="8 bytes little-endian a tensor, in manifest order; or empty")


class Abort(Message):
    kind: Literal["Abort"] = "Abort"
    step: _Step
    cause: str = Field(max_length=4096)


class Ack(Message):
    kind: Literal["Ack"] = "Ack"
    step: _Step
    load_microseconds: _Index
    verified: bool
    memory: MemorySample


class Error(Message):
    kind: Literal["Error"] = "Error"
    step: _Step = Field(default=0, description="0: outside a step")
    bucket: _Index | None = None
    received: bool = Field(default=False, description="the step's data was all in: no broadcast needs this receiver")
    cause: str = Field(max_length=65536)


class Ping(Message):
    """Only proves that the peer's connection still takes messages; it is never answered."""

    kind: Literal["Ping"] = "Ping"


class Bye(Message):
    kind: Literal["Bye"] = "Bye"
    reason: str = Field(default="", max_length=4096)


FromReceiver = Hello | Differs | Joined | Regrouped | Drained | Ack | Error | Bye
FromSender = Welcome | Refuse | Admitted | Regroup | Begin | Bucket | Commit | Abort | Error | Ping | Bye

T = TypeVar("T")

LARGE_FRAME = 1 << 16
"""Bytes. A manifest's, of which thousands of objects are made."""

_FROM_RECEIVER: TypeAdapter[FromReceiver] = TypeAdapter(Annotated[FromReceiver, Field(discriminator="kind")])
_FROM_SENDER: TypeAdapter[FromSender] = TypeAdapter(Annotated[FromSender, Field(discriminator="kind")])


def encode(message: Message) -> bytes:
    """One frame of JSON, UTF-8."""
    return message.model_dump_json(exclude_defaults=False).encode()


def decode_from_receiver(frame: bytes) -> FromReceiver:
    """Raises ProtocolError for anything that is no message of a receiver."""
    return _decode(_FROM_RECEIVER, frame)


def decode_from_sender(frame: bytes) -> FromSender:
    """Raises ProtocolError for anything that is no message of a sender."""
    return _decode(_FROM_SENDER, frame)


def _decode(adapter: TypeAdapter[T], frame: bytes) -> T:
    try:
        with held_back() if len(frame) > LARGE_FRAME else nullcontext():
            return adapter.validate_json(frame)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ProtocolError(f"no message of protocol {PROTOCOL_VERSION}: {where or 'frame'}: {first['msg']}") from None
