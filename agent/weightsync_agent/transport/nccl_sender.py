"""NCCL between GPUs: large tensors straight from and into the parameters, small ones packed through reused slots.

Everything of a step is made before the first: streams, slots, tables of what to copy, events, the communicator. A step
queues broadcasts on the communication stream and copies on another, ordered by events, some calls ahead of the GPU;
then it waits for the last event, and looks while it waits whether a peer has died or the deadline has passed. Then the
communicator is aborted, which ends its kernels, and the next step makes another one.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor

from ..copy_plan import byte_view, is_plain
from ..cuda.copy_plan import DeviceCopyPlan
from ..cuda.digest import DeviceDigest
from ..cuda.driver import normal_uuid
from ..cuda.nccl import Communicator, unique_id
from ..cuda.nccl_environment import check_hosts
from ..deadline import Deadline
from ..digest import DIGEST_BYTES
from ..errors import ConfigError, Refused, TransportError
from ..identity import local_identity
from ..protocol import Identity, Regroup
from .base import SendChannel, SenderTransport, SendPlan
from .collective import hear_reason, presence
from .group_plan import Bucket, GroupPlan, Op, Straight, group_plan, straight_bytes
from .nccl_end import Call, End, copy_plans, typed


class NcclSender(SenderTransport):
    kind = "NCCL"
    collective = True
    commits = False

    def __init__(self, plan: SendPlan) -> None:
        super().__init__(plan)
        self.moves: GroupPlan = group_plan(
            plan.manifest, plan.bucket_bytes, straight_bytes(plan.mode, plan.bucket_bytes)
        )
        self._gathers = plan.gather is not None and (
            plan.computed or any(isinstance(tensor, DTensor) for tensor in plan.tensors)
        )
        self._end = End(plan.device, self.moves, plan.slots, plan.interface)
        self._members: dict[int, Identity] = {0: local_identity(0, plan.device)}
        self._packs: list[list[DeviceCopyPlan]] = []
        self._calls: list[Call] = []
        self._digest: DeviceDigest | None = None
        self.replan()
        self._route = ""

    def replan(self) -> bool:
        if not self._gathers:
            self._packs, self._calls, self._digest = [], [], None
            self._make_calls()
        return False

    def _make_calls(self) -> None:
        entries, tensors, end = self.plan.manifest.tensors, self.plan.tensors, self._end
        for op in self.moves.ops:
            if isinstance(op, Bucket):
                pairs = [
                    (tensors[p.tensor].detach(), typed(end.slots[end.slot_of(op)], p.bucket_offset, entries[p.tensor]))
                    for p in op.pieces
                ]
                self._packs.append(copy_plans(pairs, self.plan.device))
        staged = [
            [op for op in call if isinstance(op, Straight) and not self._in_place(op)] for call in self.moves.calls
        ]
        offsets = end.make_bounce(staged)
        for ops, bounced, starts in zip(self.moves.calls, staged, offsets, strict=True):
            place = {op.tensor: start for op, start in zip(bounced, starts, strict=True)}
            call = Call(ops, [], bounced=bool(bounced))
            pairs = []
            for op in ops:
                if isinstance(op, Bucket):
                    call.slot, call.bucket = end.slot_of(op), op.index
                    call.broadcasts.append((end.slots[call.slot].data_ptr(), op.nbytes))
                elif op.tensor in place:
                    assert end.bounce is not None
                    target = typed(end.bounce, place[op.tensor], entries[op.tensor])
                    pairs.append((tensors[op.tensor].detach(), target))
                    call.broadcasts.append((target.data_ptr(), op.nbytes))
                else:
                    call.broadcasts.append((tensors[op.tensor].data_ptr(), op.nbytes))
            call.copies = copy_plans(pairs, self.plan.device)
            self._calls.append(call)

    def _in_place(self, op: Straight) -> bool:
        tensor = self.plan.tensors[op.tensor]
        return is_plain(tensor) and tensor.dtype == self.plan.manifest.tensors[op.tensor].torch_dtype

    @property
    def route(self) -> str:
        return self._route

    @property
    def owned_bytes(self) -> int:
        return 0  # slots and tables are torch's, and NCCL's own memory is nobody's to count but NVML's

    def offer(self, identity: Identity) -> None:
        """Raises Refused where the receiver's GPU is the sender's own or another receiver's, and where NCCL's settings
        would make the group fail at its first broadcast."""
        gpu = normal_uuid(identity.gpu)
        if not gpu:
            raise Refused(f"rank {identity.rank} has no GPU, and this sender's weights are on one: give its pod a GPU")
        others = {rank: member for rank, member in self._members.items() if rank != identity.rank}
        owner = next((rank for rank, member in others.items() if normal_uuid(member.gpu) == gpu), None)
        if owner is not None:
            raise Refused(
                f"rank {identity.rank} is on GPU {gpu}, as rank {owner} is, and NCCL can't have two ranks on one GPU: "
                "use IPC (spec.transport: IPC), or give the pod a GPU of its own"
            )
        try:
            check_hosts([*others.values(), identity])
        except ConfigError as error:
            raise Refused(str(error)) from None
        self._members[identity.rank] = identity

    def forget(self, rank: int, gone: bool = False) -> int:
        self._members.pop(rank, None)
        self.needs_regroup = True
        return 0  # a collective exports nothing

    def regroup(self, epoch: int, ranks: Sequence[int], timeout: float) -> Regroup:
        self._end.drop(abort=self.needs_regroup)
        return Regroup(
            epoch=epoch,
            ranks=tuple(ranks),
            rendezvous=base64.b64encode(unique_id()).decode(),
            timeout_seconds=timeout,
        )

    def connect(self, regroup: Regroup, deadline: Deadline, check: Callable[[], None]) -> None:
        identity = base64.b64decode(regroup.rendezvous)
        self._route = self._end.connect(identity, 0, len(regroup.ranks), regroup.epoch, deadline, check)
        self.needs_regroup = False

    def send(self, channel: SendChannel) -> None:
        try:
            with torch.cuda.device(self.plan.device):
                communicator, watch = self._end.begin(channel.deadline, presence(channel))
                if self._gathers:
                    self._send_gathered(communicator, watch)
                else:
                    self._send(communicator, watch)
        except BaseException as error:
            self.needs_regroup = True
            self._end.fail()
            if isinstance(error, TransportError):
                hear_reason(channel)
            raise

    def _send(self, communicator: Communicator, watch: Callable[[], None]) -> None:
        end = self._end
        for bucket in range(len(end.slots)):
            self._pack(bucket)
        for number, call in enumerate(self._calls):
            if call.bounced:
                end.packing.stream.wait_event(end.bounce_emptied)
                for plan in call.copies:
                    plan.run(end.packing.stream)
                end.bounce_filled.record(end.packing.stream)
                end.communication.stream.wait_event(end.bounce_filled)
            if call.slot >= 0:
                end.communication.stream.wait_event(end.filled[call.slot])
            end.queue(number, call, communicator, watch)
            if call.bounced:
                end.bounce_emptied.record(end.communication.stream)
            if call.slot >= 0:
                end.emptied[call.slot].record(end.communication.stream)
                self._pack(call.bucket + len(end.slots))
        end.finish(watch)

    def _pack(self, bucket: int) -> None:
        """Queues the packing of a bucket, where there is one, into its slot once that is free."""
        if bucket >= len(self._packs):
            return
        end, slot = self._end, bucket % len(self._end.slots)
        if bucket >= len(end.slots):
            end.packing.stream.wait_event(end.emptied[slot])
        for plan in self._packs[bucket]:
            plan.run(end.packing.stream)
        end.filled[slot].record(end.packing.stream)

    def _send_gathered(self, communicator: Communicator, watch: Callable[[], None]) -> None:
        """A sharded trainer's weights, one operation at a time.

        A gathering is a collective of the trainer's own: kernels of two communicators that run at once can block each
        other, so ours is over before.
        """
        end = self._end
        for number, op in enumerate(self.moves.ops):
            whole = self._gather(op)
            if isinstance(op, Straight):
                source = byte_view(whole[0])
            else:
                source = end.slots[end.slot_of(op)]
                for piece, tensor in zip(op.pieces, whole, strict=True):
                    source[piece.bucket_offset : piece.bucket_offset + piece.nbytes].copy_(byte_view(tensor))
            end.communication.follow()
            end.queue(number, Call((op,), [(source.data_ptr(), op.nbytes)]), communicator, watch)
            end.finish(watch)

    def _gather(self, op: Op) -> Sequence[torch.Tensor]:
        assert self.plan.gather is not None
        return self.plan.gather([piece.tensor for piece in op.pieces])

    def digests(self) -> bytes:
        """Of what was sent. Outside a step's transfer: it uses the slots."""
        with torch.cuda.device(self.plan.device):
            if self._gathers:
                return self._digests_by_op(self._gathered_digests)
            if self.plan.gather is not None:
                return self._digests_by_op(self._converted_digests)
            if self._digest is None:
                self._digest = DeviceDigest.of_tensors(self.plan.tensors, self.plan.device)
            return self._digest.bytes()

    def _digests_by_op(self, digests_of: Callable[[Op], bytes]) -> bytes:
        found: dict[int, bytes] = {}
        for op in self.moves.ops:
            digests = digests_of(op)
            for place, piece in enumerate(op.pieces):
                found[piece.tensor] = digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]
        return b"".join(
            found.get(index if entry.alias is None else entry.alias, bytes(DIGEST_BYTES))
            for index, entry in enumerate(self.plan.manifest.tensors)
        )

    def _gathered_digests(self, op: Op) -> bytes:
        return DeviceDigest.of_tensors(self._gather(op), self.plan.device).bytes()

    def _converted_digests(self, op: Op) -> bytes:
        """Of the bytes that the masters become: converted once more, the very same way."""
        entries, tensors = self.plan.manifest.tensors, self.plan.tensors
        if isinstance(op, Bucket):
            slot = self._end.slots[self._end.slot_of(op)]
            for plan in self._packs[op.index]:
                plan.run()
            views = [typed(slot, piece.bucket_offset, entries[piece.tensor]) for piece in op.pieces]
        else:
            views = [tensors[op.tensor].detach().to(entries[op.tensor].torch_dtype).contiguous()]
        return DeviceDigest.of_tensors(views, self.plan.device).bytes()

    def close(self) -> None:
        self._calls, self._packs, self._digest = [], [], None
        self._end.close()
