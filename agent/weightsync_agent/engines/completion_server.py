"""The HTTP of an engine: POST /v1/completions, GET /v1/models, /healthz and /readyz, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Protocol

from aiohttp import web
from pydantic import BaseModel, ValidationError

from ..errors import ConfigError
from .completions import Completion, CompletionRequest, Refusal

log = logging.getLogger("weightsync.engine")

MAX_BODY_BYTES = 8 << 20
START_SECONDS = 5.0


class Health(BaseModel):
    """The body of /healthz and /readyz."""

    alive: bool = True
    ready: bool
    reason: str = ""
    step: int
    state: str
    model: str
    queued: int = 0


class Served(Protocol):
    """What is served. Both are called from the server's thread."""

    def submit(self, request: CompletionRequest) -> Future[Completion]: ...

    def health(self) -> Health: ...


class CompletionServer:
    """Listens until `close`. Raises ConfigError where the address can't be had."""

    def __init__(self, engine: Served, host: str, port: int) -> None:
        self._engine = engine
        self._socket = _listen(host, port)
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weightsync-completions", daemon=True)
        self._thread.start()
        self._started.wait(START_SECONDS)

    @property
    def address(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        """Idempotent."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=2)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(middlewares=[_errors], client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.SockSite(runner, self._socket).start())
        self._started.set()
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(runner.cleanup())
            self._loop.close()

    async def _completions(self, request: web.Request) -> web.Response:
        try:
            asked = CompletionRequest.model_validate_json(await request.read())
        except ValidationError as error:
            raise Refusal(400, "invalid_request_error", _told(error)) from None
        future = self._engine.submit(asked)
        # A client that leaves cancels what it asked for, unless it runs already.
        done = await asyncio.wrap_future(future)
        return web.Response(text=done.model_dump_json(exclude_none=True), content_type="application/json")

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._engine.health().model, "object": "model"}]})

    async def _healthz(self, _: web.Request) -> web.Response:
        health = self._engine.health()
        return _json(health, 200 if health.alive else 503)

    async def _readyz(self, _: web.Request) -> web.Response:
        health = self._engine.health()
        return _json(health, 200 if health.alive and health.ready else 503)


def _json(body: BaseModel, status: int) -> web.Response:
    return web.Response(text=body.model_dump_json(), status=status, content_type="application/json")


def _told(error: ValidationError) -> str:
    """Every fault, by field, in one line; the union of prompts tells only that it fits none."""
    faults: dict[str, str] = {}
    for fault in error.errors(include_url=False, include_input=False):
        field = str(fault["loc"][0]) if fault["loc"] else "body"
        text = "must be a text, token ids, or a list of either" if field == "prompt" else fault["msg"]
        text = "is not known here" if fault["type"] == "extra_forbidden" else text
        faults.setdefault(field, text if fault["type"] != "missing" else "is required")
    return "; ".join(f"{field}: {text}" for field, text in list(faults.items())[:10])


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refusal as refusal:
        return _error(refusal.status, refusal.kind, str(refusal))
    except web.HTTPException as error:
        return _error(error.status, "invalid_request_error", error.text or error.reason)
    except Exception as error:
        log.error("%s %s failed: %s", request.method, request.path, error)
        return _error(500, "internal_error", f"the model could not answer: {type(error).__name__}: {error}")


def _error(status: int, kind: str, message: str) -> web.Response:
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    return web.json_response({"error": {"message": message, "type": kind}}, status=status, headers=headers)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        raise ConfigError(f"the engine can't listen at {host}:{port}: {error.strerror or error}") from None
    return listener
