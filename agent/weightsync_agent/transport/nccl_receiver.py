"""The receiver's end of NCCL; nccl_sender.py says how a step goes."""

from __future__ import annotations

import base64
import binascii
from collections import deque
from collections.abc import Callable, Sequence

import torch
from weightsync_api.agent_config import AgentConfig

from ..copy_plan import is_plain, separate_aliases
from ..cuda.arena import bytes_at
from ..cuda.copy_plan import DeviceCopyPlan
from ..cuda.digest import DeviceDigest
from ..cuda.driver import device_index
from ..cuda.nccl import UNIQUE_ID_BYTES, Communicator
from ..deadline import Deadline
from ..errors import ConfigError, TransportError, ViewsRetained
from ..manifest import Manifest
from ..protocol import Joined, Regroup, Regrouped, Welcome
from ..targets import Target
from .base import ReceiveChannel, ReceiverTransport
from .group_plan import Bucket, GroupPlan, Op, Straight, group_plan, straight_bytes
from .handover import Handover
from .nccl_end import Call, End, copy_plans, typed


class NcclReceiver(ReceiverTransport):
    def __init__(
        self, welcome: Welcome, manifest: Manifest, target: Target, config: AgentConfig, device: torch.device
    ) -> None:
        super().__init__(welcome, manifest, target)
        self.device = torch.device("cuda", device_index(device))
        try:
            self.moves: GroupPlan = group_plan(
                manifest, welcome.bucket_bytes, straight_bytes(welcome.mode, welcome.bucket_bytes)
            )
        except ValueError as error:
            raise TransportError(f"NCCL: the sender's bucket size can't be used: {error}") from None
        self._end = End(self.device, self.moves, welcome.slots, config.interface)
        self._unpacks: list[list[DeviceCopyPlan]] = []
        self._calls: list[Call] = []
        self._handover: Handover | None = None
        self._digest: DeviceDigest | None = None
        self._staged: dict[Op, DeviceDigest] = {}

    @property
    def owned_bytes(self) -> int:
        return 0  # as the sender's

    def join(self, deadline: Deadline) -> Joined:
        with torch.cuda.device(self.device):
            if self.target.in_place:
                self._make_calls()
            else:
                self._make_loading_calls()
                self._handover = Handover(self.manifest, self.target, self.device, self._staged_digests)
        return Joined(route="")

    def _make_calls(self) -> None:
        entries, end = self.manifest.tensors, self._end
        tensors = self.target.destinations()
        wrong = [entries[i].name for i, tensor in enumerate(tensors) if tensor.device != self.device]
        if wrong:
            raise ConfigError(f"{wrong[0]} and {len(wrong) - 1} more of the target's tensors are not on {self.device}")
        also = separate_aliases(self.manifest, tensors)
        for op in self.moves.ops:
            if isinstance(op, Bucket):
                slot = end.slots[end.slot_of(op)]
                pairs = [
                    (typed(slot, piece.bucket_offset, entries[piece.tensor]), tensors[index].detach())
                    for piece in op.pieces
                    for index in (piece.tensor, *also.get(piece.tensor, ()))
                ]
                self._unpacks.append(copy_plans(pairs, self.device))
        staged = [
            [op for op in call if isinstance(op, Straight) and not is_plain(tensors[op.tensor])]
            for call in self.moves.calls
        ]
        for ops, bounced, starts in zip(self.moves.calls, staged, end.make_bounce(staged), strict=True):
            place = {op.tensor: start for op, start in zip(bounced, starts, strict=True)}
            call = Call(ops, [], bounced=bool(bounced))
            pairs = []
            for op in ops:
                if isinstance(op, Bucket):
                    call.slot, call.bucket = end.slot_of(op), op.index
                    call.broadcasts.append((end.slots[call.slot].data_ptr(), op.nbytes))
                    continue
                arrives = tensors[op.tensor].detach()
                if op.tensor in place:
                    assert end.bounce is not None
                    arrives = typed(end.bounce, place[op.tensor], entries[op.tensor])
                    pairs.append((arrives, tensors[op.tensor].detach()))
                call.broadcasts.append((arrives.data_ptr(), op.nbytes))
                pairs += [(arrives, tensors[index].detach()) for index in also.get(op.tensor, ())]
            call.copies = copy_plans(pairs, self.device)
            self._calls.append(call)

    def _make_loading_calls(self) -> None:
        """Straight tensors land in the bounce buffer, a call at a time."""
        end = self._end
        straights = [[op for op in call if isinstance(op, Straight)] for call in self.moves.calls]
        for ops, landing, starts in zip(self.moves.calls, straights, end.make_bounce(straights), strict=True):
            call = Call(ops, [], bounced=bool(landing))
            place = {op.tensor: start for op, start in zip(landing, starts, strict=True)}
            for op in ops:
                if isinstance(op, Bucket):
                    call.slot, call.bucket = end.slot_of(op), op.index
                    call.broadcasts.append((end.slots[call.slot].data_ptr(), op.nbytes))
                else:
                    assert end.bounce is not None
                    call.broadcasts.append((end.bounce.data_ptr() + place[op.tensor], op.nbytes))
            self._calls.append(call)

    def regroup(self, regroup: Regroup, rank: int, deadline: Deadline, check: Callable[[], None]) -> Regrouped:
        self._end.drop(abort=True)
        try:
            identity = base64.b64decode(regroup.rendezvous, validate=True)
        except binascii.Error:
            identity = b""
        ranks = regroup.ranks
        if len(identity) != UNIQUE_ID_BYTES or rank not in ranks or len(set(ranks)) != len(ranks):
            raise TransportError(f"NCCL: the sender's invitation to group {regroup.epoch} can't be used")
        route = self._end.connect(identity, ranks.index(rank), len(ranks), regroup.epoch, deadline, check)
        return Regrouped(epoch=regroup.epoch, route=route)

    def receive(self, channel: ReceiveChannel) -> None:
        channel.started()
        try:
            with torch.cuda.device(self.device):
                communicator, watch = self._end.begin(channel.deadline, channel.check)
                if self._handover is not None:
                    self._receive_and_load(communicator, watch, channel.verify)
                else:
                    self._receive_in_place(communicator, watch)
        except BaseException:
            self._end.fail()
            raise

    def _receive_in_place(self, communicator: Communicator, watch: Callable[[], None]) -> None:
        end = self._end
        for number, call in enumerate(self._calls):
            if call.bounced:
                end.communication.stream.wait_event(end.bounce_emptied)
            if call.slot >= 0 and call.bucket >= len(end.slots):
                end.communication.stream.wait_event(end.emptied[call.slot])
            end.queue(number, call, communicator, watch)
            if call.slot >= 0:
                end.filled[call.slot].record(end.communication.stream)
                end.packing.stream.wait_event(end.filled[call.slot])
                for plan in self._unpacks[call.bucket]:
                    plan.run(end.packing.stream)
                end.emptied[call.slot].record(end.packing.stream)
            if call.copies:
                end.bounce_filled.record(end.communication.stream)
                end.packing.stream.wait_event(end.bounce_filled)
                for plan in call.copies:
                    plan.run(end.packing.stream)
                end.bounce_emptied.record(end.packing.stream)
        end.finish(watch)

    def _receive_and_load(self, communicator: Communicator, watch: Callable[[], None], verify: bool) -> None:
        """Buckets are broadcast while the ones before are loaded; the landing buffer is one, and waits for its load."""
        assert self._handover is not None
        end = self._end
        self._handover.begin()
        under_way: deque[tuple[Call, torch.cuda.Event]] = deque()

        def load_oldest() -> None:
            call, arrived = under_way.popleft()
            end.waiter.wait(arrived, watch)
            for op, (pointer, nbytes) in zip(call.ops, call.broadcasts, strict=True):
                self._load(op, pointer, nbytes, verify)
            # The engine's copies are queued on its own stream: what is broadcast next waits for them.
            end.communication.follow()

        for number, call in enumerate(self._calls):
            while any(_shares(held, call) for held, _ in under_way) or len(under_way) >= max(2, len(end.slots)):
                load_oldest()
            end.queue(number, call, communicator, watch)
            arrived = end.communication.stream.record_event()
            under_way.append((call, arrived))
        while under_way:
            load_oldest()
        end.finish(watch)

    def _load(self, op: Op, pointer: int, nbytes: int, verify: bool) -> None:
        assert self._handover is not None
        window, alive = bytes_at(pointer, nbytes)
        self._handover.load(op, window, verify)
        del window
        if alive() is not None:
            names = ", ".join(self.manifest.tensors[piece.tensor].name for piece in op.pieces[:3])
            raise ViewsRetained(
                f"{names}{', ...' if len(op.pieces) > 3 else ''}: a view of the staging buffer outlived the load: "
                "whoever holds it would see later weights under its feet. Copy the tensors that load_weights keeps "
                "(tensor.clone() or parameter.copy_(tensor))"
            )

    def _staged_digests(self, op: Op, views: Sequence[torch.Tensor]) -> bytes:
        """The staging addresses of an operation never change, so its table is made once."""
        found = self._staged.get(op)
        if found is None:
            parts = [(v.data_ptr(), p.nbytes, i, 0) for i, (v, p) in enumerate(zip(views, op.pieces, strict=True))]
            found = self._staged[op] = DeviceDigest(parts, len(views), self.device)
        return found.bytes()

    def digests(self) -> bytes:
        if self._handover is not None:
            return self._handover.digests()
        with torch.cuda.device(self.device):
            if self._digest is None:
                self._digest = DeviceDigest.of_tensors(self.target.destinations(), self.device)
            return self._digest.bytes()

    def close(self) -> None:
        self._calls, self._unpacks, self._staged = [], [], {}
        self._digest = self._handover = None
        self._end.close()


def _shares(one: Call, other: Call) -> bool:
    """Whether two calls land in the same memory."""
    return (one.bounced and other.bounced) or one.slot == other.slot >= 0
