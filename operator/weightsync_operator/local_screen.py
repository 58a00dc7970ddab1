"""What a local run shows: a live table on a terminal, lines where there is none, or one JSON object a step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from weightsync_api.v1alpha1 import ConditionType, StepStatus, WeightSync

from .plan import Key
from .status import condition
from .table import columns, drawn, header, plain, row, stream_widths

LINE_SECONDS = 1.0
"""Lines of one resource are not printed more often than this, whatever its pace."""


class Screen:
    """Where a run's words go. Lines of agents and notices go to stderr, so that stdout holds one thing only."""

    def open(self) -> None:
        """The run begins."""

    def line(self, prefix: str, text: str) -> None:
        """A line that an agent's process wrote."""
        click.echo(f"[{prefix}] {text}", err=True)

    def notice(self, text: str) -> None:
        """A sentence of the runner's own."""
        click.echo(text, err=True)

    def steps(self, key: Key, steps: Sequence[StepStatus]) -> None:
        """New steps, in order, each once."""

    def status(self, ws: WeightSync) -> None:
        """The resource has a new status."""

    def summary(self, text: str) -> None:
        """The last line."""
        click.echo(text)

    def close(self) -> None:
        """Nothing more comes but the summary. Idempotent."""


class JsonScreen(Screen):
    """One JSON object a step on stdout, and nothing else there.

    Args:
        named: adds namespace and name to each object: where several resources run at once.
    """

    def __init__(self, named: bool) -> None:
        self._named = named

    def steps(self, key: Key, steps: Sequence[StepStatus]) -> None:
        for step in steps:
            text = step.model_dump_json(by_alias=True)
            if self._named:
                text = f'{{"namespace":"{key.namespace}","name":"{key.name}",{text[1:]}'
            sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def summary(self, text: str) -> None:
        self.notice(text)


class LinesScreen(Screen):
    """The table's rows, one by one as they change: for logs and pipes."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._columns = columns()
        self._now = now
        self._printed: dict[str, tuple[float, tuple[int, str]]] = {}
        self._held: dict[str, WeightSync] = {}
        self._headed = False

    def status(self, ws: WeightSync) -> None:
        name = str(Key(ws.metadata.namespace, ws.metadata.name))
        mark = _mark(ws)
        at, before = self._printed.get(name, (0.0, (0, "")))
        if mark == before:
            return
        if mark[1] == before[1] and self._now() - at < LINE_SECONDS:
            self._held[name] = ws
            return
        self._print(name, ws)

    def close(self) -> None:
        for name, ws in list(self._held.items()):
            self._print(name, ws)

    def _print(self, name: str, ws: WeightSync) -> None:
        self._held.pop(name, None)
        self._printed[name] = (self._now(), _mark(ws))
        widths = stream_widths(self._columns)
        rows = [row(ws, self._columns, datetime.now(UTC))]
        if not self._headed:
            self._headed = True
            click.echo(plain([header(self._columns)], widths))
        click.echo(plain(rows, widths))


class LiveScreen(Screen):
    """A table that changes in place; what the agents write scrolls by above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._columns = columns()
        self._resources: dict[str, WeightSync] = {}
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=4, transient=False)

    def open(self) -> None:
        self._live.start(refresh=True)

    def line(self, prefix: str, text: str) -> None:
        if sys.stderr.isatty():
            self._console.print(Text(f"[{prefix}] {text}"), soft_wrap=True)
        else:
            super().line(prefix, text)

    def notice(self, text: str) -> None:
        if sys.stderr.isatty():
            self._console.print(Text(text, style="yellow"), soft_wrap=True)
        else:
            super().notice(text)

    def status(self, ws: WeightSync) -> None:
        self._resources[str(Key(ws.metadata.namespace, ws.metadata.name))] = ws

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> Group:
        now = datetime.now(UTC)
        resources = list(self._resources.values())
        table = drawn([row(ws, self._columns, now) for ws in resources], self._columns, self._console.width)
        return Group(table, *(Text(why, style="dim") for ws in resources if (why := _why(ws))))


def screen_for(output: str, documents: int) -> Screen:
    """The screen for `--output json|table` and what stdout is."""
    if output == "json":
        return JsonScreen(named=documents > 1)
    console = Console(file=sys.stdout)
    return LiveScreen(console) if console.is_terminal and not console.is_dumb_terminal else LinesScreen()


def _mark(ws: WeightSync) -> tuple[int, str]:
    status = ws.status
    return (status.step, status.summary.status) if status else (0, "")


def _why(ws: WeightSync) -> str:
    """Why it isn't ready, in one line; empty where it is."""
    ready = condition(ws.status, ConditionType.READY) if ws.status else None
    return f"{ws.metadata.name}: {ready.reason}: {ready.message}" if ready and ready.status != "True" else ""
