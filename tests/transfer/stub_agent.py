"""An agent's process without torch, for tests of the runner: a sender that reports steps, or a receiver that waits.

A user's container as far as `weightsync run` can tell. Its behaviour is in STUB, JSON:
  interval   seconds between a sender's steps
  crash_at   the sender exits with 7 after this step; once, or each time with `always`
  crashes    a receiver exits with 7 at its start, so many times
  last_exit  a receiver's exit code once the sender has finished
  stubborn   ignores SIGTERM
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

from aiohttp import web
from weightsync_api.agent_config import AgentConfig
from weightsync_api.reports import AgentReport, AgentState, MemorySample, ReceiverStep, Report, StepReport

STUB = json.loads(os.environ.get("STUB", "{}"))
CONFIG = AgentConfig.model_validate_json(Path(os.environ["WEIGHTSYNC_CONFIG"]).read_bytes())
RANK = int(os.environ["WEIGHTSYNC_RANK"])
RUNTIME = Path(CONFIG.runtime_dir)
FINISHED = RUNTIME / "finished"
MEMORY = MemorySample(reserved_before=1 << 30, reserved_after=1 << 30, allocated_after=1 << 20, peak=1 << 30)


def times(name: str) -> int:
    """How often this was asked in this run of the WeightSync, this time included."""
    path = RUNTIME / f"{name}-{RANK}"
    with path.open("a") as file:
        file.write("x")
    return path.stat().st_size


class Sender:
    def __init__(self) -> None:
        self.steps: list[StepReport] = []
        self.finished = False
        self.news = asyncio.Event()
        self.told = asyncio.Event()
        self.session = f"s{os.getpid()}"
        path = RUNTIME / "step"
        self.step = int(path.read_text()) if path.exists() else 0

    def report(self, after: int) -> Report:
        states = {0: AgentState.SYNCED} | dict.fromkeys(range(1, CONFIG.receivers + 1), AgentState.SYNCED)
        agents = [
            AgentReport(
                rank=rank, pod=os.environ["WEIGHTSYNC_POD"], pid=rank + 1, state=state, step=self.step, memory=MEMORY
            )
            for rank, state in states.items()
        ]
        return Report(
            namespace=CONFIG.namespace,
            name=CONFIG.name,
            session=self.session,
            transport=CONFIG.transport,
            mode="Packed",
            route="SharedMemory",
            agents=agents,
            steps=[step for step in self.steps if step.step > after],
            finished=self.finished,
        )

    async def answer(self, request: web.Request) -> web.StreamResponse:
        after, until = int(request.query["after"]), time.monotonic() + float(request.query["timeout"])
        while not self.finished and not self.report(after).steps and time.monotonic() < until:
            self.news.clear()
            try:
                await asyncio.wait_for(self.news.wait(), max(0.01, until - time.monotonic()))
            except TimeoutError:
                break
        told = self.report(after)
        response = web.Response(text=told.model_dump_json(by_alias=True))
        await response.prepare(request)
        await response.write_eof()
        if told.finished:
            self.told.set()
        return response

    def do_step(self) -> None:
        self.step += 1
        (RUNTIME / "step").write_text(str(self.step))
        rows = [
            ReceiverStep(rank=rank, state=AgentState.SYNCED, ack_microseconds=500, memory=MEMORY, verified=True)
            for rank in range(1, CONFIG.receivers + 1)
        ]
        self.steps.append(
            StepReport(
                step=self.step,
                started_at=datetime.now(UTC),
                duration_microseconds=10_000,
                bytes=10_000_000,
                memory=MEMORY,
                receivers=rows,
                verified=self.step == 1,
                complete=True,
            )
        )
        self.news.set()

    async def run(self) -> None:
        app = web.Application()
        app.router.add_get("/report", self.answer)
        runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.2)
        await runner.setup()
        socket = RUNTIME / "rank-0.http"
        socket.unlink(missing_ok=True)
        await web.UnixSite(runner, str(socket)).start()
        while not CONFIG.steps.count or self.step < CONFIG.steps.count:
            self.do_step()
            if self.step == STUB.get("crash_at") and (STUB.get("always") or times("crash") == 1):
                print("the trainer lost its nerve", file=sys.stderr, flush=True)
                os._exit(7)
            await asyncio.sleep(STUB.get("interval", 0.02))
        self.finished = True
        self.news.set()
        await asyncio.wait_for(self.told.wait(), 300)
        await runner.cleanup()
        socket.unlink(missing_ok=True)
        FINISHED.touch()


def receive() -> None:
    if times("start") <= STUB.get("crashes", 0):
        print("the engine has no weights to start from", file=sys.stderr, flush=True)
        sys.exit(7)
    while not FINISHED.exists():
        time.sleep(0.02)
    print("the engine is done", flush=True)
    sys.exit(STUB.get("last_exit", 0))


def watch_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(143)


def main() -> None:
    if STUB.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.environ.get("WEIGHTSYNC_EXIT_ON_STDIN_EOF") == "1":
        threading.Thread(target=watch_stdin, daemon=True).start()
    print(f"pid {os.getpid()}", flush=True)
    print("a word on stderr", file=sys.stderr, flush=True)
    if RANK:
        receive()
    else:
        asyncio.run(Sender().run())


if __name__ == "__main__":
    main()
