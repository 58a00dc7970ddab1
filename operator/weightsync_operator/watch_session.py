"""The HTTP session of Kopf's watches, which notes when each of them was heard of last.

Kopf tells its handlers of changes, and keeps to itself the bookmarks by which the API server says once a minute that
nothing changed. Where neither comes, a watch is deaf: a connection that a load balancer forgot makes no error.
https://kubernetes.io/docs/reference/using-api/api-concepts/#watch-bookmarks
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Collection
from typing import Any

import aiohttp
import kopf


class Heard:
    """When each watch was heard of last, by the path that it watches."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}

    def note(self, path: str) -> None:
        self._at[path] = time.monotonic()

    def longest(self, but: Collection[str] = ()) -> tuple[str, float]:
        """The watch that has been silent for longest, and for how many seconds; ("", 0.0) where none has begun.

        `but`: namespaces that don't count.
        """
        counted = [
            (path, at) for path, at in self._at.items() if not any(f"/namespaces/{name}/" in path for name in but)
        ]
        path, at = min(counted, key=lambda item: item[1], default=("", 0.0))
        return path, time.monotonic() - at if path else 0.0


def session_for(info: kopf.ConnectionInfo, heard: Heard) -> kopf.AiohttpSession:
    """A session like the one that Kopf makes of a login."""

    class Response(aiohttp.ClientResponse):
        async def start(self, connection: Any) -> aiohttp.ClientResponse:
            await super().start(connection)
            if self.url.query.get("watch") == "true" and self.status == 200:
                heard.note(self.url.path)
                self.content = _Noted(self.content, heard, self.url.path)  # type: ignore[assignment]
            return self

    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
        headers=info.as_http_headers(),
        proxy=info.proxy_url,
        trust_env=info.trust_env,
        response_class=Response,
    )
    return kopf.AiohttpSession(
        server=info.server,
        priority=info.priority,
        expiration=info.expiration,
        default_namespace=info.default_namespace,
        aiohttp_session=session,
    )


class _Noted:
    """A response's content, of which each piece is noted as it is read."""

    def __init__(self, content: aiohttp.StreamReader, heard: Heard, path: str) -> None:
        self._content = content
        self._heard = heard
        self._path = path

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        async for piece in self._content.iter_chunked(size):
            self._heard.note(self._path)
            yield piece

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)
