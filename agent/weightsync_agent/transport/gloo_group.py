"""A group of processes over gloo, and the flow of broadcasts through it: what is gloo's own, and its two gaps."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ..deadline import Deadline
from ..errors import StepTimeout, TransportError

CHUNK_BYTES = 16 << 20
"""Bytes of one broadcast. Both sides must have the same number."""
IN_FLIGHT = 2
"""Broadcasts under way at a time: one moves while another is packed or unpacked. Gloo runs two threads a group."""
PROBE_SECONDS = 30.0
LONGEST_SLEEP_SECONDS = 0.001
_CUT_TAG = 0x7757
"""Nobody sends with it."""
EXIT_SECONDS = 10.0
"""How long the end of the process waits for groups that are being closed."""

_closing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _finish_closing() -> None:
    """An interpreter that ends while gloo's threads are being joined would abort the process (SIGABRT)."""
    deadline = Deadline(EXIT_SECONDS)
    for thread in list(_closing):
        thread.join(deadline.remaining)


# torch's stubs leave most of these out.
_ProcessGroupGloo: Any = dist.ProcessGroupGloo
_BroadcastOptions: Any = dist.BroadcastOptions


class Work(Protocol):
    """A broadcast under way, as torch.distributed gives it."""

    def is_completed(self) -> bool: ...

    def wait(self) -> bool: ...


class GlooGroup:
    """One group of processes: made once for its members, thrown away when one of them leaves or fails."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        ranks: Sequence[int],
        rank: int,
        device_of: str,
        interface: str,
        deadline: Deadline,
        check: Callable[[], None],
    ) -> None:
        """Blocks until all `ranks` are in. `device_of`: the address of this member that the others reach; `check`:
        called while waiting, may raise.

        Raises TransportError that names the ranks that did not come, StepTimeout where the deadline has passed.
        """
        self._ranks = tuple(ranks)
        self._scope = PrefixStore(prefix, store)
        place = self._ranks.index(rank)
        options = _ProcessGroupGloo._Options()
        try:
            options._devices = [
                _ProcessGroupGloo.create_device(interface=interface)
                if interface
                else _ProcessGroupGloo.create_device(hostname=device_of)
            ]
            # Once all are there it takes moments, and can't be broken off.
            options._timeout = span(deadline.earlier(PROBE_SECONDS))
            self._scope.set_timeout(span(deadline))
            self._scope.set(f"in/{place}", "1")
            self._await_members(deadline, check)
            self._group: Any = _ProcessGroupGloo(self._scope, place, len(ranks), options)
            self._probe(deadline.earlier(PROBE_SECONDS), check)
        except RuntimeError as error:
            raise TransportError(
                f"gloo: rank {rank} could not make the group of ranks {listed(self._ranks)} over "
                f"{interface or device_of}: {first_line(error)}"
            ) from None

    def _await_members(self, deadline: Deadline, check: Callable[[], None]) -> None:
        missing = list(range(len(self._ranks)))
        while missing:
            missing = [place for place in missing if not self._scope.check([f"in/{place}"])]
            if missing and deadline.passed:
                raise TransportError(
                    f"gloo: rank {listed([self._ranks[place] for place in missing])} did not come to the group within "
                    f"{deadline.seconds:.3g} s: its process has ended, or it can't reach the sender's store"
                )
            if missing:
                check()
                time.sleep(0.002)

    def _probe(self, deadline: Deadline, check: Callable[[], None]) -> None:
        """One byte to everyone: a group that is made but can't move bytes is found here, not in a step."""
        byte = torch.full((1,), 0x5A if self._ranks[0] == self._my_rank else 0, dtype=torch.uint8)
        self.finish(self.broadcast(byte, deadline), deadline, check)
        if int(byte[0]) != 0x5A:
            raise TransportError("gloo: the first broadcast brought another byte than was sent")

    @property
    def _my_rank(self) -> int:
        assert self._group is not None
        return self._ranks[int(self._group.rank())]

    def broadcast(self, data: torch.Tensor, deadline: Deadline) -> Work:
        """Starts the broadcast of `data` (uint8, contiguous) from or into it. Raises TransportError."""
        if self._group is None:
            raise TransportError("gloo: the group was thrown away after a failure; the next step makes a new one")
        options = _BroadcastOptions()
        options.rootRank = 0
        options.timeout = span(deadline)
        try:
            work: Work = self._group.broadcast([data], options)
        except RuntimeError as error:
            raise self._failed(error, deadline) from None
        return work

    def finish(self, work: Work, deadline: Deadline, check: Callable[[], None]) -> None:
        """Waits for a broadcast. `check` is called while waiting and may raise.

        Raises StepTimeout at the deadline, also where another member was the first to see it and has left by now;
        TransportError when a member's connection is gone.
        """
        sleep = 2e-5
        while not work.is_completed():
            if deadline.passed:
                raise _late(deadline)
            time.sleep(sleep)
            if sleep >= 2e-4:
                try:
                    check()
                except TransportError:
                    if deadline.passed:
                        raise _late(deadline) from None
                    raise
            sleep = min(sleep * 2, LONGEST_SLEEP_SECONDS)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failed(error, deadline) from None

    def _failed(self, error: RuntimeError, deadline: Deadline) -> TransportError | StepTimeout:
        if deadline.passed:
            return _late(deadline)
        return TransportError(
            f"gloo: a broadcast among ranks {listed(self._ranks)} failed: {first_line(error)}; "
            "a member's process has ended or its network is gone; the next step makes a new group"
        )

    def close(self) -> None:
        """Closes this member's connections: no byte moves any more when it returns, and the others' broadcasts end.

        Takes a millisecond. Idempotent.
        """
        group, self._group = self._group, None
        if group is None:
            return
        _cut(group)
        # Gloo's own threads are joined when the group dies. One may still wait for what was cut, to the deadline.
        holder = [group]
        del group
        closing = threading.Thread(target=holder.clear, name="weightsync-gloo-close", daemon=True)
        _closing.add(closing)
        closing.start()


def _late(deadline: Deadline) -> StepTimeout:
    return StepTimeout(f"gloo: a broadcast was not done within {deadline.seconds:.3g} s")


def _cut(group: Any) -> None:
    """Closes the sockets of a group at once.

    Gloo has no call for it, and does not tell every operation of a peer that died: one that was being written or read
    waits for its own timeout, and keeps the connections to the others open (pair.cc: signalException goes through the
    queued operations only). But an operation that times out closes all of its group's connections
    (unbound_buffer.cc, waitRecv). So: one that can't succeed.
    """
    for place in range(group.size()):
        if place == group.rank():
            continue
        try:
            work = group.recv([torch.empty(1, dtype=torch.uint8)], place, _CUT_TAG)
        except RuntimeError:
            continue  # this one is closed already: another has to do it
        with contextlib.suppress(RuntimeError):
            work.wait(timedelta(milliseconds=1))
        return


class Flow:
    """Broadcasts in order, a few under way at a time, each buffer's own end of work done before it is used again."""

    def __init__(self, group: GlooGroup, deadline: Deadline, check: Callable[[], None]) -> None:
        self._group = group
        self._deadline = deadline
        self._check = check
        self._under_way: deque[tuple[Work, object, Callable[[], None] | None]] = deque()

    def move(self, data: torch.Tensor, buffer: object = None, then: Callable[[], None] | None = None) -> None:
        """Broadcasts `data` (uint8). `then` is called when it is over, and before `free(buffer)` returns."""
        for start in range(0, data.numel(), CHUNK_BYTES):
            while len(self._under_way) >= IN_FLIGHT:
                self._finish_oldest()
            last = start + CHUNK_BYTES >= data.numel()
            work = self._group.broadcast(data[start : start + CHUNK_BYTES], self._deadline)
            self._under_way.append((work, buffer, then if last else None))

    def free(self, buffer: object) -> None:
        """Waits until `buffer` is in no broadcast and its end of work is done."""
        while any(held == buffer for _, held, _ in self._under_way):
            self._finish_oldest()

    def drain(self) -> None:
        while self._under_way:
            self._finish_oldest()

    def abandon(self, error: BaseException) -> None:
        """After a failure: lets go of every broadcast, also of those that the error's own frames hold, so that the
        group's memory goes."""
        self._under_way.clear()
        traceback.clear_frames(error.__traceback__)

    def _finish_oldest(self) -> None:
        work, _, then = self._under_way[0]
        self._group.finish(work, self._deadline, self._check)
        self._under_way.popleft()
        if then is not None:
            then()


def span(deadline: Deadline) -> timedelta:
    # Not 0, which torch takes for "no timeout"; not above what its milliseconds hold.
    return timedelta(seconds=min(max(deadline.remaining, 0.001), 10 * 86400.0))


def listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:20])) + (f" and {len(ranks) - 20} more" if len(ranks) > 20 else "")


def first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0].strip()[:500]
