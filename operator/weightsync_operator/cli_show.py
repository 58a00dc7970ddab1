"""`weightsync get` and `weightsync describe`: what runs on this machine, as kubectl would show it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import click
import yaml
from pydantic import BaseModel
from weightsync_api.quantity import format_bytes, format_delta
from weightsync_api.v1alpha1 import WeightSync

from .state_dir import running
from .table import columns, header, plain, row, stream_widths
from .text import age, latency, rate

WATCH_SECONDS = 1.0


def as_yaml(model: BaseModel) -> str:
    """A model as YAML, in its fields' order and camelCase."""
    return tree_as_yaml(model.model_dump(mode="json", by_alias=True, exclude_none=True))


def tree_as_yaml(tree: Any) -> str:
    """A tree of JSON values as YAML, in its own order; longer texts as blocks, and nothing as an alias."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


@click.command(short_help="List the WeightSyncs that run on this machine.")
@click.argument("name", required=False)
@click.option("-n", "--namespace", help="Only this namespace; all of them otherwise.")
@click.option(
    "-o", "--output", type=click.Choice(["wide", "yaml", "json"]), help="More columns, or the whole resource."
)
@click.option("-w", "--watch", is_flag=True, help="Print a line whenever one changes.")
def get(name: str | None, namespace: str | None, output: str | None, watch: bool) -> None:
    """List the WeightSyncs that run on this machine, with the columns of `kubectl get weightsyncs`.

    \b
    Examples:
      weightsync get
      weightsync get quickstart -o yaml
      weightsync get -w
    """
    if watch and output in ("yaml", "json"):
        raise click.UsageError("--watch prints lines: leave out --watch, or --output yaml|json")
    found = _found(name, namespace)
    if not found and name:
        _nothing(name)
    if output == "yaml":
        click.echo("---\n".join(as_yaml(ws) for ws in found), nl=False)
    elif output == "json":
        texts = [ws.model_dump_json(by_alias=True, exclude_none=True, indent=2) for ws in found]
        click.echo(texts[0] if name and len(texts) == 1 else f"[{', '.join(texts)}]")
    elif watch:
        _watch(name, namespace, wide=output == "wide")
    elif not found:
        click.echo("No WeightSync runs on this machine: start one with `weightsync run FILE`.", err=True)
    else:
        shown = columns(wide=output == "wide", namespace=_several_namespaces(found))
        now = datetime.now(UTC)
        click.echo(plain([header(shown), *(row(ws, shown, now) for ws in found)]))


@click.command()
@click.argument("name")
@click.option("-n", "--namespace", help="Namespace; looked for in all of them otherwise.")
def describe(name: str, namespace: str | None) -> None:
    """Show a running WeightSync's conditions, agents and last steps.

    \b
    Example:
      weightsync describe quickstart
    """
    found = _found(name, namespace)
    if not found:
        _nothing(name)
    for ws in found:
        click.echo(described(ws, datetime.now(UTC)))


def described(ws: WeightSync, now: datetime) -> str:
    """The text of `weightsync describe`."""
    status = ws.status
    lines = [
        f"Name:       {ws.metadata.name}",
        f"Namespace:  {ws.metadata.namespace}",
        f"Placement:  {ws.spec.placement}",
    ]
    if status is None:
        return "\n".join([*lines, "Status:     none yet"])
    route = f" ({', '.join(filter(None, (status.mode, status.route)))})" if status.mode or status.route else ""
    lines += [
        f"Transport:  {status.transport}{route}",
        *([f"Names:      {status.names}"] if status.names else []),
        f"Status:     {status.summary.status}",
        f"Receivers:  {status.summary.receivers}",
        f"Step:       {status.step}",
        "",
        "Conditions:",
    ]
    conditions = [["TYPE", "STATUS", "SINCE", "REASON"]]
    conditions += [[c.type, c.status, age(now - c.last_transition_time), c.reason] for c in status.conditions]
    table = plain(conditions).splitlines()
    width = max(map(len, table))
    messages = ["MESSAGE", *(c.message for c in status.conditions)]
    lines += [f"  {text.ljust(width)}   {message}" for text, message in zip(table, messages, strict=True)]
    lines += ["", "Agents:", *_indented(plain(_agents(ws)))]
    if status.history:
        lines += ["", "Steps:", *_indented(plain(_steps(ws)))]
    return "\n".join(lines)


def _agents(ws: WeightSync) -> list[list[str]]:
    rows = [["RANK", "ROLE", "POD", "NODE", "GPU", "STATE", "STEP", "RESERVED", "ALLOCATED", "ACK", "MESSAGE"]]
    rows += [
        [
            str(agent.rank),
            agent.role,
            agent.pod,
            agent.node,
            agent.gpu or "-",
            agent.state,
            str(agent.step),
            format_bytes(agent.reserved_bytes),
            format_bytes(agent.allocated_bytes),
            latency(agent.ack_microseconds) if agent.ack_microseconds else "-",
            agent.message,
        ]
        for agent in (ws.status.agents if ws.status else [])
    ]
    return rows


def _steps(ws: WeightSync) -> list[list[str]]:
    rows = [
        ["STEP", "STARTED", "TOOK", "BYTES", "RATE", "RECEIVERS", "DELTA", "PEAK", "ACK-P50", "ACK-MAX", "VERIFIED"]
    ]
    rows += [
        [
            str(step.step),
            step.started_at.astimezone().strftime("%H:%M:%S"),
            latency(step.duration_microseconds),
            format_bytes(step.bytes),
            rate(step.bytes, step.duration_microseconds),
            f"{step.receivers}" + ("" if step.complete else " (broken off)"),
            format_delta(step.reserved_bytes.delta),
            format_bytes(step.reserved_bytes.peak),
            latency(step.ack_microseconds.p50),
            latency(step.ack_microseconds.max),
            "yes" if step.verified else "-",
        ]
        for step in (ws.status.history if ws.status else [])
    ]
    return rows


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]


def _found(name: str | None, namespace: str | None) -> list[WeightSync]:
    return [
        ws
        for ws in running()
        if (not name or ws.metadata.name == name) and (not namespace or ws.metadata.namespace == namespace)
    ]


def _nothing(name: str) -> None:
    click.echo(f"weightsync {name!r} does not run on this machine: see `weightsync get`", err=True)
    sys.exit(1)


def _several_namespaces(found: Iterable[WeightSync]) -> bool:
    return len({ws.metadata.namespace for ws in found}) > 1


def _watch(name: str | None, namespace: str | None, *, wide: bool) -> None:
    """A line for each resource whenever its cells change, age aside; until Ctrl-C."""
    shown = columns(wide=wide, namespace=True)
    widths = stream_widths(shown)
    still = [i for i, column in enumerate(shown) if column.type != "date"]
    printed: dict[tuple[str, str], Sequence[str]] = {}
    click.echo(plain([header(shown)], widths))
    try:
        while True:
            now = datetime.now(UTC)
            for ws in _found(name, namespace):
                cells = row(ws, shown, now)
                key, mark = (ws.metadata.namespace, ws.metadata.name), [cells[i] for i in still]
                if printed.get(key) != mark:
                    printed[key] = mark
                    click.echo(plain([cells], widths))
            time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        sys.exit(130)
