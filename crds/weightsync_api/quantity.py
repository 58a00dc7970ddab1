"""Kubernetes resource quantities of bytes: `256Mi`, `1G`, `1073741824`.

Grammar: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

PATTERN = r"^[0-9]+(\.[0-9]{1,3})?(Ki|Mi|Gi|Ti|Pi|Ei|k|M|G|T|P|E)?$"
"""Whole numbers, or up to 3 decimals. The grammar's milli-, exponent and signed forms make no sense for bytes."""

FACTORS = {
    "": 1,
    **{suffix: 1000 ** (i + 1) for i, suffix in enumerate(["k", "M", "G", "T", "P", "E"])},
    **{suffix: 1024 ** (i + 1) for i, suffix in enumerate(["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"])},
}
"""Suffix -> what it multiplies by."""


def parse_exact(quantity: str) -> Decimal:
    """Bytes of a quantity, not rounded. Raises ValueError when it does not parse."""
    # fullmatch: `$` alone would let a trailing newline pass.
    if not re.fullmatch(PATTERN, quantity, re.ASCII):
        raise ValueError(f"{quantity!r} is no quantity of bytes: write for example 256Mi, 1Gi or 1073741824")
    number = quantity.rstrip("KMGTPEik")
    exact: Decimal = Decimal(number) * FACTORS[quantity[len(number) :]]
    return exact


def parse_bytes(quantity: str) -> int:
    """Bytes of a quantity, rounded up as Kubernetes does. Raises ValueError when it does not parse."""
    return math.ceil(parse_exact(quantity))


def within(quantity: str, least: str, most: str) -> bool:
    """Whether it parses and is `least` or more and `most` or less, compared before rounding as in CEL."""
    try:
        return parse_exact(least) <= parse_exact(quantity) <= parse_exact(most)
    except ValueError:
        return False


def format_bytes(count: int) -> str:
    """Bytes for people: `8.1GiB`, `512B`, `64MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            text = f"{size:.1f}".removesuffix(".0") if unit != "B" else str(int(size))
            return text + unit
        size /= 1024
    raise AssertionError("unreachable")


def format_delta(count: int) -> str:
    """A change of bytes with its sign: `+0B`, `-64MiB`."""
    return ("+" if count >= 0 else "-") + format_bytes(abs(count))
