"""The senders of operator_scale.py's WeightSyncs: one process, and an address of loopback for each.

With tests/cluster on the path.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime

from aiohttp import web
from operator_process import MEMORY
from weightsync_api.reports import AgentReport, AgentState, ReceiverStep, Report, StepReport
from weightsync_operator.plan import HTTP_PORT

NAMESPACE = "scale"


def name_of(number: int) -> str:
    return f"ws-{number:04d}"


def address_of(number: int) -> str:
    return f"127.9.{number // 250}.{number % 250 + 1}"


class Senders:
    """Answers `/report` for every sender, by the address that was asked."""

    def __init__(self, count: int, receivers: int) -> None:
        self.receivers = receivers
        self.steps: list[list[StepReport]] = [[] for _ in range(count)]
        self.news = [asyncio.Event() for _ in range(count)]
        self.answers = 0

    def step(self, number: int) -> None:
        row = [
            ReceiverStep(rank=rank, state=AgentState.SYNCED, ack_microseconds=800, memory=MEMORY)
            for rank in range(1, self.receivers + 1)
        ]
        steps = self.steps[number]
        steps.append(
            StepReport(
                step=steps[-1].step + 1 if steps else 1,
                started_at=datetime.datetime.now(datetime.UTC),
                duration_microseconds=23_100,
                bytes=8_044_936_192,
                memory=MEMORY,
                receivers=row,
                complete=True,
            )
        )
        del steps[:-64]
        self.news[number].set()

    def last(self, number: int) -> int:
        return self.steps[number][-1].step if self.steps[number] else 0

    async def answer(self, request: web.Request) -> web.Response:
        host = request.transport.get_extra_info("sockname")[0]  # type: ignore[union-attr]
        _, _, block, last = map(int, host.split("."))
        number, after = block * 250 + last - 1, int(request.query["after"])
        if self.last(number) <= after:
            self.news[number].clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.news[number].wait(), float(request.query["timeout"]))
        done = self.last(number)
        state = AgentState.SYNCED if done else AgentState.JOINED
        report = Report(
            namespace=NAMESPACE,
            name=name_of(number),
            session="s1",
            transport="NCCL",
            mode="Packed",
            route="P2P/CUMEM",
            agents=[AgentReport(rank=r, state=state, step=done, memory=MEMORY) for r in range(self.receivers + 1)],
            steps=[step for step in self.steps[number] if step.step > after],
        )
        self.answers += 1
        return web.Response(text=report.model_dump_json(by_alias=True), content_type="application/json")

    async def serve(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/report", self.answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await runner.setup()
        for number in range(len(self.steps)):
            await web.TCPSite(runner, address_of(number), HTTP_PORT).start()
        return runner
