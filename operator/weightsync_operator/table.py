"""The columns of `kubectl get weightsyncs`, drawn for `weightsync run` and `weightsync get` from the resource alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rich.table import Table
from weightsync_api.columns import COLUMNS, Column
from weightsync_api.v1alpha1 import WeightSync

from .text import age

_SEGMENT = re.compile(r"""\.([A-Za-z][A-Za-z0-9]*)|\[\?\(@\.([A-Za-z]+)==["']([A-Za-z]+)["']\)\]""")
_GAP = "   "


def columns(*, wide: bool = False, namespace: bool = False) -> list[Column]:
    """The columns in kubectl's order: the namespace where asked for, the name, the printer columns."""
    first = [Column("Namespace", ".metadata.namespace", "")] if namespace else []
    return [*first, Column("Name", ".metadata.name", ""), *(c for c in COLUMNS if wide or not c.priority)]


def row(ws: WeightSync, shown: Sequence[Column], now: datetime) -> list[str]:
    """One resource's cells; empty where the status has nothing yet, as kubectl has it."""
    resource = ws.model_dump(mode="json", by_alias=True)
    cells = []
    for column in shown:
        value = _value(resource, column.json_path)
        if value is None:
            cells.append("")
        elif column.type == "date":
            cells.append(age(now - datetime.fromisoformat(str(value))))
        else:
            cells.append(str(value))
    return cells


def header(shown: Sequence[Column]) -> list[str]:
    return [column.name.upper() for column in shown]


def plain(rows: Sequence[Sequence[str]], widths: Sequence[int] | None = None) -> str:
    """Aligned columns, one line a row. `widths`: at least so wide, for lines that are printed one by one."""
    least = widths or [0] * (len(rows[0]) if rows else 0)
    wide = [max(n, *(len(r[i]) for r in rows)) for i, n in enumerate(least)]
    return "\n".join(_GAP.join(cell.ljust(n) for cell, n in zip(r, wide, strict=True)).rstrip() for r in rows)


STREAM_WIDTHS = {"Name": 16, "Ready": 5, "Status": 9, "Transport": 9, "Receivers": 9, "Step": 5, "Reserved": 8}
"""Widths of columns whose values grow while lines are printed one by one."""


def stream_widths(shown: Sequence[Column]) -> list[int]:
    return [max(len(column.name), STREAM_WIDTHS.get(column.name, 8)) for column in shown]


DISPENSABLE = ("Transport", "Age", "Reserved", "Receivers", "Ack")
"""Columns that a narrow terminal goes without, in this order: what is left can be read whole."""
_DRAWN_WIDTHS = {"Status": 8, "Step": 4, "Delta": 7, "Ack": 6, "Rate": 7, "Age": 4}
"""Of columns whose values change: what fits is not to change with them."""


def drawn(rows: Sequence[Sequence[str]], shown: Sequence[Column], width: int) -> Table:
    """The same for a terminal that is so wide."""
    kept, gap = _fitting(rows, shown, width)
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for i in kept:
        table.add_column(shown[i].name.upper(), no_wrap=True, overflow="ellipsis")
    for cells in rows:
        table.add_row(*(_coloured(shown[i], cells[i]) for i in kept))
    return table


def _fitting(rows: Sequence[Sequence[str]], shown: Sequence[Column], width: int) -> tuple[list[int], int]:
    """Which columns have room, and the spaces between them."""
    wide = [max([_DRAWN_WIDTHS.get(c.name, 0), len(c.name), *(len(r[i]) for r in rows)]) for i, c in enumerate(shown)]
    kept = list(range(len(shown)))
    for name in (*DISPENSABLE, ""):
        needed = sum(wide[i] for i in kept)
        for gap in (len(_GAP), 2):
            if needed + gap * (len(kept) - 1) <= width:
                return kept, gap
        kept = [i for i in kept if shown[i].name != name]
    return kept, 1


def _coloured(column: Column, cell: str) -> str:
    colours = {"True": "green", "False": "yellow", "Degraded": "red", "Complete": "green"}
    colour = colours.get(cell) if column.name in ("Ready", "Status") else None
    return f"[{colour}]{cell}[/]" if colour else cell.replace("[", r"\[")


def _value(resource: Any, path: str) -> Any:
    """What a printer column's JSONPath names: fields, and the list entry whose field has a value."""
    found = resource
    for field, key, wanted in _SEGMENT.findall(path):
        if field:
            found = found.get(field) if isinstance(found, dict) else None
        else:
            found = next((entry for entry in found or [] if entry.get(key) == wanted), None)
        if found is None:
            return None
    return found
