"""An agent's answer is bounded, validated and refused in words; nothing that it says stops the operator."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from operator_samples import report, row, step, weightsync
from weightsync_api.reports import AgentState
from weightsync_operator import reports_client
from weightsync_operator.platform import ReportRefusedError
from weightsync_operator.reports_client import ReportsClient, ReportUnavailableError

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stalls for a client's usual patience makes no answer of another kind."""
    monkeypatch.setattr(reports_client, "ANSWER_SECONDS", 120.0)
    monkeypatch.setattr(reports_client, "CONNECT_SECONDS", 120.0)


async def ask(answer: Answer | None, after: int = 0, wait: float = 1, receivers: int = 8) -> object:
    """What the client makes of an agent's answer, over a real Unix socket; None: nobody listens."""
    with tempfile.TemporaryDirectory(prefix="ws-") as folder:
        path = Path(folder) / "rank-0.http"
        app = web.Application()
        if answer is not None:
            app.router.add_get("/report", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        if answer is not None:
            await web.UnixSite(runner, str(path)).start()
        try:
            async with ReportsClient(path) as client:
                return await client.fetch(after, wait, receivers=receivers)
        finally:
            await runner.cleanup()


def test_a_report_comes_over_a_unix_socket_and_after_and_timeout_go_with_the_question() -> None:
    told = report(weightsync(), [step(5, [row(1)])])
    asked: dict[str, str] = {}

    async def answer(request: web.Request) -> web.Response:
        asked.update(request.query)
        return web.Response(text=told.model_dump_json(by_alias=True))

    assert asyncio.run(ask(answer, after=4, wait=2.5)) == told
    assert asked == {"after": "4", "timeout": "2.5"}


def test_a_newer_agents_unknown_fields_are_passed_over() -> None:
    told = report(weightsync(), [])

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(json.loads(told.model_dump_json(by_alias=True)) | {"invented": {"later": 1}})

    assert asyncio.run(ask(answer)) == told


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"not json", 200, "answered no report"),
        (b'{"namespace": "x", "session": "s"}', 200, "name"),
        (b"[]", 200, "answered no report"),
        (b"\xff\xfe", 500, "500"),
        (b'{"namespace": "x", "name": "y", "session": "s", "agents": [{"rank": 36893488147419103232}]}', 200, "rank"),
        (b'{"namespace": "x", "name": "y", "session": "s", "agents": ' + b"[" * 100_000, 200, "answered no report"),
        (
            b'{"namespace": "x", "name": "y", "session": "s", "agents": [' + b'{"rank":1},' * 1025 + b"{}]}",
            200,
            "agents",
        ),
    ],
)
def test_what_is_no_report_is_refused_in_words(body: bytes, status: int, says: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body, status=status)

    with pytest.raises(ReportRefusedError, match=says):
        asyncio.run(ask(answer))


def test_a_busy_agent_is_no_liar() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=b"busy", status=503)

    with pytest.raises(ReportUnavailableError, match="503: busy"):
        asyncio.run(ask(answer))


def test_more_objects_than_the_receivers_can_fill_are_not_read() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=b'{"x": [' + b"{}," * 5000 + b"{}]}")

    with pytest.raises(ReportRefusedError, match="more than a report of 7 receivers can have"):
        asyncio.run(ask(answer, receivers=7))


def test_the_largest_honest_report_is_read() -> None:
    ws = weightsync(receivers={"replicas": 7})
    rows = [row(rank, state=AgentState.LOST, error="x" * 900) for rank in range(1, 8)]
    largest = report(ws, [step(number, rows) for number in range(1, 65)])

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=largest.model_dump_json(by_alias=True))

    assert asyncio.run(ask(answer, receivers=7)) == largest


def test_a_report_without_end_is_cut_off() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"[" * (1 << 16))

    with pytest.raises(ReportRefusedError, match="more than 1572864 bytes"):
        asyncio.run(ask(answer, receivers=7))


def test_a_silent_agent_is_given_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports_client, "ANSWER_SECONDS", 0.2)

    async def answer(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError("not reached")

    with pytest.raises(ReportUnavailableError, match="did not answer within"):
        asyncio.run(ask(answer, wait=0))


def test_no_socket_is_no_report() -> None:
    with pytest.raises(ReportUnavailableError, match="does not answer"):
        asyncio.run(ask(None))
