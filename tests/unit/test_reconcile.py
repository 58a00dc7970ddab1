"""One pass does what is missing and no more, whatever woke it; reports come in beside it and none is lost."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

from operator_samples import CLUSTER, START, observed, report, row, step, weightsync
from weightsync_api.reports import Report
from weightsync_api.v1alpha1 import WeightSync, WeightSyncStatus
from weightsync_operator.plan import Key, Plan, PlanDefaults
from weightsync_operator.platform import Observed, Problem
from weightsync_operator.reconcile import Reconciler

KEY = Key("default", "demo")


class Shelf:
    """A platform in memory: what a cluster's objects and a sender would answer."""

    def __init__(self, ws: WeightSync | None) -> None:
        self.ws = ws
        self.problems: tuple[Problem, ...] = ()
        self.applied: list[Plan] = []
        self.deleted: list[Key] = []
        self.writes: list[WeightSyncStatus] = []
        self.sender: list[Report] = []
        """Its reports, oldest first; the last one is what it says now."""
        self.asked: list[int] = []
        self.while_writing: list[Report] = []

    def defaults(self, ws: WeightSync) -> PlanDefaults:
        return CLUSTER

    async def resource(self, key: Key) -> WeightSync | None:
        return self.ws

    async def observe(self, key: Key) -> Observed:
        if self.ws is None:
            return Observed(None)
        agents = observed(self.ws).agents if self.applied else ()
        return Observed(self.ws, agents, self.problems)

    async def apply(self, plan: Plan) -> None:
        self.applied.append(plan)

    async def report(self, key: Key, after: int, wait: float) -> Report | None:
        self.asked.append(after)
        if not self.sender:
            return None
        now = self.sender[-1]
        return now.model_copy(update={"steps": [s for s in now.steps if s.step > after]})

    async def write_status(self, ws: WeightSync, status: WeightSyncStatus) -> None:
        self.sender += self.while_writing
        self.while_writing = []
        self.writes.append(status)
        self.ws = ws.model_copy(update={"status": status})

    async def delete(self, key: Key) -> None:
        self.deleted.append(key)


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now


def told(ws: WeightSync, *steps: int, session: str = "s1") -> Report:
    return report(ws, [step(n, [row(1)]) for n in steps], session=session)


def test_a_pass_that_changes_nothing_writes_nothing() -> None:
    async def run() -> None:
        ws = weightsync(receivers={"replicas": 1})
        shelf = Shelf(ws)
        shelf.sender = [told(ws, 1)]
        reconciler = Reconciler(shelf, now=Clock())
        assert (await reconciler.reconcile(KEY)).written
        assert await reconciler.poll(KEY, ws)
        assert (await reconciler.reconcile(KEY)).written
        for _ in range(3):
            assert not (await reconciler.reconcile(KEY)).written
        assert len(shelf.writes) == 2
        assert shelf.writes[-1].step == 1

    asyncio.run(run())


def test_a_restarted_operator_finds_the_same_status_and_writes_nothing() -> None:
    async def run() -> None:
        ws = weightsync(receivers={"replicas": 1})
        shelf = Shelf(ws)
        shelf.sender = [told(ws, 1, 2, 3, 4)]
        first = Reconciler(shelf, now=Clock())
        await first.reconcile(KEY)
        await first.poll(KEY, ws)
        await first.reconcile(KEY)
        writes = len(shelf.writes)
        second = Reconciler(shelf, now=Clock())
        await second.poll(KEY, ws)
        assert not (await second.reconcile(KEY)).written
        assert len(shelf.writes) == writes

    asyncio.run(run())


def test_what_belonged_to_a_deleted_weightsync_is_deleted() -> None:
    async def run() -> None:
        shelf = Shelf(None)
        done = await Reconciler(shelf).reconcile(KEY)
        assert (done.resource, shelf.deleted, shelf.applied) == (None, [KEY], [])

    asyncio.run(run())


def test_a_problem_stops_the_plan_and_reaches_the_status() -> None:
    async def run() -> None:
        shelf = Shelf(weightsync())
        shelf.problems = (Problem("NameTaken", "Secret demo-keys is not ours"),)
        done = await Reconciler(shelf).reconcile(KEY)
        assert shelf.applied == []
        assert done.status is not None
        assert "Secret demo-keys is not ours" in str(done.status.conditions)

    asyncio.run(run())


def test_figures_are_written_at_most_once_an_interval_and_a_condition_at_once() -> None:
    async def run() -> None:
        ws, clock = weightsync(receivers={"replicas": 1}), Clock()
        shelf = Shelf(ws)
        reconciler = Reconciler(shelf, status_interval=2, now=clock)
        await reconciler.reconcile(KEY)
        shelf.sender = [told(ws, 1)]
        await reconciler.poll(KEY, ws)
        assert (await reconciler.reconcile(KEY)).written, "Ready turned True"
        for number in (2, 3):
            shelf.sender = [told(ws, *range(1, number + 1))]
            await reconciler.poll(KEY, ws)
            held = await reconciler.reconcile(KEY)
            if number == 3:
                continue
            # Progressing and AcksTimely say another number, and no other reason.
            assert (held.written, held.again_after) == (False, 2)
        clock.now += timedelta(seconds=2)
        assert (await reconciler.reconcile(KEY)).written
        assert [s.step for s in shelf.writes[-1].history] == [1, 2, 3]

    asyncio.run(run())


def test_a_step_that_is_reported_while_the_status_is_written_is_in_the_next_one() -> None:
    async def run() -> None:
        ws = weightsync(receivers={"replicas": 1})
        shelf = Shelf(ws)
        reconciler = Reconciler(shelf, now=Clock())
        shelf.sender = [told(ws, 1)]
        await reconciler.poll(KEY, ws)
        write = shelf.write_status

        async def slow(ws: WeightSync, status: WeightSyncStatus) -> None:
            shelf.sender = [told(ws, 1, 2)]
            await reconciler.poll(KEY, ws)
            await write(ws, status)

        shelf.write_status = slow  # type: ignore[method-assign]
        await reconciler.reconcile(KEY)
        shelf.write_status = write  # type: ignore[method-assign]
        await reconciler.reconcile(KEY)
        assert [s.step for s in shelf.writes[-1].history] == [1, 2]

    asyncio.run(run())


def test_every_step_is_told_once_and_a_new_senders_steps_too() -> None:
    async def run() -> None:
        ws = weightsync(receivers={"replicas": 1})
        shelf, seen = Shelf(ws), []
        reconciler = Reconciler(shelf, on_steps=lambda _, steps: seen.extend(s.step for s in steps))
        for report_ in (told(ws, 1, 2), told(ws, 1, 2), told(ws, 1, 2, 3), told(ws, 1, 2, session="s2")):
            shelf.sender = [report_]
            await reconciler.poll(KEY, ws)
        assert seen == [1, 2, 3, 1, 2]

    asyncio.run(run())


def test_a_window_longer_than_a_report_is_judged_from_all_reports() -> None:
    async def run() -> None:
        ws = weightsync(receivers={"replicas": 1}, memory={"window": 100, "maxReservedGrowth": "64Mi"})
        shelf = Shelf(ws)
        reconciler = Reconciler(shelf, now=Clock())
        await reconciler.reconcile(KEY)
        for number in range(1, 81):
            # 1 MiB a step: more than 64 MiB only over more steps than one report keeps.
            shelf.sender = [report(ws, [step(number, [row(1, reserved=(1000 + number) << 20)])])]
            await reconciler.poll(KEY, ws)
            await reconciler.reconcile(KEY)
        stable = [str(c.status) for c in shelf.writes[-1].conditions if c.type == "MemoryStable"]
        assert stable == ["False"]

    asyncio.run(run())


def test_following_wakes_on_news_survives_silence_and_ends_with_the_sender() -> None:
    async def run() -> None:
        ws = weightsync(receivers={"replicas": 1})
        shelf, woken = Shelf(ws), asyncio.Event()
        reconciler = Reconciler(shelf)
        task = asyncio.create_task(reconciler.follow(KEY, ws, woken.set, poll=0.01, max_retry=0.01))
        shelf.sender = [told(ws, 1)]
        await asyncio.wait_for(woken.wait(), 120)
        woken.clear()
        shelf.sender = [told(ws, 1, 2).model_copy(update={"finished": True})]
        await asyncio.wait_for(task, 120)
        assert woken.is_set()

    asyncio.run(run())
