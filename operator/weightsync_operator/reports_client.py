"""Reads agents' reports over HTTP: `GET /report?after=STEP`, a long poll, over TCP or a Unix socket.

An answer is somebody else's bytes: bounded in size, validated, and refused when it is about another WeightSync.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
from pydantic import ValidationError
from weightsync_api.reports import Report

MAX_REPORT_BYTES = 64 << 20
"""64 steps of 1,024 receivers are some 20 MB of JSON."""

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 5.0
"""How much longer than the long poll itself an answer may take."""


class ReportUnavailableError(Exception):
    """No usable report: nobody answers, or what came is none. The text says which, and from where."""


class ReportsClient:
    """One HTTP session, kept for many polls. Use as an asynchronous context manager.

    Args:
        socket: path of the Unix socket to connect; None: TCP, to the host in each URL.
    """

    def __init__(self, socket: Path | None = None) -> None:
        connector = aiohttp.UnixConnector(path=str(socket)) if socket else aiohttp.TCPConnector(limit=0)  # a poll each
        self._where = str(socket) if socket else ""
        self._session = aiohttp.ClientSession(connector=connector)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    async def fetch(self, after: int, wait: float, base: str = "http://unix") -> Report:
        """The report of steps above `after`, waited for up to `wait` seconds. Raises ReportUnavailableError."""
        where = self._where or base
        limit = aiohttp.ClientTimeout(total=wait + ANSWER_SECONDS, connect=CONNECT_SECONDS)
        query = {"after": str(after), "timeout": f"{wait:g}"}
        try:
            async with self._session.get(
                f"{base}/report", params=query, timeout=limit, allow_redirects=False
            ) as response:
                body = await _bounded(response)
        except TimeoutError:  # first: aiohttp's are ClientErrors too
            raise ReportUnavailableError(f"{where} did not answer within {limit.total:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ReportUnavailableError(f"{where} does not answer: {error or type(error).__name__}") from None
        if response.status != 200:
            raise ReportUnavailableError(f"{where} answered {response.status}: {body[:200].decode(errors='replace')}")
        try:
            return await asyncio.to_thread(Report.model_validate_json, body) if len(body) > 1 << 20 else _parse(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            raise ReportUnavailableError(f"{where} answered no report: {field or 'body'}: {first['msg']}") from None


def _parse(body: bytes) -> Report:
    return Report.model_validate_json(body)


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    chunks = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        chunks += chunk
        if len(chunks) > MAX_REPORT_BYTES:
            raise aiohttp.ClientError(f"the report is larger than {MAX_REPORT_BYTES} bytes")
    return bytes(chunks)
