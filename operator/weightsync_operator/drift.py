"""Pure: whether what the API server holds is what was planned.

The API server adds defaults and drops empty values, so that the two are never equal: what was planned must be covered
by what is there. What a plan no longer has is seen by the hash that the object carries (`objects.ANNOTATION_HASH`).
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from weightsync_api.quantity import FACTORS

from .overlay import KEYS

_SUFFIXES: Mapping[str, Decimal] = {"m": Decimal("0.001"), **{s: Decimal(factor) for s, factor in FACTORS.items() if s}}


def covered(planned: Any, live: Any, field: str = "") -> bool:
    """Whether `live` holds everything that `planned` sets."""
    if isinstance(planned, Mapping):
        if not isinstance(live, Mapping):
            return not planned
        return all(covered(value, live.get(key), key) for key, value in planned.items())
    if isinstance(planned, list):
        if not isinstance(live, list):
            return not planned
        key = KEYS.get(field)
        if key is None:
            return len(planned) == len(live) and all(map(covered, planned, live))
        by_key = {entry.get(key): entry for entry in live if isinstance(entry, Mapping)}
        return len(planned) == len(live) and all(
            covered(entry, by_key.get(entry.get(key) if isinstance(entry, Mapping) else None)) for entry in planned
        )
    if live is None:
        return not planned
    return _same(planned, live)


def _same(planned: Any, live: Any) -> bool:
    if planned == live and isinstance(planned, bool) == isinstance(live, bool):
        return True
    one, other = _quantity(planned), _quantity(live)
    return one is not None and one == other


def _quantity(value: Any) -> Decimal | None:
    """As the API server reads it: 1024Mi is 1Gi, 1000m is 1, "1" is 1."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    text = str(value)
    suffix = next((suffix for suffix in _SUFFIXES if text.endswith(suffix)), "")
    try:
        number = Decimal(text.removesuffix(suffix))
    except InvalidOperation:
        return None
    return number * _SUFFIXES.get(suffix, Decimal(1)) if number.is_finite() else None
