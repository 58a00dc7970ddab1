"""Keeps what vLLM's server offers in development mode to this pod: `--middleware` of a server that is followed.

VLLM_SERVER_DEV_MODE opens routes that change the engine (weights, pause, sleep, any method of its workers) at the port
at which it serves. From elsewhere this lets through what the server is there for, and answers 403 to all else.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

GUARD = "weightsync_agent.engines.vllm_guard.LocalOnly"
GUARD_PATH = "/weightsync"
"""Answered by the guard itself, so that it can be told whether there is one."""

LOCAL = ("127.0.0.1", "::1")
PUBLIC = frozenset(
    (
        *("/health", "/ping", "/version", "/metrics", "/load", "/tokenize", "/detokenize"),
        *("/pooling", "/classify", "/score", "/rerank", "/invocations"),
    )
)
PUBLIC_PARTS = ("/v1/", "/v2/", "/cohere/", "/inference/")
"""Generation, embeddings and the like, as of vLLM 0.32."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class LocalOnly:
    """ASGI middleware (https://asgi.readthedocs.io/en/latest/specs/www.html)."""

    def __init__(self, app: App) -> None:
        self._app = app
        logging.getLogger("uvicorn.access").addFilter(_is_news)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        local = scope["type"] == "lifespan" or _is_local(scope)
        if scope["type"] == "http" and not (local or _is_public(scope)):
            text = b"this route is for processes of this pod alone\n"
            await _answer(send, 403, text)
        elif scope["type"] == "http" and scope["path"] == GUARD_PATH:
            await _answer(send, 200, b"")
        elif local or _is_public(scope):
            await self._app(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})


def _is_news(record: logging.LogRecord) -> bool:
    """Not the follower's calls that went well: a line each second, in which a user's requests can't be found."""
    match record.args:
        case (_, _, "/collective_rpc", _, 200):
            return False
    return True


def _is_local(scope: Scope) -> bool:
    """From one of two addresses, not from all of the loopback's: Istio's proxy, in the pod, brings what comes from
    elsewhere from 127.0.0.6 (the source of its cluster inbound_passthrough).
    """
    client = scope.get("client")
    return client is not None and client[0].removeprefix("::ffff:") in LOCAL


def _is_public(scope: Scope) -> bool:
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return path in PUBLIC or path.startswith(PUBLIC_PARTS)


async def _answer(send: Send, status: int, text: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": text})
