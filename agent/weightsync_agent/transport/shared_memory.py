"""Shared host memory between processes of one machine: the CPU's counterpart of CUDA IPC.

Everything that is mapped is exported once to a receiver, imported once and released once, and its word on that
receiver's control page proves it: 1 while exported, 0 once released.

Direct: the sender's tensors lie in one arena, which receivers map and copy from. Packed: through reused slots, one
message a bucket each way, so that the sender fills a slot while the receivers empty another.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from weightsync_api.agent_config import AgentConfig

from ..copy_plan import CopyPlan, byte_view, direct_pairs, pack_plans, separate_aliases, unpack_plans
from ..deadline import Deadline
from ..digest import tensor_digest, tensor_digests
from ..errors import ConfigError, SelfTestFailed, TransportError
from ..host_memory import HostMemory
from ..manifest import Manifest, layout
from ..protocol import Bucket, Identity, Joined, Offer, Region, Welcome
from ..targets import Target
from .base import ReceiveChannel, SendChannel, SendPlan
from .control import Control, MappedReceiver, MappedSender, Shared
from .descriptors import DescriptorServer, fetch_descriptors
from .host_slots import HostSlots
from .staging import Loader

ROUTE = "SharedMemory"
SELF_TEST_BYTES = 1 << 20


@dataclass
class _Export(Shared):
    """What one receiver was given."""

    token: str
    self_test: HostMemory
    expected: str
    regions: int
    nbytes: int


class SharedMemorySender(MappedSender[_Export]):
    kind = "IPC"

    def __init__(self, plan: SendPlan) -> None:
        super().__init__(plan)
        self._server = DescriptorServer(plan.runtime_dir)
        self._slots = HostSlots()
        self._plans: list[CopyPlan] = []
        if plan.mode == "Direct":
            if not isinstance(plan.arena, HostMemory):
                raise ConfigError("Direct mode needs the weights in an arena: pass adopt=True")
            return
        self._make_slots()

    def _make_slots(self) -> None:
        plan = self.plan
        self._layout = layout(plan.manifest, plan.bucket_bytes)
        used = max((self._layout.used_bytes(b) for b in range(len(self._layout.buckets))), default=0)
        count = max(1, min(plan.slots, len(self._layout.buckets)))
        self._slots = HostSlots(used, count)
        self.replan()

    def replan(self) -> bool:
        if self.plan.mode == "Packed" and self.plan.gather is None:
            self._plans = pack_plans(self.plan.tensors, self._layout, self._slots.views)
        return False

    @property
    def route(self) -> str:
        return ROUTE

    @property
    def owned_bytes(self) -> int:
        arena = self.plan.arena.nbytes if self.plan.arena is not None else 0
        return arena + self._slots.nbytes + sum(e.nbytes for e in self._exports.values())

    def offer(self, identity: Identity) -> Offer:
        self.forget(identity.rank)
        control = Control.create()
        self_test = HostMemory.create(SELF_TEST_BYTES, "weightsync-self-test")
        pattern = torch.frombuffer(bytearray(secrets.token_bytes(SELF_TEST_BYTES)), dtype=torch.uint8)
        self_test.tensor().copy_(pattern)
        if self.plan.mode == "Direct":
            assert isinstance(self.plan.arena, HostMemory)
            data, role = [self.plan.arena], "arena"
        else:
            data, role = self._slots.memories, "slot"
        memories = [control.memory, self_test, *data]
        roles = ["control", "self-test", *[role] * len(data)]
        control.export(len(memories) - 1)
        token = self._server.lay_out([memory.fd for memory in memories])
        self._exports[identity.rank] = _Export(
            control=control,
            token=token,
            self_test=self_test,
            expected=f"{tensor_digest(pattern):016x}",
            regions=len(memories) - 1,
            nbytes=control.memory.nbytes + self_test.nbytes,
        )
        return Offer(
            socket=self._server.path,
            token=token,
            regions=tuple(
                Region.model_validate({"kind": "memfd", "role": role, "nbytes": memory.nbytes})
                for role, memory in zip(roles, memories, strict=True)
            ),
        )

    def check_join(self, rank: int, joined: Joined) -> None:
        export = self._exports[rank]
        if joined.self_test != export.expected:
            raise SelfTestFailed(
                f"rank {rank} read other bytes than were written in the 1 MiB self-test over {ROUTE}: "
                "its memory is not the sender's"
            )
        if export.control.exported(0):
            raise SelfTestFailed(f"rank {rank} did not release the self-test's memory: its counter is not 0")
        export.nbytes -= export.self_test.nbytes
        export.self_test.close()

    def exported(self, rank: int) -> int:
        """Regions that a receiver holds mapped, by its control page; 0: all released."""
        export = self._exports.get(rank)
        if export is None:
            return 0
        return sum(export.control.exported(region) for region in range(export.regions))

    def digests(self) -> bytes:
        if self.plan.gather is None:
            return tensor_digests(self.plan.tensors)
        return self._gathered_digests

    def send(self, channel: SendChannel) -> None:
        digests: dict[int, int] = {}
        count = len(self._layout.buckets)
        for bucket in range(count):
            if bucket >= len(self._slots):
                channel.pump(until_drained=bucket - len(self._slots))
            if self.plan.gather is None:
                self._plans[bucket].run()
            else:
                self._pack_gathered(bucket, digests, channel.verify)
            channel.post(Bucket(step=channel.step, bucket=bucket, slot=self._slots.place(bucket)))
        if self.plan.gather is not None:
            entries = self.plan.manifest.tensors
            values = (digests.get(i if e.alias is None else e.alias, 0) for i, e in enumerate(entries))
            self._gathered_digests = b"".join(value.to_bytes(8, "little") for value in values)
        # The last buckets' slots are free once the receivers acknowledge: their ACK says so, and no message more.

    def _pack_gathered(self, bucket: int, digests: dict[int, int], verify: bool) -> None:
        assert self.plan.gather is not None
        pieces = self._layout.buckets[bucket]
        indices = [piece.tensor for piece in pieces]
        stand_ins = dict(zip(indices, self.plan.gather(indices), strict=True))
        slot = self._slots.of(bucket)
        for piece in pieces:
            tensor = byte_view(stand_ins[piece.tensor])
            slot[piece.bucket_offset : piece.bucket_offset + piece.nbytes].copy_(
                tensor[piece.tensor_offset : piece.tensor_offset + piece.nbytes]
            )
            if verify and piece.tensor_offset == 0:
                digests[piece.tensor] = tensor_digest(stand_ins[piece.tensor])

    def forget(self, rank: int, gone: bool = False) -> int:
        export = self._exports.pop(rank, None)
        if export is not None:
            self._server.withdraw(export.token)
            export.control.close_step()  # if it lives and still copies, it must not take the step for whole
            export.self_test.close()
            export.control.close()
        return 0  # the kernel frees a memfd with its last holder: a receiver that died strands nothing

    def close(self) -> None:
        for rank in list(self._exports):
            self.forget(rank)
        self._server.close()
        self._plans.clear()
        self._slots.close()


class SharedMemoryReceiver(MappedReceiver):
    def __init__(self, welcome: Welcome, manifest: Manifest, target: Target, config: AgentConfig) -> None:
        super().__init__(welcome, manifest, target)
        self._memories: list[HostMemory] = []
        """In the offer's order after the control memory."""
        self._plan: CopyPlan | None = None
        self._plans: list[CopyPlan] = []
        self._loader: Loader | None = None
        self._layout = layout(manifest, welcome.bucket_bytes)

    @property
    def owned_bytes(self) -> int:
        return self._loader.nbytes if self._loader is not None else 0

    def join(self, deadline: Deadline) -> Joined:
        offer = self.welcome.offer
        if offer is None or len(offer.regions) < 3 or [r.role for r in offer.regions[:2]] != ["control", "self-test"]:
            raise TransportError("the sender's offer has no shared memory in it")
        if any(region.kind != "memfd" for region in offer.regions):
            raise TransportError("the sender's offer has memory of a GPU in it, and this receiver is on the CPU")
        descriptors = fetch_descriptors(offer.socket, offer.token, len(offer.regions), deadline)
        for descriptor, region in zip(descriptors, offer.regions, strict=True):
            self._memories.append(HostMemory.map(descriptor, region.nbytes))
        self._control = Control.mapped(self._memories.pop(0))
        result = f"{tensor_digest(self._memories[0].tensor()):016x}"
        self._release(0)
        data = self._memories[1:]
        self._check_sizes(data)
        if self.target.in_place:
            self._make_plans(data)
        else:
            self._loader = Loader(self.manifest, self._layout, self.target, torch.device("cpu"), tensor_digests)
        return Joined(route=ROUTE, self_test=result)

    def _check_sizes(self, data: Sequence[HostMemory]) -> None:
        """What the peer says is not trusted: a short slot would be read beyond its end."""
        if self.welcome.mode == "Direct":
            need = [self.manifest.arena_bytes]
        else:
            buckets = range(len(self._layout.buckets))
            need = [max((self._layout.used_bytes(b) for b in buckets), default=0)] * len(data)
        if len(data) != len(need) or any(memory.nbytes < size for memory, size in zip(data, need, strict=True)):
            raise TransportError(f"the sender's memory has {[m.nbytes for m in data]} bytes; its layout needs {need}")

    def _make_plans(self, data: Sequence[HostMemory]) -> None:
        destinations = self.target.destinations()
        if self.welcome.mode == "Direct":
            arena = data[0].tensor()
            self._plan = CopyPlan(direct_pairs(self.manifest, views_of(arena, self.manifest), destinations))
        else:
            views = [memory.tensor() for memory in data]
            also = separate_aliases(self.manifest, destinations)
            self._plans = unpack_plans(destinations, self._layout, views, also)

    def receive(self, channel: ReceiveChannel) -> None:
        assert self._control is not None
        channel.started()
        data = self._memories[1:]
        if self.welcome.mode == "Direct":
            if self._plan is not None:
                self._plan.run()
            else:
                assert self._loader is not None
                self._loader.load_arena(data[0].window, data[0].views_alive, channel.verify)
            channel.check()
        else:
            count = len(self._layout.buckets)
            for bucket in range(count):
                slot = channel.wait_bucket(bucket)
                if not 0 <= slot < len(data):
                    raise TransportError(f"step {channel.step}, bucket {bucket}: there is no slot {slot}")
                if self._plans:
                    self._plans[bucket].run()
                else:
                    assert self._loader is not None
                    memory = data[slot]
                    self._loader.load_bucket(bucket, memory.window, memory.views_alive, channel.verify)
                if bucket + len(data) < count:
                    channel.drained(bucket)  # a later bucket waits for this slot
        self._control.check_open(channel.step)

    def digests(self) -> bytes:
        if self.target.in_place:
            return tensor_digests(self.target.destinations())
        assert self._loader is not None
        return self._loader.digests()

    def _release(self, region: int) -> None:
        """Unmaps one region and takes its count back, exactly once: a closed region has none left."""
        memory = self._memories[region]
        if memory.closed:
            return
        memory.close()
        if self._control is not None:
            self._control.release(region)

    def close(self) -> None:
        self._plan, self._plans = None, []
        for region in range(len(self._memories)):
            self._release(region)
        self._memories = []
        if self._control is not None:
            self._control.close()
            self._control = None


def views_of(arena: torch.Tensor, manifest: Manifest) -> list[torch.Tensor]:
    """The tensors that lie in an arena (uint8), in manifest order; an alias is the tensor of its first."""
    return [
        arena[offset : offset + entry.nbytes].view(entry.torch_dtype).view(entry.shape)
        if entry.nbytes
        else torch.empty(entry.shape, dtype=entry.torch_dtype, device=arena.device)
        for entry, offset in zip(manifest.tensors, manifest.arena_offsets, strict=True)
    ]
