"""One worker a WeightSync: woken, it makes a pass; passes of one WeightSync never overlap, and failures back off.

Beside its passes each worker follows the sender's reports by a long poll.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from weightsync_api.v1alpha1 import WeightSync

from .kube_api import ApiError
from .plan import Key
from .reconcile import Pass, Reconciler
from .resource_tree import UnreadableError

log = logging.getLogger("weightsync.workers")

RESYNC_SECONDS = 600.0
"""A pass comes at least this often, whatever was missed; with jitter, so that a thousand don't come together."""
PAUSE_SECONDS = 0.05
"""Between two passes: what comes together is taken in together."""
FIRST_BACKOFF = 0.5
MAX_BACKOFF = 30.0
MAX_PASSES = 16
"""Passes at a time."""
MAX_PRIMES = 64
PRIME_SECONDS = 5.0
"""For which the first pass waits for the sender's report, of so many at a time."""
FOLLOW_RETRY_SECONDS = 2.0
CLOSE_SECONDS = 5.0

Observer = Callable[[Key, Pass | None, float], Awaitable[None]]
"""Told of every pass: None where it failed; and of the seconds that it took."""


@dataclass
class _Worker:
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    follow: asyncio.Task[None] | None = None
    followed: tuple[str, int] = ("", 0)
    """UID and generation of the WeightSync whose reports are followed."""
    busy: bool = False


class Workers:
    """Runs passes for every key that was woken.

    Args:
        reconciler: makes the passes.
        observer: told of them.
        resync: seconds after which a pass comes without being woken.
    """

    def __init__(self, reconciler: Reconciler, observer: Observer, resync: float = RESYNC_SECONDS) -> None:
        self._reconciler = reconciler
        self._observer = observer
        self._resync = resync
        self._workers: dict[Key, _Worker] = {}
        self._open = asyncio.Event()
        self._turns = asyncio.Semaphore(MAX_PASSES)
        self._primes = asyncio.Semaphore(MAX_PRIMES)
        self._closing = False

    @property
    def waiting(self) -> int:
        """Keys whose pass is due."""
        return sum(worker.woken.is_set() or worker.busy for worker in self._workers.values())

    def open(self) -> None:
        """Lets passes begin: what there is has been read."""
        self._open.set()

    def wake(self, key: Key) -> None:
        """A pass is due."""
        if self._closing:
            return
        worker = self._workers.get(key)
        if worker is None:
            worker = self._workers[key] = _Worker()
            worker.task = asyncio.create_task(self._run(key, worker), name=f"reconcile {key}")
        worker.woken.set()

    async def close(self) -> None:
        """Ends every worker, those in a pass within CLOSE_SECONDS."""
        self._closing = True
        tasks = [task for worker in self._workers.values() for task in (worker.follow, worker.task) if task is not None]
        idle = [w.task for w in self._workers.values() if not w.busy and w.task is not None]
        for task in [*idle, *(w.follow for w in self._workers.values() if w.follow is not None)]:
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()

    async def _run(self, key: Key, worker: _Worker) -> None:
        await self._open.wait()
        backoff = FIRST_BACKOFF
        try:
            await self._prime(key)
            while not self._closing:
                worker.woken.clear()
                done = await self._pass(key, worker)
                if done is None:
                    delay = backoff * random.uniform(0.5, 1)
                    backoff = min(backoff * 2, MAX_BACKOFF)
                    await asyncio.sleep(delay)
                    continue
                backoff = FIRST_BACKOFF
                if done.resource is not None:
                    self._follow(key, worker, done.resource)
                elif done.status is not None:
                    self._unfollow(worker)  # its spec can't be read: only a change can help, and wakes this
                elif not worker.woken.is_set():
                    return
                else:
                    continue  # made anew meanwhile
                due = self._resync * random.uniform(0.75, 1)
                if done.again_after is not None:
                    due = min(due, done.again_after)
                del done  # a thousand workers that wait hold no statuses
                await asyncio.sleep(PAUSE_SECONDS)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(worker.woken.wait(), due)
        finally:
            if worker.follow is not None:
                worker.follow.cancel()
            if self._workers.get(key) is worker:
                del self._workers[key]

    async def _prime(self, key: Key) -> None:
        try:
            async with self._primes, asyncio.timeout(PRIME_SECONDS):
                await self._reconciler.prime(key)
        except (ApiError, UnreadableError, TimeoutError) as error:
            log.debug("%s: nothing was read before the first pass: %s", key, error)

    async def _pass(self, key: Key, worker: _Worker) -> Pass | None:
        """None: it failed."""
        async with self._turns:
            worker.busy, began = True, time.monotonic()
            done: Pass | None = None
            try:
                done = await self._reconciler.reconcile(key)
            except (ApiError, UnreadableError) as error:
                log.warning("%s: this pass failed, another one follows: %s", key, error)
            except Exception:
                log.exception("%s: this pass failed, another one follows", key)
            finally:
                worker.busy = False
            await self._observer(key, done, time.monotonic() - began)
            return done

    @staticmethod
    def _unfollow(worker: _Worker) -> None:
        if worker.follow is not None:
            worker.follow.cancel()
            worker.follow = None

    def _follow(self, key: Key, worker: _Worker, ws: WeightSync) -> None:
        """Follows the reports of this WeightSync; anew where the spec changed or the sender had finished."""
        wanted = (ws.metadata.uid, ws.metadata.generation)
        running = worker.follow is not None and not worker.follow.done()
        if worker.follow is not None and worker.follow.done() and not worker.follow.cancelled():
            error = worker.follow.exception()
            if error is not None:
                log.error("%s: following its reports failed", key, exc_info=error)
        if ws.spec.suspend:
            self._unfollow(worker)
            return
        if running and worker.followed == wanted:
            return
        if worker.follow is not None:
            worker.follow.cancel()
        worker.followed = wanted
        follow = self._reconciler.follow(key, ws, lambda: self.wake(key), max_retry=FOLLOW_RETRY_SECONDS)
        worker.follow = asyncio.create_task(follow, name=f"follow {key}")
