"""What both ends of the NCCL transport have: a communicator, two streams, slots, and waits that can be broken off."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch

from ..copy_plan import Pair
from ..cuda.copy_plan import NVLINK_GRID, DeviceCopyPlan
from ..cuda.nccl import Communicator, use_interface
from ..cuda.streams import COMMUNICATION, NamedStream, named_stream
from ..deadline import Deadline
from ..errors import StepTimeout, TransportError
from ..manifest import TensorEntry, align
from .group_plan import Bucket, GroupPlan, Op, Straight

log = logging.getLogger("weightsync.nccl")

PACKING: Final = "packing"
"""Name of the copies' stream: of normal priority, so that the communication kernels come first."""
AHEAD: Final = 16
"""Calls queued ahead of the GPU. Its launch queue is finite, and a thread that blocks in it can't abort."""
PROBE_BYTES: Final = 4 << 20
"""Large enough for the protocol that large broadcasts take, so that its kernel is loaded too."""
PROBE_SECONDS: Final = 60.0
SETTLE_SECONDS: Final = 20.0


@dataclass
class Call:
    """One group of broadcasts, worked out once."""

    ops: tuple[Op, ...]
    broadcasts: list[tuple[int, int]]
    """(address, bytes) of each operation, in the plan's order."""
    slot: int = -1
    """Slot of its bucket; -1: it has none."""
    bucket: int = -1
    bounced: bool = False
    """Some of its straight tensors go through the bounce buffer."""
    copies: list[DeviceCopyPlan] = field(default_factory=list)
    """Sender: into the bounce buffer, before. Receiver: out of it, and into aliases that are apart, after."""


class Waiter:
    """Waits for events without blocking in the driver, and with next to no delay where steps take alike."""

    SPIN_SECONDS: Final = 0.001
    SLEEP_SECONDS: Final = 5e-5
    CHECK_SECONDS: Final = 0.0005

    def __init__(self) -> None:
        self._usual = 0.0
        self._began = self._checked = 0.0

    def begin(self) -> None:
        self._began = self._checked = time.perf_counter()

    def end(self) -> None:
        self._usual = time.perf_counter() - self._began

    def wait(self, event: torch.cuda.Event, watch: Callable[[], None], *, last: bool = False) -> None:
        """Until the event is over. `watch` is called now and then and may raise. `last`: of the step."""
        spins_from = self._began + self._usual - self.SPIN_SECONDS if last else 0.0
        spins_until = max(time.perf_counter(), spins_from) + 3 * self.SPIN_SECONDS
        while not event.query():  # type: ignore[no-untyped-call]
            now = time.perf_counter()
            if now - self._checked > self.CHECK_SECONDS:
                self._checked = now
                watch()
            if not spins_from <= now < spins_until:
                time.sleep(self.SLEEP_SECONDS)


class End:
    """What both ends have: the communicator, two streams, slots, and the step's waits."""

    def __init__(self, device: torch.device, moves: GroupPlan, slots: int, interface: str) -> None:
        self.device = device
        self.moves = moves
        self.communicator: Communicator | None = None
        self.communication: NamedStream = named_stream(device, COMMUNICATION)
        self.packing: NamedStream = named_stream(device, PACKING, high_priority=False)
        size = align(moves.slot_bytes)
        self.slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(min(slots, moves.buckets))]
        self.bounce: torch.Tensor | None = None
        self.filled = [_event() for _ in self.slots]
        self.emptied = [_event() for _ in self.slots]
        self.bounce_filled, self.bounce_emptied = _event(), _event()
        self.registered: list[tuple[int, int]] = []
        """(address, bytes) of memory that NCCL may map into its peers, for broadcasts without a copy in between."""
        self.waiter = Waiter()
        self._done = [_event() for _ in range(AHEAD)]
        self._last = _event()
        use_interface(interface)

    def slot_of(self, bucket: Bucket) -> int:
        return bucket.index % len(self.slots)

    def make_bounce(self, calls: Sequence[Sequence[Straight]]) -> list[list[int]]:
        """One buffer for the straight tensors that a call can't move in place; gives their offsets, call by call."""
        offsets: list[list[int]] = []
        largest = 0
        for ops in calls:
            starts, end = [], 0
            for op in ops:
                starts.append(end)
                end += align(op.nbytes)
            offsets.append(starts)
            largest = max(largest, end)
        if largest:
            self.bounce = torch.empty(largest, dtype=torch.uint8, device=self.device)
        return offsets

    def connect(
        self, identity: bytes, rank: int, size: int, epoch: int, deadline: Deadline, check: Callable[[], None]
    ) -> str:
        """Joins the group; gives its route. Raises TransportError, StepTimeout, and what `check` raises."""
        self.drop()
        warm = partial(self._probe, epoch, deadline, check)
        self.communicator = Communicator(identity, rank, size, self.device, deadline, check=check, warm=warm)
        return self.communicator.route

    def _probe(self, epoch: int, deadline: Deadline, check: Callable[[], None], communicator: Communicator) -> None:
        """A timed byte, then enough of them to load the kernel of large broadcasts; both are compared."""
        limit = deadline.earlier(PROBE_SECONDS)
        communicator.bound_by(limit, check)
        for pointer, nbytes in self.registered:
            communicator.register(pointer, nbytes)

        def watch() -> None:
            check()
            self._watch(communicator, limit)

        data = next((s[:PROBE_BYTES] for s in self.slots if s.numel() >= PROBE_BYTES), None)
        if data is None:
            data = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=self.device)
        value = 1 + epoch % 251
        data.fill_(value if communicator.rank == 0 else 0)
        self.communication.follow()
        stream = self.communication.pointer
        for nbytes in (1, PROBE_BYTES):
            communicator.broadcast(data.data_ptr(), nbytes, stream)
            self._last.record(self.communication.stream)
            self.waiter.begin()
            self.waiter.wait(self._last, watch)
        self.communication.lead()
        # On the host: no memory of the device for it.
        if not bool((data.cpu() == value).all()):
            raise TransportError(f"NCCL: rank {communicator.rank} read other bytes than were sent in the probe")

    def begin(self, deadline: Deadline, check: Callable[[], None]) -> tuple[Communicator, Callable[[], None]]:
        """Starts a step: our streams wait for what the caller has queued. Gives what is called while waiting."""
        communicator = self.communicator
        if communicator is None:
            raise TransportError("NCCL: there is no group: regroup before the step")
        communicator.bound_by(deadline, check)
        self.communication.follow()
        self.packing.follow()
        self.waiter.begin()

        def watch() -> None:
            check()
            self._watch(communicator, deadline)

        return communicator, watch

    @staticmethod
    def _watch(communicator: Communicator, deadline: Deadline) -> None:
        communicator.poll()
        if deadline.passed:
            raise StepTimeout(f"NCCL: the broadcasts were not done within {deadline.seconds:.3g} s")

    def queue(self, number: int, call: Call, communicator: Communicator, watch: Callable[[], None]) -> None:
        """Queues one call's broadcasts behind what the communication stream waits for already."""
        done = self._done[number % AHEAD]
        if number >= AHEAD:
            self.waiter.wait(done, watch)
        stream = self.communication.pointer
        if len(call.broadcasts) == 1:
            communicator.broadcast(*call.broadcasts[0], stream)
        else:
            with communicator.group():
                for pointer, nbytes in call.broadcasts:
                    communicator.broadcast(pointer, nbytes, stream)
        done.record(self.communication.stream)

    def finish(self, watch: Callable[[], None]) -> None:
        """Waits for all that both streams have; the caller's stream waits for it too."""
        # One event behind both streams.
        self._last.record(self.communication.stream)
        self.packing.stream.wait_event(self._last)
        self._last.record(self.packing.stream)
        self.waiter.wait(self._last, watch, last=True)
        self.waiter.end()
        self.packing.lead()

    def fail(self) -> None:
        """After any error: ends what is under way, so that no late byte lands in a tensor."""
        self.drop(abort=True)
        deadline = Deadline(SETTLE_SECONDS)
        while not (self.communication.idle() and self.packing.idle()):
            if deadline.passed:
                log.error("%s: the streams are still busy after the abort; restart this process", self.device)
                return
            time.sleep(0.001)

    def drop(self, *, abort: bool = False) -> None:
        communicator, self.communicator = self.communicator, None
        if communicator is not None:
            communicator.abort() if abort else communicator.close()

    def close(self) -> None:
        self.drop()
        self.slots, self.bounce = [], None


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def typed(buffer: torch.Tensor, start: int, entry: TensorEntry) -> torch.Tensor:
    """A manifest entry's tensor over staging memory."""
    return buffer[start : start + entry.nbytes].view(entry.torch_dtype).view(entry.shape)


def copy_plans(pairs: Sequence[Pair], device: torch.device) -> list[DeviceCopyPlan]:
    """The copies of one buffer: one plan, and one more for each further kind of conversion."""
    if not pairs:
        return []
    kinds: dict[tuple[torch.dtype, torch.dtype], list[Pair]] = {}
    plain: list[Pair] = []
    for source, destination in pairs:
        if source.dtype == destination.dtype:
            plain.append((source, destination))
        else:
            kinds.setdefault((source.dtype, destination.dtype), []).append((source, destination))
    groups = list(kinds.values()) or [[]]
    groups[0] = plain + groups[0]
    return [DeviceCopyPlan.of_tensors(group, device, grid_limit=NVLINK_GRID) for group in groups]
