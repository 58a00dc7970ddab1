"""Quantities of bytes, as Kubernetes writes them."""

from __future__ import annotations

import pytest
from weightsync_api.quantity import format_bytes, format_delta, parse_bytes, within


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0), ("1073741824", 1 << 30), ("256Mi", 256 << 20), ("1.5Gi", 3 << 29), ("1k", 1000),
        ("100M", 100_000_000), ("0.5", 1), ("1.001Ki", 1026), ("1Ei", 1 << 60),
        ("9999999999999999999999E", 9999999999999999999999 * 10**18),
    ],
)  # fmt: skip
def test_bytes_are_parsed_and_rounded_up(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "-1", "+1", "1e3", "1m", "1K", "1MB", "1 Mi", "Mi", "1Mi\n", "1.", ".5", "1.2345", "१"]
)
def test_what_is_no_quantity_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="write for example 256Mi"):
        parse_bytes(text)


def test_bounds_are_compared_before_rounding() -> None:
    assert within("4Ki", "4Ki", "1Ti")
    assert within("4096", "4Ki", "1Ti")
    assert not within("4095.9", "4Ki", "1Ti")
    assert not within("1024.001Gi", "4Ki", "1Ti")
    assert not within("much", "4Ki", "1Ti")


def test_bytes_are_written_for_people() -> None:
    assert [format_bytes(n) for n in (0, 512, 1024, 64 << 20, 8697308774)] == ["0B", "512B", "1KiB", "64MiB", "8.1GiB"]
    assert [format_delta(n) for n in (0, -(64 << 20), 1536)] == ["+0B", "-64MiB", "+1.5KiB"]
