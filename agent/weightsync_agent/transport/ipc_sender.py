"""CUDA IPC, the sender's end: memory that receivers on this machine map, and a step's hand-over.

Direct: receivers map the weights themselves, by descriptor where they lie in an arena, by torch's handles where torch's
allocator owns them; a step is a fence here and one copy plan there. Packed: through reused slots in driver memory,
handed over by flags in shared host memory, so that no host code stands between two buckets.

The second rule of cuda/flags.py shapes `send`: a wait is queued only once the write that ends it is queued at the peer.
Two more words, plain stores of the hosts, say how far each has queued: the sender's SENT_WORD, the receiver's
TAKEN_WORD. So both hosts run through all buckets at once, and whatever else blocks one of them (another thread's
allocation), what is queued already comes to its end by itself.

Where the receivers let it, a step needs none of that: the sender writes into their tensors itself (push_sender.py).
"""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass, field, replace

import torch

from ..cuda.arena import DeviceArena
from ..cuda.digest import DeviceDigest
from ..cuda.export import ExportLedger, TorchExport, why_apart, why_torch_handles_fail
from ..cuda.flags import LARGEST, RELEASED, FlagPage
from ..cuda.streams import COPY, named_stream
from ..deadline import Deadline
from ..errors import ConfigError, FallBack, Refused, SelfTestFailed, StepTimeout, TransportError
from ..identity import local_identity
from ..protocol import Identity, Joined, Offer, Region
from .base import SendChannel, SendPlan
from .bucket_slots import BucketSlots
from .control import Control, MappedSender, Shared
from .descriptors import DescriptorServer
from .push_sender import PushSender
from .stand_ins import StandIns
from .waiting import Waiter

SELF_TEST_BYTES = 1 << 20
STRANDED_LIMIT = 1 << 30
"""Bytes that receivers which died may leave behind before no more is exported to new ones."""

FILLED_WORD, DRAINED_WORD, SENT_WORD, TAKEN_WORD = 0, 16, 32, 48
"""The flag page's words, each a count of buckets that goes on from step to step: filled by the sender's stream, drained
by the receiver's; queued by the sender's host, and by the receiver's."""


QUEUED_BUCKETS = 64
"""Most buckets on a stream at once. A stream takes some 1,000 operations; what is queued beyond blocks the host, and a
host that is blocked while its stream waits for a flag answers nobody."""


@dataclass
class _Export(Shared):
    """What one receiver was given."""

    expected: str = ""
    token: str = ""
    descriptors: list[int] = field(default_factory=list)
    """Ours to close, once the receiver has its own."""
    flags: FlagPage | None = None
    queues: bool = False
    self_test: DeviceArena | None = None
    self_test_export: TorchExport | None = None
    self_test_tensor: torch.Tensor | None = None
    ledger: ExportLedger | None = None

    def close_descriptors(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []


class IpcSender(MappedSender[_Export]):
    kind = "IPC"
    commits = False

    def __init__(self, plan: SendPlan) -> None:
        super().__init__(plan)
        self._server = DescriptorServer(plan.runtime_dir)
        self._stream = named_stream(plan.device, COPY)
        self._slots: BucketSlots | None = None
        self._digest: DeviceDigest | None = None
        self._route = ""
        self.flag_base = 0
        # What is converted on the way, and lies whole on the GPU, is converted by the pack plan itself.
        self._converts = (
            plan.gather is not None
            and not plan.computed
            and all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in plan.tensors)
        )
        self._stand_ins: StandIns | None = None
        self._find_tensors()
        self._push = PushSender(plan.manifest, plan.device, self._stream) if plan.push else None
        if plan.mode == "Packed" and not (self._push is not None and self._stand_ins is not None):
            self._slots = self._new_slots()

    def _new_slots(self) -> BucketSlots:
        return BucketSlots(self.plan, self._stream, self._stand_ins, converts=self._converts)

    @property
    def _staged(self) -> BucketSlots:
        assert self._slots is not None, "this sender has no slots"
        return self._slots

    @property
    def pushes(self) -> bool:
        return self._push is not None

    @property
    def whole(self) -> bool:
        return self.plan.mode == "Direct" and self._push is None

    @property
    def overlaps(self) -> bool:
        return self.whole or (self._push is not None and self._stand_ins is not None)

    # --- memory -------------------------------------------------------------------------------------------------

    def _find_tensors(self) -> None:
        self._digest = None
        if self.plan.gather is None or self._converts:
            self._stand_ins = StandIns(self.plan.tensors)

    def replan(self) -> bool:
        self._find_tensors()
        if self._push is not None and self._stand_ins is not None:
            self._push.replan(self._stand_ins.tensors)
        elif self._slots is not None:
            self._slots.replan(self._stand_ins)
        return self.whole and self.plan.arena is None

    @property
    def route(self) -> str:
        return self._route or ("IPC/Descriptor" if self.plan.arena or self.plan.mode == "Packed" else "IPC/TorchHandle")

    @property
    def owned_bytes(self) -> int:
        arena = self.plan.arena
        owned = self._slots.mapped_bytes if self._slots is not None else 0
        return owned + (arena.mapped_bytes if isinstance(arena, DeviceArena) else 0)

    def offer(self, identity: Identity) -> Offer:
        self.forget(identity.rank)
        own = local_identity(0, self.plan.device)
        if identity.node and own.node and identity.gpu == "":
            raise Refused(f"rank {identity.rank} has no GPU, and the weights are on GPU {own.gpu}")
        export = self._exports[identity.rank] = _Export(Control.create())
        try:
            if self._push is not None and (problem := why_apart(own, identity)):
                raise FallBack(problem, apart=self.plan.arena is None)
            if self.whole and self.plan.arena is None:
                return self._offer_handles(export, identity, own)
            return self._offer_descriptors(export)
        except BaseException:
            self.forget(identity.rank)
            raise

    def _offer_descriptors(self, export: _Export) -> Offer:
        device, gpu = self.plan.device, local_identity(0, self.plan.device).gpu
        export.self_test = DeviceArena.create(SELF_TEST_BYTES, device)
        export.expected = self._write_pattern(export.self_test.tensor())
        if self.whole:
            arena = self.plan.arena
            if not isinstance(arena, DeviceArena):
                raise ConfigError("the weights' arena is not memory of this GPU")
            data, role = [arena], "arena"
        else:
            data, role = [] if self._push is not None else self._staged.slots, "slot"
            export.flags = FlagPage.create()
            export.flags.attach(device)
        regions = [("memfd", "control", export.control.memory.nbytes), ("driver", "self-test", SELF_TEST_BYTES)]
        export.descriptors = [os.dup(export.control.memory.fd), export.self_test.export_fd()]
        for memory in data:
            regions.append(("driver", role, memory.nbytes))
            export.descriptors.append(memory.export_fd())
        if export.flags is not None:
            regions.append(("memfd", "flags", export.flags.memory.nbytes))
            export.descriptors.append(os.dup(export.flags.fd))
        export.control.export(1 + len(data))
        export.token = self._server.lay_out(export.descriptors)
        return Offer(
            socket=self._server.path,
            token=export.token,
            regions=tuple(
                Region.model_validate(
                    {"kind": kind, "role": role, "nbytes": size, "gpu": gpu if kind == "driver" else ""}
                )
                for kind, role, size in regions
            ),
            pusher=local_identity(0, device) if self._push is not None else None,
        )

    def _offer_handles(self, export: _Export, identity: Identity, own: Identity) -> Offer:
        assert self._stand_ins is not None
        if problem := why_torch_handles_fail(own, identity):
            raise FallBack(problem)
        export.ledger = ExportLedger(self.plan.device, STRANDED_LIMIT)
        try:
            handles, placements = export.ledger.export_all(self._stand_ins.tensors)
            # An allocation of its own, so that its release is not the weights'.
            export.self_test_tensor = torch.empty(2 * SELF_TEST_BYTES, dtype=torch.uint8, device=self.plan.device)
            export.self_test_export = TorchExport(export.self_test_tensor.untyped_storage())
        except ConfigError as problem:
            raise FallBack(str(problem)) from None
        export.expected = self._write_pattern(export.self_test_tensor)
        export.descriptors = [os.dup(export.control.memory.fd)]
        export.token = self._server.lay_out(export.descriptors)
        return Offer(
            socket=self._server.path,
            token=export.token,
            regions=(Region(kind="memfd", role="control", nbytes=export.control.memory.nbytes),),
            handles=(*handles, export.self_test_export.handle),
            placements=placements,
        )

    def _write_pattern(self, memory: torch.Tensor) -> str:
        pattern = torch.frombuffer(bytearray(secrets.token_bytes(memory.numel())), dtype=torch.uint8)
        memory.copy_(pattern)
        torch.cuda.synchronize(self.plan.device)
        return DeviceDigest.of_tensors([memory], self.plan.device).bytes().hex()

    def check_join(self, rank: int, joined: Joined) -> None:
        export = self._exports[rank]
        export.close_descriptors()
        if joined.self_test != export.expected:
            raise SelfTestFailed(
                f"rank {rank} read other bytes than were written in the 1 MiB self-test over {joined.route}: "
                "its memory is not the sender's"
            )
        if export.self_test_export is not None:
            if not export.self_test_export.wait_released(Deadline(5)):
                raise SelfTestFailed(
                    f"rank {rank} did not release the self-test's memory: torch's counter reads "
                    f"{export.self_test_export.counter()}, not 0. Do both processes have one /dev/shm?"
                )
            export.self_test_export.retire()
            export.self_test_export = export.self_test_tensor = None
        elif export.control.exported(0):
            raise SelfTestFailed(f"rank {rank} did not release the self-test's memory: its counter is not 0")
        elif export.self_test is not None:
            export.self_test.close()
            export.self_test = None
        if joined.cannot:
            raise FallBack(joined.cannot)
        export.queues = joined.queues
        if self._push is not None:
            assert export.flags is not None
            if self._stand_ins is not None:
                self._push.map_tensors(rank, joined, export.flags, self._stand_ins.tensors)
            else:
                self._push.map_buckets(rank, joined, export.flags, self._staged.layout, self._staged.slots)
        self._route = joined.route

    def exported(self, rank: int) -> int:
        """What a receiver holds mapped: regions by its control page, or torch exports by their counters."""
        export = self._exports.get(rank)
        if export is None:
            return 0
        if export.ledger is not None:
            return export.ledger.unreleased
        if self._push is not None:
            return self._push.mapped(rank)
        count = 1 if self.whole else len(self._staged.slots)
        return sum(export.control.exported(1 + region) for region in range(count))

    def fall_back(self, reason: str) -> None:
        for rank in list(self._exports):
            self.forget(rank)
        self._route = ""
        if self._push is not None:
            self._push.close()
            self._push = None
        else:
            self.plan = replace(self.plan, mode="Packed")
        if self.plan.mode == "Packed" and self._slots is None:
            self._slots = self._new_slots()

    # --- a step -------------------------------------------------------------------------------------------------

    def fence(self) -> None:
        if self.whole:
            if self._stand_ins is not None:
                self._stand_ins.fill()
            self._stream.synchronize_caller()
            return
        self._stream.follow()
        if self._push is not None:
            return
        # Before Begin, which carries flag_base: everything of the step before is over on both sides' words.
        if self.flag_base + 2 * self._staged.count > LARGEST:
            self.flag_base = 0
        for export in self._exports.values():
            if export.flags is not None:
                for word in (FILLED_WORD, DRAINED_WORD, SENT_WORD, TAKEN_WORD):
                    export.flags.store(word, self.flag_base)

    def digests(self) -> bytes:
        if self._stand_ins is None or self._converts:
            return self._gathered_digests
        if self._digest is None:
            self._digest = DeviceDigest.of_tensors(self._stand_ins.tensors, self.plan.device)
        return self._digest.bytes()

    def send(self, channel: SendChannel) -> None:
        if self._push is not None:
            self._send_pushed(channel, self._push)
            return
        staged = self._staged
        base, count, slots = self.flag_base, staged.count, len(staged.slots)
        self.flag_base = base + count
        pages = {rank: self._flags(rank) for rank in channel.ranks}
        digests: dict[int, int] = {}
        try:
            if self._stand_ins is not None:
                with torch.cuda.stream(self._stream.stream):
                    self._stand_ins.fill()
            by_flags = self._stand_ins is not None and all(self._exports[rank].queues for rank in channel.ranks)
            for bucket in range(count):
                free = base + bucket - slots + 1  # what must be drained before this bucket's slot is
                if bucket >= QUEUED_BUCKETS:
                    self._wait_word(channel, pages, DRAINED_WORD, base + bucket - QUEUED_BUCKETS + 1)
                if bucket >= slots and by_flags:
                    self._wait_word(channel, pages, TAKEN_WORD, free)
                    for page in pages.values():
                        page.wait_geq(self._stream.stream, DRAINED_WORD, free)
                elif bucket >= slots:
                    self._wait_word(channel, pages, DRAINED_WORD, free)
                staged.fill(bucket)
                if channel.verify and (self._stand_ins is None or self._converts):
                    staged.digest(bucket, digests)
                for page in pages.values():
                    page.write(self._stream.stream, FILLED_WORD, base + bucket + 1)
                    page.store(SENT_WORD, base + bucket + 1)
            self._wait_stream(channel, pages)
            self._wait_word(channel, pages, DRAINED_WORD, base + count)
        except BaseException:
            self._release(pages)
            raise
        if self._stand_ins is None or self._converts:
            self._gathered_digests = staged.in_order(digests)

    def _send_pushed(self, channel: SendChannel, push: PushSender) -> None:
        if self._stand_ins is None:
            staged, digests = self._staged, dict[int, int]()

            def fill(bucket: int) -> None:
                staged.fill(bucket)
                if channel.verify:
                    staged.digest(bucket, digests)

            push.send_buckets(channel, staged.count, fill)
            self._gathered_digests = staged.in_order(digests)
            return
        if self._stand_ins.needed:
            with torch.cuda.stream(self._stream.stream):
                self._stand_ins.fill()
        push.send_tensors(channel)
        if channel.verify and self._converts:
            self._gathered_digests = push.digests(channel)

    def _flags(self, rank: int) -> FlagPage:
        flags = self._exports[rank].flags
        if flags is None:
            raise TransportError(f"rank {rank} has no page of flags: it joined in another mode")
        return flags

    def _wait_stream(self, channel: SendChannel, pages: dict[int, FlagPage]) -> None:
        """Until this end's part is done. Whoever left the step is no longer waited for: its word is released."""
        waiter = Waiter()
        while not self._stream.idle():
            if waiter.pause():
                self._look(channel, pages)

    def _wait_word(self, channel: SendChannel, pages: dict[int, FlagPage], word: int, value: int) -> None:
        """Until every receiver's word is at least `value`. No stream waits here, only this thread."""
        waiter = Waiter()
        while any(page.load(word) < value for page in pages.values()):
            if waiter.pause():
                self._look(channel, pages)

    def _look(self, channel: SendChannel, pages: dict[int, FlagPage]) -> None:
        """Takes messages in; frees the streams that wait for someone who left. Raises StepTimeout, TransportError."""
        channel.alive()
        for rank in list(pages):
            if rank not in channel.ranks:
                # A plain store: a driver call might be the very thing that is blocked.
                page = pages.pop(rank)
                page.store(DRAINED_WORD, RELEASED)
        if not pages:
            raise TransportError(f"step {channel.step}: every receiver left it")
        if channel.deadline.passed:
            raise StepTimeout(
                f"step {channel.step}: rank {', '.join(map(str, pages))} did not drain its buckets within "
                f"{channel.deadline.seconds:.3g} s"
            )

    def _release(self, pages: dict[int, FlagPage]) -> None:
        """The step is given up: no stream of this process may go on waiting."""
        deadline = Deadline(5)
        while True:
            for export in self._exports.values():
                if export.flags is not None:
                    export.flags.store(DRAINED_WORD, RELEASED)
            if self._stream.idle() or deadline.passed:
                return
            time.sleep(1e-4)

    # --- the end ------------------------------------------------------------------------------------------------

    def forget(self, rank: int, gone: bool = False) -> int:
        export = self._exports.pop(rank, None)
        if export is None:
            return 0
        if export.token:
            self._server.withdraw(export.token)
        export.close_descriptors()
        export.control.close_step()
        if self._push is not None:
            self._push.forget(rank)  # waits for what the stream still writes
        if export.flags is not None:
            export.flags.store(DRAINED_WORD, RELEASED)
            export.flags.close()
        if export.self_test is not None:
            export.self_test.close()
        if export.self_test_export is not None:
            export.self_test_export.retire(importer_gone=gone)
        export.self_test_tensor = None
        stranded = export.ledger.retire_all(importer_gone=gone) if export.ledger is not None else 0
        export.control.close()
        return stranded

    def close(self) -> None:
        for rank in list(self._exports):
            self.forget(rank)
        self._server.close()
        self._digest, self._stand_ins = None, None
        if self._slots is not None:
            self._slots.close()
