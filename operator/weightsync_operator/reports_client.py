"""Reads agents' reports over HTTP: `GET /report?after=STEP`, a long poll, over TCP or a Unix socket.

An answer is somebody else's bytes: bounded in size, validated, and refused when it is about another WeightSync.
"""

from __future__ import annotations

import asyncio
import socket as socket_module
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
from pydantic import ValidationError
from weightsync_api.reports import MAX_AGENTS, MAX_STEPS, Report

from .platform import ReportRefusedError

BASE_BYTES, ROW_BYTES = 1 << 20, 1024
"""Of a report, and of each agent's part of a step in it, which is some 300 bytes of JSON."""
MAX_REPORT_BYTES = 32 << 20
"""64 steps of 1,024 receivers are some 20 MB of JSON."""
BASE_OBJECTS = 1000
_BUSY = (429, 502, 503, 504)

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 5.0
"""How much longer than the long poll itself an answer may take."""


class ReportUnavailableError(Exception):
    """No report: nobody answers. The text says where, and why."""


def max_bytes(receivers: int) -> int:
    """Of the report of a sender with so many receivers."""
    return min(BASE_BYTES + (receivers + 1) * MAX_STEPS * ROW_BYTES, MAX_REPORT_BYTES)


def max_objects(receivers: int) -> int:
    """JSON objects of such a report, twice as many as there can be: each becomes some 500 bytes here, and messages may
    hold braces too."""
    return BASE_OBJECTS + 2 * (MAX_STEPS * (2 + 2 * receivers) + 2 * (receivers + 1))


class ReportsClient:
    """One HTTP session, kept for many polls. Use as an asynchronous context manager.

    Args:
        socket: path of the Unix socket to connect; None: TCP, to the host in each URL.
    """

    def __init__(self, socket: Path | None = None) -> None:
        connector: aiohttp.BaseConnector = (
            aiohttp.UnixConnector(path=str(socket))
            if socket
            else aiohttp.TCPConnector(limit=0, socket_factory=_kept_alive)  # a poll each
        )
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

    async def fetch(
        self, after: int, wait: float, base: str = "http://unix", receivers: int = MAX_AGENTS - 1
    ) -> Report:
        """The report of steps above `after`, waited for up to `wait` seconds.

        Raises ReportUnavailableError where nobody answers, ReportRefusedError where the answer is no report of a
        sender with at most so many receivers.
        """
        where = self._where or base
        limit = aiohttp.ClientTimeout(total=wait + ANSWER_SECONDS, connect=CONNECT_SECONDS)
        query = {"after": str(after), "timeout": f"{wait:g}"}
        try:
            async with self._session.get(
                f"{base}/report", params=query, timeout=limit, allow_redirects=False
            ) as response:
                body = await _bounded(response, where, max_bytes(receivers))
        except TimeoutError:  # first: aiohttp's are ClientErrors too
            raise ReportUnavailableError(f"{where} did not answer within {limit.total:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ReportUnavailableError(f"{where} does not answer: {error or type(error).__name__}") from None
        if response.status != 200:
            text = f"{where} answered {response.status}: {body[:200].decode(errors='replace')}"
            raise ReportUnavailableError(text) if response.status in _BUSY else ReportRefusedError(text)
        if body.count(b"{") > max_objects(receivers):
            raise ReportRefusedError(f"{where} answered with more than a report of {receivers} receivers can have")
        try:
            return await asyncio.to_thread(Report.model_validate_json, body) if len(body) > 1 << 20 else _parse(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            raise ReportRefusedError(f"{where} answered no report: {field or 'body'}: {first['msg']}") from None


def _kept_alive(address: aiohttp.AddrInfoType) -> socket_module.socket:
    """A long poll is silent for long: the kernel asks whether the other end, or its node, is still there."""
    family, kind, protocol, _, _ = address
    made = socket_module.socket(family, kind, protocol)
    made.setsockopt(socket_module.SOL_SOCKET, socket_module.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket_module, option):
            made.setsockopt(socket_module.IPPROTO_TCP, getattr(socket_module, option), value)
    return made


def _parse(body: bytes) -> Report:
    return Report.model_validate_json(body)


async def _bounded(response: aiohttp.ClientResponse, where: str, limit: int) -> bytes:
    chunks = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        chunks += chunk
        if len(chunks) > limit:
            raise ReportRefusedError(f"{where} answered with more than {limit} bytes, too many for its receivers")
    return bytes(chunks)
