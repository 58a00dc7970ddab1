"""Gloo: what NCCL is on GPUs, on CPUs. All members broadcast together, from and into the tensors where they are large.

The group is a ProcessGroupGloo of its own, never torch.distributed's default one, which may be the trainer's.
Its store lives in the sender; every group has its own prefix in it, so that a late word of an old group is nobody's.

A broadcast goes in chunks, and each carries the step's deadline. A member that leaves closes its connections, which
ends the others' chunks at once; one that only falls silent ends them at the deadline.
"""

from __future__ import annotations

import ipaddress
import mmap
import re
import secrets
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from weightsync_api.agent_config import AgentConfig

from ..copy_plan import Bounces, CopyPlan, byte_view, is_plain, pack_pairs, separate_aliases, unpack_pairs
from ..deadline import Deadline
from ..digest import tensor_digest, tensor_digests
from ..errors import TransportError, ViewsRetained
from ..host_memory import HostMemory
from ..manifest import Manifest, align
from ..protocol import Joined, Regroup, Regrouped, Welcome
from ..targets import Target
from .base import ReceiveChannel, ReceiverTransport, SendChannel, SenderTransport, SendPlan
from .collective import hear_reason, presence
from .gloo_group import Flow, GlooGroup, first_line, span
from .group_plan import Bucket, GroupPlan, Op, Straight, group_plan, straight_bytes
from .handover import Handover
from .host_slots import HostSlots

ROUTE = "Gloo/TCP"

_RENDEZVOUS = re.compile(r"^(?P<host>[A-Za-z0-9_.:-]{1,253}):(?P<port>\d{1,5})/(?P<key>[0-9a-f]{16})$")


class GlooSender(SenderTransport):
    kind = "NCCL"
    collective = True

    def __init__(self, plan: SendPlan) -> None:
        super().__init__(plan)
        self.moves: GroupPlan = group_plan(
            plan.manifest, plan.bucket_bytes, straight_bytes(plan.mode, plan.bucket_bytes)
        )
        self._slots = _slots(self.moves, plan.slots)
        self._bounce: torch.Tensor | None = None
        self._plans: list[CopyPlan] = []
        self.replan()
        self._store: TCPStore | None = None
        self._rendezvous = ""
        self._group: GlooGroup | None = None
        self._gathered: dict[int, int] = {}

    def replan(self) -> bool:
        if self.plan.gather is not None:
            return False
        self._plans = [
            CopyPlan(pack_pairs(self.plan.tensors, op.pieces, self._slots.of(op.index), Bounces()))
            for op in self.moves.ops
            if isinstance(op, Bucket)
        ]
        strided = [op.nbytes for op in self.moves.ops if isinstance(op, Straight) and not self._plain(op)]
        self._bounce = torch.empty(max(strided), dtype=torch.uint8) if strided else None
        return False

    @property
    def route(self) -> str:
        return ROUTE

    @property
    def owned_bytes(self) -> int:
        return self._slots.nbytes

    def regroup(self, epoch: int, ranks: Sequence[int], timeout: float) -> Regroup:
        self._drop_group()
        if self._store is None:
            self._serve_store(timeout)
        return Regroup(epoch=epoch, ranks=tuple(ranks), rendezvous=self._rendezvous, timeout_seconds=timeout)

    def connect(self, regroup: Regroup, deadline: Deadline, check: Callable[[], None]) -> None:
        self._drop_group()
        assert self._store is not None
        address = str(ipaddress.ip_address(_resolve(self.plan.collective_address)))
        self._group = GlooGroup(
            self._store, _prefix(regroup), regroup.ranks, 0, address, self.plan.interface, deadline, check
        )
        self.needs_regroup = False

    def _serve_store(self, timeout: float) -> None:
        """The rendezvous, in this process, at the address that receivers reach and at no other."""
        address = self.plan.collective_address
        try:
            host = _resolve(address)
            listener = socket.create_server(
                (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024
            )
        except OSError as error:
            raise TransportError(
                f"gloo: the rendezvous can't listen at {address}: {error}; set the agent's collectiveAddress to an "
                "address or name of the sender's own pod"
            ) from None
        port = listener.getsockname()[1]
        self._store = TCPStore(
            host,
            port,
            None,
            True,
            timedelta(seconds=max(timeout, 1.0)),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._rendezvous = f"{address}:{port}/{secrets.token_hex(8)}"

    def digests(self) -> bytes:
        if self.plan.gather is None:
            return tensor_digests(self.plan.tensors)
        entries = self.plan.manifest.tensors
        values = (self._gathered.get(i if e.alias is None else e.alias, 0) for i, e in enumerate(entries))
        return b"".join(value.to_bytes(8, "little") for value in values)

    def send(self, channel: SendChannel) -> None:
        if self._group is None:
            raise TransportError("gloo: there is no group: regroup before the step")

        flow = Flow(self._group, channel.deadline, presence(channel))
        try:
            for op in self.moves.ops:
                if self.plan.gather is None:
                    self._move(flow, op)
                else:
                    flow.free("gathered")  # the next gathering writes where this one lies
                    self._move_gathered(flow, op, self.plan.gather([piece.tensor for piece in op.pieces]))
            flow.drain()
        except BaseException as error:
            self.needs_regroup = True
            self._drop_group()
            flow.abandon(error)
            if isinstance(error, TransportError):
                hear_reason(channel)
            raise

    def _move(self, flow: Flow, op: Op) -> None:
        if isinstance(op, Bucket):
            place = self._slots.place(op.index)
            flow.free(place)
            self._plans[op.index].run()
            flow.move(self._slots.of(op.index)[: op.nbytes], place)
            return
        tensor = self.plan.tensors[op.tensor].detach()
        if self._plain(op):
            flow.move(byte_view(tensor))
            return
        assert self._bounce is not None
        flow.free("bounce")
        staged = self._bounce[: op.nbytes]
        staged.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        flow.move(staged, "bounce")

    def _move_gathered(self, flow: Flow, op: Op, whole: Sequence[torch.Tensor]) -> None:
        for piece, tensor in zip(op.pieces, whole, strict=True):
            self._gathered[piece.tensor] = tensor_digest(tensor)
        if isinstance(op, Straight):
            flow.move(byte_view(whole[0]), "gathered")
            return
        slot, place = self._slots.of(op.index), self._slots.place(op.index)
        flow.free(place)
        for piece, tensor in zip(op.pieces, whole, strict=True):
            slot[piece.bucket_offset : piece.bucket_offset + piece.nbytes].copy_(byte_view(tensor))
        flow.move(slot[: op.nbytes], place)

    def _plain(self, op: Straight) -> bool:
        return is_plain(self.plan.tensors[op.tensor])

    def forget(self, rank: int, gone: bool = False) -> int:
        self.needs_regroup = True
        return 0  # a collective exports nothing

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def close(self) -> None:
        self._drop_group()
        self._store = None
        self._plans.clear()
        self._slots.close()


class GlooReceiver(ReceiverTransport):
    def __init__(self, welcome: Welcome, manifest: Manifest, target: Target, config: AgentConfig) -> None:
        super().__init__(welcome, manifest, target)
        self._interface = config.interface
        self._group: GlooGroup | None = None
        self._slots = HostSlots()
        self._landing: HostMemory | None = None
        self._plans: list[CopyPlan] = []
        self._bounce: torch.Tensor | None = None
        self._also: dict[int, list[int]] = {}
        self._handover: Handover | None = None
        try:
            self.moves: GroupPlan = group_plan(
                manifest, welcome.bucket_bytes, straight_bytes(welcome.mode, welcome.bucket_bytes)
            )
        except ValueError as error:
            raise TransportError(f"gloo: the sender's bucket size can't be used: {error}") from None

    @property
    def owned_bytes(self) -> int:
        return self._slots.nbytes + (self._landing.nbytes if self._landing is not None else 0)

    def join(self, deadline: Deadline) -> Joined:
        if self.target.in_place:
            self._slots = _slots(self.moves, self.welcome.slots)
            tensors = self.target.destinations()
            self._also = separate_aliases(self.manifest, tensors)
            self._plans = [
                CopyPlan(unpack_pairs(tensors, op.pieces, self._slots.of(op.index), Bounces(), self._also))
                for op in self.moves.ops
                if isinstance(op, Bucket)
            ]
            strided = [
                op.nbytes for op in self.moves.ops if isinstance(op, Straight) and not is_plain(tensors[op.tensor])
            ]
            if strided:
                self._bounce = torch.empty(max(strided), dtype=torch.uint8)
        else:
            largest = max((op.nbytes for op in self.moves.ops), default=0)
            if largest:
                self._landing = HostMemory.create(max(align(largest), mmap.PAGESIZE), "weightsync-landing")
            self._handover = Handover(
                self.manifest, self.target, torch.device("cpu"), lambda _, views: tensor_digests(views)
            )
        return Joined(route=ROUTE)

    def regroup(self, regroup: Regroup, rank: int, deadline: Deadline, check: Callable[[], None]) -> Regrouped:
        self._drop_group()
        found = _RENDEZVOUS.match(regroup.rendezvous)
        if found is None or rank not in regroup.ranks or len(set(regroup.ranks)) != len(regroup.ranks):
            raise TransportError(f"gloo: the sender's invitation to group {regroup.epoch} can't be used")
        host, port = found["host"], int(found["port"])
        try:
            store = TCPStore(_resolve(host), port, None, False, span(deadline))
        except RuntimeError as error:
            raise TransportError(
                f"gloo: rank {rank} can't reach the sender's rendezvous {host}:{port}: {first_line(error)}"
            ) from None
        self._group = GlooGroup(
            store, _prefix(regroup), regroup.ranks, rank, _own_address(host, port), self._interface, deadline, check
        )
        return Regrouped(epoch=regroup.epoch, route=ROUTE)

    def receive(self, channel: ReceiveChannel) -> None:
        if self._group is None:
            raise TransportError("gloo: this receiver is in no group")
        channel.started()
        flow = Flow(self._group, channel.deadline, channel.check)
        try:
            if self._handover is not None:
                self._receive_and_load(flow, channel.verify)
            else:
                self._receive_in_place(flow)
            flow.drain()
        except BaseException as error:
            self._drop_group()  # from here on no late byte lands in a tensor
            flow.abandon(error)
            raise

    def _receive_in_place(self, flow: Flow) -> None:
        tensors = self.target.destinations()
        for op in self.moves.ops:
            if isinstance(op, Bucket):
                place = self._slots.place(op.index)
                flow.free(place)
                flow.move(self._slots.of(op.index)[: op.nbytes], place, self._plans[op.index].run)
                continue
            tensor = tensors[op.tensor].detach()
            then = self._finisher(op, tensors)
            if is_plain(tensor):
                flow.move(byte_view(tensor), None, then)
            else:
                assert self._bounce is not None
                flow.free("bounce")
                flow.move(self._bounce[: op.nbytes], "bounce", then)

    def _finisher(self, op: Straight, tensors: Sequence[torch.Tensor]) -> Callable[[], None] | None:
        """What is left to do when a tensor is here: out of the bounce buffer, and into aliases that are apart."""
        tensor, bounce = tensors[op.tensor].detach(), self._bounce
        strided = not is_plain(tensor)
        others = self._also.get(op.tensor, ())
        if not strided and not others:
            return None

        def finish() -> None:
            source = tensor
            if strided:
                assert bounce is not None
                source = bounce[: op.nbytes].view(tensor.dtype).view(tensor.shape)
                tensor.copy_(source)
            for index in others:
                tensors[index].detach().copy_(source)

        return finish

    def _receive_and_load(self, flow: Flow, verify: bool) -> None:
        assert self._handover is not None
        self._handover.begin()
        for op in self.moves.ops:
            landing = self._landing
            assert landing is not None
            flow.move(landing.tensor()[: op.nbytes], "landing")
            flow.free("landing")
            self._handover.load(op, landing.window(), verify)
            try:
                landing.end_window()
            except ViewsRetained as error:
                names = ", ".join(self.manifest.tensors[piece.tensor].name for piece in op.pieces[:3])
                raise ViewsRetained(f"{names}{', ...' if len(op.pieces) > 3 else ''}: {error}") from None

    def digests(self) -> bytes:
        if self._handover is not None:
            return self._handover.digests()
        return tensor_digests(self.target.destinations())

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def close(self) -> None:
        self._drop_group()
        self._plans, self._handover = [], None
        self._slots.close()
        if self._landing is not None:
            self._landing.close()
            self._landing = None


def _slots(moves: GroupPlan, slots: int) -> HostSlots:
    return HostSlots(moves.slot_bytes, min(slots, moves.buckets))


def _prefix(regroup: Regroup) -> str:
    return f"{regroup.rendezvous.rsplit('/', 1)[-1]}/{regroup.epoch}"


def _resolve(name: str) -> str:
    """The first address of a host name, or the address itself. Raises TransportError."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise TransportError(f"gloo: the name {name!r} has no address: {error}") from None


def _own_address(host: str, port: int) -> str:
    """The address of this machine that packets to `host` leave from. Sends nothing."""
    address = _resolve(host)
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError as error:
            raise TransportError(f"gloo: there is no way to the sender's address {host}: {error}") from None
        return str(probe.getsockname()[0])
