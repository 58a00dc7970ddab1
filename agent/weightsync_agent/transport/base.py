"""What every transport is: two ends that the sender's and the receiver's state machines drive.

The state machine (sender.py with carrier.py; receiver.py) owns messages, deadlines and failures; a transport owns
memory and copies. A transport's end is made once for the agent's life: streams, slots and mappings are reused by every
step.

Life of the two ends:

    sender end                                   receiver end
    ----------                                   ------------
    __init__(plan)                               __init__(welcome, manifest, target)
    offer(identity)        -> Welcome.offer ->   join() -> Joined
    check_join(rank, joined)
    regroup(...)           -> Regroup       ->   regroup(...) -> Regrouped        collective transports only
    connect(...)                                                                  (both block until all are in)
    each step:
    fence(); digests()?    -> Begin         ->   receive(channel): every byte into the target, then synchronised,
    send(channel)                                views dropped, so that the ACK that follows means released
    forget(rank)           when a receiver left
    close()                                      close()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol

import torch

from ..deadline import Deadline
from ..manifest import Manifest
from ..protocol import FromReceiver, FromSender, Identity, Joined, Message, Offer, Regroup, Regrouped, Welcome
from ..targets import Target


class Arena(Protocol):
    """One piece of memory that other processes can map: HostMemory, or a GPU's DeviceArena."""

    @property
    def nbytes(self) -> int: ...

    def tensor(self) -> torch.Tensor:
        """All of it as uint8, shape (nbytes,)."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class SendPlan:
    """What a sender end is made of."""

    manifest: Manifest
    tensors: Sequence[torch.Tensor]
    """The source tensors in manifest order, aliases included, all on `device`. Others, or elsewhere: see `replan`."""
    mode: Literal["Direct", "Packed"]
    bucket_bytes: int
    slots: int
    runtime_dir: str
    device: torch.device
    push: bool = True
    """On one GPU: the sender may write into the receivers' tensors itself (push.py)."""
    interface: str = ""
    collective_address: str = "127.0.0.1"
    arena: Arena | None = field(default=None, compare=False)
    """The arena that holds `tensors` at `manifest.arena_offsets`, where they were adopted into one."""
    gather: Callable[[Sequence[int]], Sequence[torch.Tensor]] | None = field(default=None, compare=False)
    """Where `tensors` are not what is sent (shards, or another dtype): makes the whole tensors of these manifest
    entries, contiguous, in the manifest's dtype, valid until the next call. None: `tensors` themselves are sent."""
    computed: bool = False
    """Only `gather` can make what is sent: `tensors` differ from it by more than their dtype."""


class SendChannel(Protocol):
    """What the sender's state machine lends its transport within a step."""

    step: int
    verify: bool
    """Whether `digests` will be asked for after `send`."""
    deadline: Deadline

    @property
    def ranks(self) -> Sequence[int]:
        """Receivers still in the step; one that failed or died is gone from it."""
        ...

    def started(self) -> None:
        """To be called once by a transport that `overlaps`: its copies are queued. Raises where the step must not be
        called whole, whatever was copied: tensors had moved.
        """
        ...

    def post(self, message: Message, rank: int | None = None) -> None:
        """Sends to one receiver, or to all in the step. Never blocks; a dead receiver leaves the step."""
        ...

    def pump(self, until_drained: int | None = None) -> None:
        """Takes messages in until every receiver in the step has drained this bucket (None: just what is there).

        Raises StepTimeout at the deadline. Receivers that answer Error or die leave the step on the way.
        """
        ...

    def alive(self) -> bool:
        """Takes in what is there, without waiting. For polling loops.

        False once a receiver left this step before it had all of its data: a broadcast can't end without it.
        """
        ...


class ReceiveChannel(Protocol):
    """What the receiver's state machine lends its transport within a step."""

    step: int
    verify: bool
    """Whether `digests` will be asked for after this step."""
    deadline: Deadline

    def started(self) -> None:
        """To be called once: before any memory is allocated for the step, and best while queued copies run."""
        ...

    def wait_bucket(self, bucket: int) -> int:
        """Waits for the sender's Bucket message and gives its slot. Raises StepTimeout, or Closed at an Abort."""
        ...

    flag_base: int
    """Begin's."""

    def drained(self, bucket: int) -> None:
        """Tells the sender that the bucket's slot is free."""
        ...

    def check(self) -> None:
        """Raises Closed when the sender has aborted the step or is gone. Never waits; for polling loops."""
        ...


class SenderTransport(ABC):
    """The sender's end."""

    kind: ClassVar[Literal["IPC", "NCCL"]]
    collective: ClassVar[bool] = False
    """True: all members move the bytes together, in a group that `regroup` and `connect` make."""

    needs_regroup: bool = False
    """A collective transport's group is broken (a step failed in it): make a new one before the next step."""

    def __init__(self, plan: SendPlan) -> None:
        self.plan = plan

    @property
    def whole(self) -> bool:
        """True: the bytes are in place when a step begins (Direct), and nothing but Begin is sent."""
        return self.plan.mode == "Direct" and not self.collective

    @property
    def overlaps(self) -> bool:
        """True: this end's host is free while a step's copies run, and `send` says when (`SendChannel.started`)."""
        return self.whole

    @property
    @abstractmethod
    def route(self) -> str:
        """What the bytes really go through, such as SharedMemory, CUDA-IPC, P2P/CUMEM, NET/Socket."""

    @property
    @abstractmethod
    def owned_bytes(self) -> int:
        """Bytes of staging and arena memory that this end allocated outside torch's allocator."""

    def offer(self, identity: Identity) -> Offer | None:
        """Exports for this one receiver. Raises Refused with the sentence that says why memory can't be shared."""
        return None

    def check_join(self, rank: int, joined: Joined) -> None:
        """Judges the receiver's self-test. Raises SelfTestFailed."""

    def regroup(self, epoch: int, ranks: Sequence[int], timeout: float) -> Regroup:
        """The message that invites `ranks` (0 first) into a new group. Collective transports only."""
        raise NotImplementedError

    def connect(self, regroup: Regroup, deadline: Deadline, check: Callable[[], None]) -> None:
        """Joins the group as rank 0; blocks until all members are in. Raises TransportError or StepTimeout.

        `check`: called while waiting; raises when a member has left.
        """
        raise NotImplementedError

    def fence(self) -> None:
        """Makes the trainer's queued writes visible to what follows. On a GPU: waits for the current stream."""

    def lay(self, rank: int, frame: bytes) -> None:
        """Lays a copy of a message to a receiver where it is seen sooner than over ZeroMQ, if it is looking."""

    def lay_ahead(self, rank: int, step: int, frame: bytes) -> None:
        """Lays a message of this step that will be due: it counts once the very same is given to `lay`."""

    def find(self, rank: int) -> FromReceiver | None:
        """A message that a receiver laid so. Never waits."""
        return None

    def note(self, rank: int) -> int:
        """What the receiver confirmed the message with that `find` gave last; 0: it was not laid ahead."""
        return 0

    def took(self, rank: int) -> None:
        """The message that `find` gave last was of use: the receiver need not send it over ZeroMQ."""

    def open_step(self, step: int) -> None:
        """The tensors lie still from now on: where receivers can look at shared memory, they see it there."""

    commits: ClassVar[bool] = True
    """Whether receivers must be told when all is sent. False: who has received every byte knows it by itself."""

    flag_base: int = 0
    """What Begin announces: flags of the step that begins count up from here."""

    def close_step(self) -> None:
        """The step was given up: who still copies finds out after its copy that its bytes may be torn."""

    @abstractmethod
    def digests(self) -> bytes:
        """8 bytes little-endian a tensor in manifest order (see digest.py)."""

    @abstractmethod
    def send(self, channel: SendChannel) -> None:
        """Moves a step's bytes. Returns when this end's part is done; ACKs are the state machine's.

        Raises TransportError or StepTimeout. Not called when `whole`.
        """

    @abstractmethod
    def forget(self, rank: int, gone: bool = False) -> int:
        """The receiver left: takes back what was exported to it. Gives the bytes that it left stranded.

        `gone`: its process is known to be dead, and its mappings with it.
        """

    def replan(self) -> bool:
        """The plan's tensors lie elsewhere by now: what was made of their addresses is made anew. Between steps.

        True: receivers map the old ones, and need another offer.
        """
        return False

    @property
    def pushes(self) -> bool:
        """The sender writes into the receivers' own tensors, as long as all of them let it."""
        return False

    def fall_back(self, reason: str) -> None:
        """After `offer` or `check_join` raised FallBack: goes on without pushing where it pushed, else in Packed mode,
        with a fresh offer to every receiver.
        """
        raise NotImplementedError

    def let_go(self) -> None:
        """After `close`: keeps no tensor of the trainer's alive, however long somebody keeps the sender."""
        self.plan = replace(self.plan, tensors=(), arena=None, gather=None)

    @abstractmethod
    def close(self) -> None:
        """Gives all memory back. Idempotent."""


class ReceiverTransport(ABC):
    """The receiver's end."""

    def __init__(self, welcome: Welcome, manifest: Manifest, target: Target) -> None:
        self.welcome = welcome
        self.manifest = manifest
        self.target = target

    @property
    @abstractmethod
    def owned_bytes(self) -> int:
        """Bytes of memory that this end allocated outside torch's allocator."""

    @abstractmethod
    def join(self, deadline: Deadline) -> Joined:
        """Imports what was offered, once, and runs the self-test. Raises TransportError, SelfTestFailed."""

    def regroup(self, regroup: Regroup, rank: int, deadline: Deadline, check: Callable[[], None]) -> Regrouped:
        """Joins the new group; blocks until all members are in. Raises TransportError or StepTimeout.

        `check`: called while waiting; raises when the sender has given this group up.
        """
        raise NotImplementedError

    def lay(self, frame: bytes) -> None:
        """As SenderTransport.lay, to the sender."""

    def lay_ahead(self, step: int, frame: bytes) -> None:
        """Lays a message of this step that counts once `confirm` says so."""

    def confirm(self, note: int) -> bool:
        """Makes what was laid ahead count, and lays a number beside it. False: nothing is there."""
        return False

    def find(self) -> FromSender | None:
        """As SenderTransport.find, from the sender."""
        return None

    def taken(self) -> bool:
        """Whether the sender took what was laid last. Never waits."""
        return False

    settled: bool = False
    """Once a step has started, nothing more is allocated in it: its memory may be read while its copies run."""

    def mark(self) -> None:
        """Notes what the engine has queued until now: a step that begins before the next mark lets it finish first."""

    @abstractmethod
    def receive(self, channel: ReceiveChannel) -> None:
        """Moves a step's bytes into the target; returns when they are there and no view of ours is left.

        Raises TransportError, StepTimeout, ViewsRetained, or what the target's `load` raised.
        """

    @abstractmethod
    def digests(self) -> bytes:
        """Of the target's tensors, as `SenderTransport.digests`; of what was handed to `load` where there are none."""

    @abstractmethod
    def close(self) -> None:
        """Releases every import, exactly once. Idempotent."""
