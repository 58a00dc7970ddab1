"""An agent's HTTP: /healthz, /readyz, /report and /metrics, served by a thread of its own.

Everything is answered from what the agent has published: a request never waits for a step, nor a step for a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import socket
import stat
import threading
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

from aiohttp import web
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel
from weightsync_api.reports import AgentReport, Report

from .deadline import Deadline
from .errors import ConfigError
from .metrics import AgentMetrics, unready
from .parent import bound
from .siblings import MAX_SIBLINGS, unready_sibling

log = logging.getLogger("weightsync.http")

LONG_POLL_SECONDS = 60.0
"""Longest wait of `/report`; a request may ask for less."""
TICK_SECONDS = 0.1
"""How often a waiting `/report` looks whether an agent's state changed. A sender's step wakes it at once."""
WATCH_PAUSE_SECONDS = 0.02
"""Steps that end closer together than this are taken in together, so that short ones aren't slowed by their telling."""
MAX_BODY_BYTES = 1024
"""Nothing that is served reads a body."""
MAX_POLLS = 64
"""Requests that may wait in `/report` at a time."""
START_SECONDS = 5.0
CLOSE_SECONDS = 10.0
"""It takes half a second at most where the machine does not stall, and the address is free after it."""
LINGER_SECONDS = 2.0
RUNNER_SECONDS = 15.0
"""The same where a local run reads: it always does, but its machine may stall, and what it has not read by the end it
takes for steps that never were."""
READER_SECONDS = 2 * LONG_POLL_SECONDS
"""A reader that has not asked for this long is gone, and not waited for at the end."""
MAX_SOCKET_PATH = 107
"""Bytes of a Unix socket's path: sockaddr_un(7)."""
MAX_STEP = 2**63 - 1


class Served(Protocol):
    """What is served: a Receiver, or with `wait_report` a Sender. Both are safe to read from any thread."""

    @property
    def errors(self) -> Counter[str]: ...

    def report(self) -> Report:
        """The agent itself first in `agents`."""
        ...


@runtime_checkable
class ServedSender(Protocol):
    def wait_report(self, after: int, timeout: float) -> Report: ...


class Readiness(BaseModel):
    """The body of /readyz."""

    ready: bool
    reason: str = ""
    step: int


class AgentServer:
    """Serves one agent at one address until `close`, or until the process ends.

    Args:
        agent: what to serve.
        address: `HOST:PORT` (port 0: a free one), or `unix:DIR` for DIR/rank-N.http.
        rank: the agent's rank, for the socket's name.

    Raises:
        ConfigError: the address can't be parsed, or is in use.
    """

    def __init__(self, agent: Served, address: str, rank: int) -> None:
        self.agent = agent
        self.metrics = AgentMetrics(agent.report, agent.errors)
        self._path: Path | None = None
        self._socket = self._listen(address, rank)
        self._runner: web.AppRunner | None = None
        _servers.add(self)
        self._loop = asyncio.new_event_loop()
        self._stepped = asyncio.Event()
        self._pid = os.getpid()
        self._polls = 0
        self._asked_at = float("-inf")
        self._told_end = threading.Event()
        self._closing = threading.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weightsync-http", daemon=True)
        self._thread.start()
        self._started.wait(START_SECONDS)
        if isinstance(agent, ServedSender):
            threading.Thread(target=self._watch, args=(agent,), name="weightsync-http-watch", daemon=True).start()

    @property
    def address(self) -> str:
        """Where it listens: `HOST:PORT`, or the path of the socket."""
        if self._path is not None:
            return str(self._path)
        host, port = self._socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def linger(self, seconds: float | None = None) -> None:
        """Waits up to `seconds` until the reader of `/report` has got the last one; at once where nobody reads.

        A local run always reads, but steps may be over before it has asked for the first time.
        """
        if os.getpid() != self._pid:
            return
        if self.agent.report().finished and (bound() or time.monotonic() - self._asked_at < READER_SECONDS):
            self._told_end.wait(seconds or (RUNNER_SECONDS if bound() else LINGER_SECONDS))

    def close(self) -> None:
        """Stops serving and takes the socket's file away. Idempotent.

        In a process that was forked from the server's it does nothing: thread and file are the parent's.
        """
        if self._closing.is_set() or os.getpid() != self._pid:
            return
        self._closing.set()
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def let_go(self) -> None:
        """In a forked child: the port, and who is connected, would wait for it beyond the server's own end.

        Nothing of the event loop is touched: its epoll instance is the parent's too.
        """
        self._socket.close()
        connections = self._runner.server.connections if self._runner and self._runner.server else []
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for connection in connections:
            if connection.transport is not None:
                # Not closed: the transport still has the number, which could be another file's by then.
                with contextlib.suppress(OSError):
                    os.dup2(null, connection.transport.get_extra_info("socket").fileno(), inheritable=False)
        os.close(null)

    # --- the address --------------------------------------------------------------------------------------------

    def _listen(self, address: str, rank: int) -> socket.socket:
        if address.startswith("unix:"):
            self._path = Path(address.removeprefix("unix:")) / f"rank-{rank}.http"
            return _listen_unix(self._path)
        return _listen_tcp(address)

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
        app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/report", self._report),
                web.get("/metrics", self._metrics),
            ]
        )
        self._runner = runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.5)
        try:
            self._loop.run_until_complete(runner.setup())
            self._loop.run_until_complete(web.SockSite(runner, self._socket).start())
            self._started.set()
            self._loop.run_forever()
        finally:
            self._started.set()
            with contextlib.suppress(Exception):
                self._loop.run_until_complete(runner.cleanup())
            self._loop.close()

    def _watch(self, sender: ServedSender) -> None:
        """Counts each step soon after it ended, and wakes who waits for it."""
        seen = 0
        while not self._closing.is_set():
            report = sender.wait_report(seen, 1.0)
            self.metrics.observe(report)
            seen = max([seen, *(step.step for step in report.steps)])
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._wake)
            if report.finished:
                return
            time.sleep(WATCH_PAUSE_SECONDS)

    def _wake(self) -> None:
        self._stepped.set()
        self._stepped = asyncio.Event()

    # --- the answers --------------------------------------------------------------------------------------------

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        me = self._me(self.agent.report())
        reason = unready(me)
        others = min(_whole_number(request, "agents", 1), MAX_SIBLINGS + 1) - 1
        if not reason and others > 0 and self._path is None:
            port = self._socket.getsockname()[1]
            host = "::1" if self._socket.family == socket.AF_INET6 else "127.0.0.1"
            reason = await unready_sibling(host, range(port + 1, port + 1 + others))
        answer = Readiness(ready=not reason, reason=reason, step=me.step)
        return _json(answer.model_dump_json(), 503 if reason else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        self.metrics.observe(self.agent.report())
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self.metrics), headers={"Content-Type": content_type})

    async def _report(self, request: web.Request) -> web.Response:
        after = _whole_number(request, "after", 0)
        seconds = min(_seconds(request, "timeout", LONG_POLL_SECONDS), LONG_POLL_SECONDS)
        if self._polls >= MAX_POLLS:
            raise web.HTTPTooManyRequests(text=f"{MAX_POLLS} requests wait for a report already: ask again later")
        self._asked_at = time.monotonic()
        first = _states(self.agent.report())
        self._polls += 1
        try:
            report = await self._news(after, first, Deadline(seconds))
        finally:
            self._polls -= 1
        self._asked_at = time.monotonic()
        body = report.model_copy(update={"steps": [step for step in report.steps if step.step > after]})
        response = _json(body.model_dump_json(by_alias=True), 200)
        if report.finished:
            # Prepared and written here, so that it is known to be out before the process may end.
            await response.prepare(request)
            await response.write_eof()
            self._told_end.set()
        return response

    async def _news(self, after: int, first: list[tuple[int, str, str]], deadline: Deadline) -> Report:
        """The report once it has a step above `after`, its agents' states differ from `first`, or at the deadline."""
        while True:
            stepped, report = self._stepped, self.agent.report()
            newest = report.steps[-1].step if report.steps else self._me(report).step if report.agents else 0
            if newest > after or report.finished or deadline.passed or _states(report) != first:
                return report
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stepped.wait(), min(TICK_SECONDS, max(deadline.remaining, 0.001)))

    @staticmethod
    def _me(report: Report) -> AgentReport:
        return report.agents[0] if report.agents else AgentReport(rank=0)


_servers: weakref.WeakSet[AgentServer] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for server in list(_servers):
        server.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)


def _states(report: Report) -> list[tuple[int, str, str]]:
    return [(agent.rank, agent.state, agent.message) for agent in report.agents]


def _json(body: str, status: int) -> web.Response:
    return web.Response(text=body, status=status, content_type="application/json")


def _whole_number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,19}", text) or int(text) > MAX_STEP:
        raise web.HTTPBadRequest(text=f"{name} is {text[:64]!r}: write the number of a step, such as {name}=12")
    return int(text)


def _seconds(request: web.Request, name: str, default: float) -> float:
    text = request.query.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,9})?", text):
        raise web.HTTPBadRequest(text=f"{name} is {text[:64]!r}: write seconds, such as {name}=10")
    return float(text)


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPNotFound:
        raise web.HTTPNotFound(text="there are /healthz, /readyz, /report?after=STEP and /metrics\n") from None
    except web.HTTPException:
        raise
    except Exception:
        log.exception("GET %s failed", request.path)
        raise web.HTTPInternalServerError(text="the agent could not answer; its log says why\n") from None


# --- listening ------------------------------------------------------------------------------------------------------


def _listen_tcp(address: str) -> socket.socket:
    match = re.fullmatch(r"(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<host>[^\[\]:]*)):(?P<port>[0-9]{1,5})", address)
    if match is None or int(match["port"]) > 65535:
        raise ConfigError(f"http is {address!r}: write HOST:PORT, such as 0.0.0.0:8080, or unix:DIRECTORY")
    host, port = match["six"] or match["host"] or "0.0.0.0", int(match["port"])
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise _taken(f"{host}:{port}", error, "another agent of this pod, or the trainer itself") from None
    return listener


def _listen_unix(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"the socket path {path} is longer than {MAX_SOCKET_PATH} bytes: choose a shorter runtime directory"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path)
        listener.bind(str(path))
        path.chmod(stat.S_IRUSR | stat.S_IWUSR)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise _taken(str(path), error, "another agent of the same rank") from None
    return listener


def _remove_stale(path: Path) -> None:
    """Takes away the socket of an agent that was killed; one that still answers stays, and raises EADDRINUSE."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _taken(where: str, error: OSError, by: str) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"the agent's HTTP address {where} is in use, perhaps by {by}: end that or change the address"
        )
    return ConfigError(f"the agent can't listen at {where}: {error.strerror or error}")
