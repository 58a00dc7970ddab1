"""Figures and names as people read them, in conditions, columns and lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal

MAX_NAMED = 3
"""Agents that a sentence names before it counts the rest."""


def latency(microseconds: int) -> str:
    """`85us`, `0.8ms`, `12ms`, `1.2s`."""
    if microseconds < 100:
        return f"{microseconds}us"
    if microseconds < 10_000:
        return f"{microseconds / 1000:.1f}ms"
    if microseconds < 1_000_000:
        return f"{microseconds / 1000:.0f}ms"
    return f"{microseconds / 1e6:.1f}s"


def rate(nbytes: int, microseconds: int) -> str:
    """Bytes over time in powers of 1000: `348GB/s`, `8.2GB/s`, `410MB/s`. Empty where no time passed."""
    if microseconds <= 0:
        return ""
    per_second = nbytes * 1e6 / microseconds
    for unit in ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"):
        if per_second < 999.5 or unit == "TB/s":
            digits = 1 if per_second < 99.95 and unit != "B/s" else 0
            return f"{per_second:.{digits}f}{unit}"
        per_second /= 1000
    raise AssertionError("unreachable")


def age(span: timedelta) -> str:
    """As kubectl writes an age: `12s`, `3m20s`, `12m`, `5h`, `3d`."""
    seconds = max(0, int(span.total_seconds()))
    if seconds < 120:
        return f"{seconds}s"
    minutes, rest = divmod(seconds, 60)
    if minutes < 10:
        return f"{minutes}m{rest}s" if rest else f"{minutes}m"
    if minutes < 180:
        return f"{minutes}m"
    hours = minutes // 60
    return f"{hours}h" if hours < 48 else f"{hours // 24}d"


def timestamp(moment: datetime, timespec: Literal["seconds", "microseconds"] = "seconds") -> str:
    """In UTC, as Kubernetes writes times (RFC 3339): `2026-01-31T12:00:00Z`."""
    return moment.astimezone(UTC).isoformat(timespec=timespec).replace("+00:00", "Z")


def percentile(values: Sequence[int], percent: float) -> int:
    """Nearest rank: the smallest value that `percent` per cent of the values don't exceed; 0 for no values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else 0


def who(rank: int, pod: str) -> str:
    """An agent in a sentence: `the sender (rank 0, pod x-sender-0)`."""
    return f"{'receiver' if rank else 'the sender'} (rank {rank}{f', pod {pod}' if pod else ''})"


def listed(sentences: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = len(sentences) - MAX_NAMED
    return "; ".join(sentences[:MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")
