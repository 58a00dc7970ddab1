"""CUDA IPC, the receiver's end: maps what the sender offers once, and copies from it once a step.

The memory may be on the receiver's own GPU or, by descriptor, on another GPU of the same container: then the same copy
plan reads it over NVLink with a small grid, without NCCL and without a buffer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch
from weightsync_api.agent_config import AgentConfig

from ..copy_plan import separate_aliases
from ..cuda.arena import DeviceArena
from ..cuda.copy_plan import NVLINK_GRID, DeviceCopyPlan, Runs, merge_runs, piece_runs
from ..cuda.digest import DeviceDigest
from ..cuda.driver import gpu_uuid, normal_uuid
from ..cuda.flags import RELEASED, FlagPage
from ..cuda.importer import TorchImport
from ..cuda.streams import COPY, named_stream
from ..deadline import Deadline
from ..errors import Closed, StepTimeout, TransportError
from ..host_memory import HostMemory
from ..identity import local_identity
from ..manifest import Manifest, Piece, layout
from ..protocol import Identity, Joined, Offer, Region, Welcome
from ..targets import Target
from .base import ReceiveChannel
from .control import Control, MappedReceiver
from .descriptors import fetch_descriptors
from .ipc_sender import (
    DRAINED_WORD,
    FILLED_WORD,
    QUEUED_BUCKETS,
    SENT_WORD,
    TAKEN_WORD,
)
from .push import READY_WORD, SETTLE_SECONDS, STILL_WORD, WRITTEN_WORD, Targets, step_word
from .staging import Loader
from .stand_ins import StandIns
from .waiting import Waiter

log = logging.getLogger("weightsync.receiver")


class IpcReceiver(MappedReceiver):
    def __init__(
        self, welcome: Welcome, manifest: Manifest, target: Target, config: AgentConfig, device: torch.device
    ) -> None:
        super().__init__(welcome, manifest, target)
        self._device = device
        self._stream = named_stream(device, COPY)
        self._flags: FlagPage | None = None
        self._data: list[DeviceArena] = []
        self._released: list[bool] = []
        self._imports: list[TorchImport] = []
        self._layout = layout(manifest, welcome.bucket_bytes)
        self._stand_ins: StandIns | None = None
        self._plans: list[DeviceCopyPlan] = []
        self._loader: Loader | None = None
        self._digest: DeviceDigest | None = None
        self._near = True
        self._targets: Targets | None = None
        self._settled_at = 0.0
        """time.monotonic() from which on the sender may be let write again."""

    @property
    def owned_bytes(self) -> int:
        return 0  # what is mapped is the sender's; what the loader stages is torch's

    # --- joining ------------------------------------------------------------------------------------------------

    def join(self, deadline: Deadline) -> Joined:
        offer = self.welcome.offer
        if offer is None or not offer.regions or offer.regions[0].role != "control":
            raise TransportError("the sender's offer has no shared memory in it")
        began = time.perf_counter()
        descriptors = fetch_descriptors(offer.socket, offer.token, len(offer.regions), deadline)
        # From here on each descriptor has an owner that closes it, also when a later one fails.
        pending = list(zip(descriptors, offer.regions, strict=True))
        try:
            while pending:
                descriptor, region = pending.pop(0)
                self._map(descriptor, region)
        finally:
            for descriptor, _ in pending:
                HostMemory.map(descriptor, 1).close()
        mapped = time.perf_counter()
        if offer.handles:
            result = self._open_handles(offer)
        else:
            result = self._self_test()
            if offer.pusher is None:
                self._check_sizes()
        tested = time.perf_counter()
        own = gpu_uuid(self._device)
        self._near = all(normal_uuid(memory.gpu) == own for memory in self._data)
        if offer.pusher is not None:
            return self._join_pushed(offer.pusher, result)
        if not self.target.in_place and self.welcome.mode == "Direct" and (offer.handles or not self._near):
            cannot = "its weights go through load_weights, for which Direct mode needs an arena on its GPU (adopt=True)"
            return Joined(route="IPC", self_test=result, cannot=cannot)
        if self.target.in_place:
            self._stand_ins = StandIns(self.target.destinations())
            self._make_plans(offer)
            self.settled = self.welcome.mode == "Direct"
        else:
            self._loader = Loader(self.manifest, self._layout, self.target, self._device, self._digests_of)
        if self._flags is not None:
            self._flags.attach(self._device)
        log.debug(
            "memory mapped in %.3f s, tested in %.3f s, copies planned in %.3f s",
            *(mapped - began, tested - mapped, time.perf_counter() - tested),
        )
        route = "IPC/TorchHandle" if offer.handles else "IPC/Descriptor" if self._near else "P2P/Mapped"
        return Joined(route=route, self_test=result, queues=self.target.in_place and self._flags is not None)

    def _join_pushed(self, sender: Identity, self_test: str) -> Joined:
        route = "IPC/Push"
        if not self.target.in_place:
            return Joined(route=route, self_test=self_test, cannot="its weights go through load_weights")
        self._stand_ins = StandIns(self.target.destinations())
        try:
            own = local_identity(0, self._device)
            self._targets = Targets(self._stand_ins.tensors, sender, own, self._device)
        except TransportError as problem:
            return Joined(route=route, self_test=self_test, cannot=str(problem)[:4096])
        self.settled = True
        handles, placements = self._targets.handles, self._targets.placements
        return Joined(
            route=route, self_test=self_test, targets=handles, placements=placements, permit=self._targets.permit
        )

    def _map(self, descriptor: int, region: Region) -> None:
        if region.kind == "driver":
            self._data.append(DeviceArena.map(descriptor, region.nbytes, self._device, region.gpu))
            self._released.append(False)
        elif region.role == "flags":
            self._flags = FlagPage.map(descriptor, region.nbytes)
        else:
            self._control = Control.mapped(HostMemory.map(descriptor, region.nbytes))

    def _self_test(self) -> str:
        """Reads the sender's pattern, and releases its memory at once: the counter that proves it is 0 then."""
        if not self._data:
            raise TransportError("the sender's offer has no memory of a GPU in it")
        memory = self._data[0]
        parts = [(memory.pointer, memory.nbytes, 0, 0)]
        result = DeviceDigest(parts, 1, self._device).bytes().hex()
        self._release(0)
        del self._data[0], self._released[0]
        return result

    def _open_handles(self, offer: Offer) -> str:
        *handles, self_test = offer.handles
        with TorchImport(self_test, self._device) as memory:
            view = memory.tensor()
            result = DeviceDigest.of_tensors([view], self._device).bytes().hex()
            del view
        if offer.placements is None or len(offer.placements) != len(self.manifest.tensors):
            raise TransportError("the sender's offer does not say where each tensor lies")
        self._imports = [TorchImport(handle, self._device) for handle in handles]
        return result

    def _check_sizes(self) -> None:
        """What the peer says is not trusted: a short slot would be read beyond its end."""
        if self.welcome.mode == "Direct":
            need = [self.manifest.arena_bytes]
        else:
            buckets = range(len(self._layout.buckets))
            need = [max((self._layout.used_bytes(bucket) for bucket in buckets), default=0)] * len(self._data)
        if len(self._data) != len(need) or any(m.nbytes < n for m, n in zip(self._data, need, strict=True)):
            raise TransportError(
                f"the sender's memory has {[m.nbytes for m in self._data]} bytes; its layout needs {need}"
            )

    def _make_plans(self, offer: Offer) -> None:
        assert self._stand_ins is not None
        pointers = self._stand_ins.pointers
        also = separate_aliases(self.manifest, self.target.destinations())
        grid = None if self._near else NVLINK_GRID
        if self.welcome.mode == "Direct":
            runs = self._direct_runs(self._sources(offer), pointers, also)
            self._plans = [DeviceCopyPlan(runs, self._device, grid_limit=grid, recorded=True)]
            return
        for bucket, pieces in enumerate(self._layout.buckets):
            slot = self._data[bucket % len(self._data)].pointer
            widened = [
                Piece(index, p.tensor_offset, p.bucket_offset, p.nbytes)
                for p in pieces
                for index in (p.tensor, *also.get(p.tensor, ()))
            ]
            runs = piece_runs(widened, pointers, slot, into="Tensors")
            self._plans.append(DeviceCopyPlan(runs, self._device, grid_limit=grid))

    def _sources(self, offer: Offer) -> list[int]:
        """Address of each of the sender's tensors in this process."""
        if not offer.handles:
            return [self._data[0].pointer + offset for offset in self.manifest.arena_offsets]
        assert offer.placements is not None
        found: list[int] = []
        for (handle, offset), entry in zip(offer.placements, self.manifest.tensors, strict=True):
            if entry.nbytes and not 0 <= handle < len(self._imports):
                raise TransportError(f"the sender places {entry.name} in allocation {handle}, which it did not offer")
            found.append(self._imports[handle].pointer_at(offset, entry.nbytes) if entry.nbytes else 0)
        return found

    def _direct_runs(self, sources: Sequence[int], pointers: object, also: dict[int, list[int]]) -> Runs:
        rows: list[tuple[int, int, int]] = []
        destinations = np.asarray(pointers, np.int64)
        for index, entry in enumerate(self.manifest.tensors):
            if entry.alias is None and entry.nbytes:
                rows += [(sources[index], int(destinations[t]), entry.nbytes) for t in (index, *also.get(index, ()))]
        return merge_runs(np.array(rows, np.int64).reshape(-1, 3))

    def mark(self) -> None:
        self._stream.mark()

    # --- a step -------------------------------------------------------------------------------------------------

    def receive(self, channel: ReceiveChannel) -> None:
        assert self._control is not None
        # What the engine still has queued reads the old weights; it is let finish.
        self._stream.follow_mark()
        if self._loader is not None:
            channel.started()
            self._load(channel, self._loader)
        elif self._targets is not None:
            self._be_written(channel)
        elif self.welcome.mode == "Direct":
            self._plans[0].run(self._stream.stream)
            self._empty()
            channel.started()
            self._stream.synchronize()
        else:
            self._queue(channel)
        self._control.check_open(channel.step)

    def _be_written(self, channel: ReceiveChannel) -> None:
        """Lets the sender write from when the engine has let go until all is there, and not a moment longer."""
        assert self._flags is not None
        assert self._targets is not None
        flags, word = self._flags, step_word(channel.step)
        self._stream.synchronize()
        if time.monotonic() < self._settled_at:
            self._wait(channel, lambda: time.monotonic() >= self._settled_at)
        try:
            self._targets.allow()
            flags.store(READY_WORD, word)
            channel.started()
            self._wait(channel, lambda: flags.load(WRITTEN_WORD) == word)
        except BaseException:
            if flags.load(STILL_WORD) != word:
                self._targets.forbid()
                self._settled_at = time.monotonic() + SETTLE_SECONDS
            raise
        if self._stand_ins is not None and self._stand_ins.needed:
            self._empty()
            self._stream.synchronize()

    def _queue(self, channel: ReceiveChannel) -> None:
        """The step on the stream, each bucket as soon as the sender has queued it; flags order the two streams."""
        assert self._flags is not None
        stream, flags, base = self._stream.stream, self._flags, channel.flag_base
        try:
            channel.started()
            for bucket, plan in enumerate(self._plans):
                if bucket >= QUEUED_BUCKETS:
                    self._wait_word(channel, flags, DRAINED_WORD, base + bucket - QUEUED_BUCKETS + 1)
                self._wait_word(channel, flags, SENT_WORD, base + bucket + 1)
                flags.wait_geq(stream, FILLED_WORD, base + bucket + 1)
                plan.run(stream)
                flags.write(stream, DRAINED_WORD, base + bucket + 1)
                flags.store(TAKEN_WORD, base + bucket + 1)
            self._empty()
            self._wait(channel, self._stream.idle)
        except BaseException:
            self._free(flags)
            raise
        if flags.load(FILLED_WORD) == RELEASED:
            raise Closed(f"step {channel.step} was broken off by the sender")

    def _load(self, channel: ReceiveChannel, loader: Loader) -> None:
        """Through `load_weights`. No stream waits on a flag here: the engine's code may allocate and load kernels."""
        if self.welcome.mode == "Direct":
            loader.load_arena(self._data[0].tensor, self._data[0].views_alive, channel.verify)
            torch.cuda.synchronize(self._device)
            return
        assert self._flags is not None
        flags, base = self._flags, channel.flag_base
        for bucket in range(len(self._layout.buckets)):
            self._wait_word(channel, flags, FILLED_WORD, base + bucket + 1)
            memory = self._data[bucket % len(self._data)]
            if self._near:
                loader.load_bucket(bucket, memory.tensor, memory.views_alive, channel.verify)
            else:
                staged = self._stage(memory, self._layout.used_bytes(bucket))
                loader.load_bucket(bucket, lambda s=staged: s, lambda: False, channel.verify)  # type: ignore[misc]
            torch.cuda.synchronize(self._device)
            flags.store(DRAINED_WORD, base + bucket + 1)

    def _stage(self, memory: DeviceArena, nbytes: int) -> torch.Tensor:
        """A peer GPU's bucket, in this GPU's memory: views of it are what an engine's code expects."""
        staged = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        runs = [(memory.pointer, staged.data_ptr(), nbytes)]
        DeviceCopyPlan(runs, self._device, grid_limit=NVLINK_GRID).run()
        return staged

    def _wait_word(self, channel: ReceiveChannel, flags: FlagPage, word: int, value: int) -> None:
        if flags.load(word) < value:
            self._wait(channel, lambda: flags.load(word) >= value)

    def _wait(self, channel: ReceiveChannel, done: object) -> None:
        assert callable(done)
        waiter = Waiter()
        while not done():
            if not waiter.pause():
                continue
            channel.check()
            if channel.deadline.passed:
                raise StepTimeout(f"step {channel.step}: its data did not come within {channel.deadline.seconds:.3g} s")

    def _free(self, flags: FlagPage) -> None:
        """The step is given up: no stream of this process may go on waiting. Plain stores (rule 1 of flags.py)."""
        deadline = Deadline(5)
        while not self._stream.idle() and not deadline.passed:
            flags.store(FILLED_WORD, RELEASED)
            time.sleep(1e-4)

    def _empty(self) -> None:
        if self._stand_ins is not None and self._stand_ins.needed:
            with torch.cuda.stream(self._stream.stream):
                self._stand_ins.empty()

    def digests(self) -> bytes:
        if self._loader is not None:
            return self._loader.digests()
        if self._digest is None:
            self._digest = DeviceDigest.of_tensors(self.target.destinations(), self._device)
        return self._digest.bytes()

    def _digests_of(self, tensors: Sequence[torch.Tensor]) -> bytes:
        return DeviceDigest.of_tensors(tensors, self._device).bytes()

    # --- the end ------------------------------------------------------------------------------------------------

    def _release(self, region: int) -> None:
        """Unmaps one region and takes its count back, exactly once."""
        if self._released[region]:
            return
        self._released[region] = True
        self._data[region].close()
        assert self._control is not None
        counted, self._next_release = self._next_release, self._next_release + 1
        self._control.release(counted)

    _next_release = 0
    """Regions are released in the offer's order, so that each is counted by a word of its own."""

    def close(self) -> None:
        self._plans, self._digest, self._loader = [], None, None
        if self._targets is not None:
            self._targets.close()
            # What the sender had at work when a step broke off may still write: nobody is given this memory before.
            time.sleep(max(0.0, self._settled_at - time.monotonic()))
            self._targets = None
        if self._flags is not None:
            self._flags.close()
            self._flags = None
        if self._control is not None:
            for region in range(len(self._data)):
                self._release(region)
        else:
            for memory in self._data:
                memory.close()
        self._data, self._released = [], []
        for opened in self._imports:
            opened.close()
        self._imports = []
        if self._control is not None:
            self._control.close()
            self._control = None
