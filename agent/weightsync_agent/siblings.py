"""Asks the other agents of a container whether they are ready: a pod is ready when all of its agents are."""

from __future__ import annotations

import asyncio

import aiohttp

ANSWER_SECONDS = 2.0
"""A kubelet's probe gives up after 5 s."""
MAX_SIBLINGS = 64
MAX_ANSWER_BYTES = 4096


async def unready_sibling(host: str, ports: range) -> str:
    """What the first of them that is not ready says of itself, or that it does not answer; empty: all are ready.

    Args:
        host: where this container's agents are, such as 127.0.0.1.
        ports: of their HTTP.
    """
    limit = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    async with aiohttp.ClientSession(timeout=limit) as session:
        answers = await asyncio.gather(*(_why_not(session, host, port) for port in ports))
    return next((why for why in answers if why), "")


async def _why_not(session: aiohttp.ClientSession, host: str, port: int) -> str:
    where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    try:
        async with session.get(f"{where}/readyz", allow_redirects=False) as answer:
            said = (await answer.content.read(MAX_ANSWER_BYTES)).decode(errors="replace")
            return "" if answer.status == 200 else f"the agent at port {port} is not ready: {said.strip()}"
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return f"the agent at port {port} does not answer yet: {error or type(error).__name__}"
