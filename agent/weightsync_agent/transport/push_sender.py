"""The sending side of push.py: writes a step into each receiver's tensors as soon as its engine has let go of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..cuda.arena import DeviceArena
from ..cuda.flags import FlagPage
from ..cuda.streams import NamedStream
from ..cuda.warm import warm
from ..deadline import Deadline
from ..errors import FallBack, StepTimeout, TransportError
from ..manifest import Layout, Manifest
from ..protocol import Joined
from .base import SendChannel
from .push import READY_WORD, STILL_WORD, WRITTEN_WORD, Pushed, step_word
from .waiting import Waiter

STILL_SECONDS = 5.0
"""So long a step that broke off waits for what it has queued: it would only be in the way of the next one."""


class PushSender:
    """Every receiver's tensors as they are mapped here, and the flags shared with each."""

    def __init__(self, manifest: Manifest, device: torch.device, stream: NamedStream) -> None:
        self._manifest = manifest
        self._device = device
        self._stream = stream
        self._pushed: dict[int, tuple[Pushed, FlagPage]] = {}
        """By rank."""
        warm(device, permitted=True)

    # --- joining ------------------------------------------------------------------------------------------------

    def map_tensors(self, rank: int, joined: Joined, flags: FlagPage, sources: Sequence[torch.Tensor]) -> None:
        """What a receiver offers, to be written from the trainer's tensors. Raises FallBack where that can't be."""
        self._map(rank, joined, flags, lambda pushed: pushed.from_tensors(sources))

    def map_buckets(
        self, rank: int, joined: Joined, flags: FlagPage, layout: Layout, slots: Sequence[DeviceArena]
    ) -> None:
        """As `map_tensors`, to be written from the slots that each bucket is gathered into."""
        self._map(rank, joined, flags, lambda pushed: pushed.from_buckets(layout, slots))

    def _map(self, rank: int, joined: Joined, flags: FlagPage, plan: Callable[[Pushed], None]) -> None:
        self.forget(rank)
        try:
            pushed = Pushed(joined, self._manifest, self._device)
        except TransportError as problem:
            raise FallBack(str(problem)) from None
        self._pushed[rank] = pushed, flags
        try:
            plan(pushed)
        except TransportError as problem:
            self.forget(rank)
            raise FallBack(str(problem)) from None

    def replan(self, sources: Sequence[torch.Tensor]) -> None:
        """The trainer's tensors lie elsewhere by now."""
        for pushed, _ in self._pushed.values():
            pushed.from_tensors(sources)

    def mapped(self, rank: int) -> int:
        """Allocations of a receiver's that are mapped here."""
        return self._pushed[rank][0].exported if rank in self._pushed else 0

    def forget(self, rank: int) -> None:
        """Releases what was mapped, once all that is queued is done."""
        if (known := self._pushed.pop(rank, None)) is not None:
            known[0].close()

    def close(self) -> None:
        for rank in list(self._pushed):
            self.forget(rank)

    # --- a step -------------------------------------------------------------------------------------------------

    def send_tensors(self, channel: SendChannel) -> None:
        """All of it in one launch a receiver. Raises TransportError, StepTimeout, and what `channel.started` does."""
        try:
            ready = self._each_ready(channel, lambda pushed: pushed.run(self._stream.stream))
            channel.started()
            self._finish(channel, ready)
        except BaseException:
            self._stand_still(channel)
            raise

    def send_buckets(self, channel: SendChannel, buckets: int, fill: Callable[[int], None]) -> None:
        """Bucket by bucket, as `fill` gathers them. Raises as `send_tensors`, and what `fill` does."""
        try:
            ready = self._each_ready(channel, lambda pushed: None)
            for bucket in range(buckets):
                fill(bucket)
                for rank in ready:
                    self._known(rank)[0].run(self._stream.stream, bucket)
                self._look(channel, ready, "was not written")
            self._finish(channel, ready)
        except BaseException:
            self._stand_still(channel)
            raise

    def digests(self, channel: SendChannel) -> bytes:
        """Of what lies at a receiver of the step now, which that one reads for itself."""
        for rank in channel.ranks:
            return self._known(rank)[0].digests(self._stream.stream)
        raise TransportError(f"step {channel.step}: every receiver left it")

    def _each_ready(self, channel: SendChannel, queue: Callable[[Pushed], None]) -> list[int]:
        """Queues for each receiver in the moment in which its engine has let go; gives their ranks."""
        word, ready, waiter = step_word(channel.step), list[int](), Waiter()
        waiting = {rank: self._known(rank) for rank in channel.ranks}
        while waiting:
            for rank, (pushed, flags) in list(waiting.items()):
                if flags.load(READY_WORD) == word:
                    queue(pushed)
                    del waiting[rank]
                    ready.append(rank)
            if waiting and waiter.pause():
                left = list(waiting)
                self._look(channel, left, "did not let go of its weights")
                waiting = {rank: waiting[rank] for rank in left}
        return ready

    def _finish(self, channel: SendChannel, ready: list[int]) -> None:
        """Waits for the stream, and tells the receivers that all is there."""
        waiter, word = Waiter(), step_word(channel.step)
        while not self._stream.idle():
            if waiter.pause():
                self._look(channel, ready, "was not written")
        for rank in ready:
            self._known(rank)[1].store(WRITTEN_WORD, word)

    def _stand_still(self, channel: SendChannel) -> None:
        """The step broke off: receivers need not fear what is still queued, once there is nothing."""
        deadline, waiter = Deadline(STILL_SECONDS), Waiter()
        while not self._stream.idle():
            if deadline.passed:
                return
            waiter.pause()
        for _, flags in self._pushed.values():
            flags.store(STILL_WORD, step_word(channel.step))

    def _look(self, channel: SendChannel, ranks: list[int], what: str) -> None:
        """Takes messages in, and out of `ranks` who left the step. Raises StepTimeout, TransportError."""
        channel.alive()
        ranks[:] = [rank for rank in ranks if rank in channel.ranks]
        if not channel.ranks:
            raise TransportError(f"step {channel.step}: every receiver left it")
        if channel.deadline.passed:
            raise StepTimeout(
                f"step {channel.step}: rank {', '.join(map(str, ranks))} {what} within {channel.deadline.seconds:.3g} s"
            )

    def _known(self, rank: int) -> tuple[Pushed, FlagPage]:
        known = self._pushed.get(rank)
        if known is None:
            raise TransportError(f"rank {rank} has no tensors that can be written: it joined in another mode")
        return known
