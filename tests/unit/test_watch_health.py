"""A watch counts as heard while events or bookmarks come, and as deaf once neither does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import kopf
import pytest
from aiohttp import web
from weightsync_operator import watch_session
from weightsync_operator.health import WatchHealth
from weightsync_operator.kube_api import KubeApi
from weightsync_operator.readers import WatchedReader
from weightsync_operator.watch_session import Heard, session_for

BOOKMARK = b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"1"}}}\n'
PODS = "/api/v1/pods"
OURS = "/api/v1/namespaces/ours/pods"


class ApiServer:
    """Answers watches with a bookmark each time it is told to."""

    def __init__(self) -> None:
        self.url = ""
        self._bookmarks: asyncio.Queue[bytes] = asyncio.Queue()

    def tell(self) -> None:
        self._bookmarks.put_nowait(BOOKMARK)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(await self._bookmarks.get())


@asynccontextmanager
async def watching(
    path: str, query: str = "watch=true"
) -> AsyncIterator[tuple[ApiServer, Heard, asyncio.Queue[bytes]]]:
    """A watch that goes on, as Kopf reads one."""
    server, heard, seen = ApiServer(), Heard(), asyncio.Queue[bytes]()
    app = web.Application()
    app.router.add_get("/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = cast(Any, site)._server.sockets[0].getsockname()[1]
    made = session_for(kopf.ConnectionInfo(server=f"http://127.0.0.1:{port}"), heard)
    session = made.aiohttp_session

    async def read() -> None:
        async with session.get(f"{made.server}{path}?{query}") as response:
            async for piece in response.content.iter_chunked(1 << 20):
                seen.put_nowait(piece)

    task = asyncio.create_task(read())
    try:
        yield server, heard, seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await session.close()
        await runner.cleanup()


def health(heard: Heard, silent: float) -> WatchHealth:
    return WatchHealth(cast(KubeApi, None), WatchedReader(), (), heard, silent)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work()

    asyncio.run(bounded())


def test_bookmarks_alone_keep_it_healthy_and_their_end_is_told() -> None:
    async def work() -> None:
        async with watching(PODS) as (server, heard, seen):
            server.tell()
            assert await seen.get() == BOOKMARK
            await asyncio.sleep(0.3)
            assert health(heard, 0.2).deaf.startswith(f"no event and no bookmark of {PODS} for")
            server.tell()
            await seen.get()
            assert health(heard, 60).deaf == ""

    run(work)


def test_a_bookmark_makes_it_healthy_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(watch_session, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def work() -> None:
        async with watching(PODS) as (server, heard, seen):
            server.tell()
            await seen.get()
            clock[0] += 300
            assert heard.longest() == (PODS, 300)
            server.tell()
            await seen.get()
            assert heard.longest() == (PODS, 0)

    run(work)


def test_lists_are_no_watches() -> None:
    async def work() -> None:
        async with watching(PODS, "limit=500") as (server, heard, seen):
            server.tell()
            await seen.get()
            assert heard.longest() == ("", 0.0)
            assert health(heard, 0.0).deaf == ""

    run(work)


def test_a_namespace_that_may_not_be_read_any_more_makes_no_alarm() -> None:
    heard = Heard()
    heard.note(OURS)
    heard.note("/api/v1/namespaces/theirs/pods")
    assert heard.longest()[0] == OURS
    assert heard.longest({"ours"})[0] == "/api/v1/namespaces/theirs/pods"
    assert heard.longest({"ours", "theirs"}) == ("", 0.0)


def test_the_session_reads_as_kopf_does() -> None:
    """Kopf's own function for watches takes whole lines from it."""
    from kopf._cogs.clients.api import iter_jsonlines

    async def work() -> None:
        server = ApiServer()
        app = web.Application()

        async def two(request: web.Request) -> web.Response:
            return web.Response(body=BOOKMARK + BOOKMARK)

        app.router.add_get(PODS, two)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{cast(Any, site)._server.sockets[0].getsockname()[1]}"
        made = session_for(kopf.ConnectionInfo(server=server.url), Heard())
        async with made.aiohttp_session as session, session.get(f"{server.url}{PODS}?watch=true") as response:
            content = cast(aiohttp.StreamReader, response.content)
            assert [line async for line in iter_jsonlines(content)] == [BOOKMARK.strip()] * 2
        await runner.cleanup()

    run(work)
