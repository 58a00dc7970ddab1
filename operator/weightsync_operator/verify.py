"""`python -m weightsync_operator.verify FILE`: whether an installation works, as `helm test` asks.

Makes the one WeightSync of FILE, waits until one of its steps was verified, tells how it went, and deletes it. In a pod
that knows its own name and UID (POD_NAME, POD_UID) the WeightSync belongs to that pod: it goes with it, whatever
becomes of this process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import click
from weightsync_api.v1alpha1 import KIND, ConditionType, StepStatus, WeightSync, WeightSyncStatus
from weightsync_api.validation import ManifestError, read_weightsyncs

from .kinds import PLACES, POD
from .kube_api import ApiError, KubeApi, Tree
from .resource_tree import UnreadableError, read_resource
from .status import condition
from .text import latency, rate

POLL_SECONDS = 1.0
UNANSWERED_SECONDS = 20.0
"""Without any status after this time it says that no operator seems to run."""
LEFTOVER_SECONDS = 30.0
EXIT_DONE, EXIT_FAILED, EXIT_BAD_INPUT = 0, 1, 2


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=240.0, show_default=True, help="Seconds.")
def main(file: Path, timeout: float) -> None:
    """Makes the WeightSync of FILE in the cluster, waits for one verified step of it, and deletes it.

    \b
    Exit codes: 0 a step was verified; 1 none was in time; 2 bad input.
    """
    try:
        (ws,) = read_weightsyncs(file)
    except ManifestError as error:
        click.echo("\n".join(error.sentences), err=True)
        sys.exit(EXIT_BAD_INPUT)
    except ValueError:
        click.echo(f"{file}: holds several WeightSyncs, where one is wanted", err=True)
        sys.exit(EXIT_BAD_INPUT)
    sys.exit(asyncio.run(_verify(ws, timeout)))


async def _verify(ws: WeightSync, limit: float) -> int:
    api = await KubeApi.connect()
    try:
        return await _with(api, ws, limit)
    except ApiError as error:
        _say(f"the API server: {error}")
        return EXIT_FAILED
    finally:
        await api.close()


async def _with(api: KubeApi, ws: WeightSync, limit: float) -> int:
    """Raises ApiError."""
    meta = ws.metadata
    tree: Tree = ws.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"status"})
    tree["metadata"] = {"namespace": meta.namespace, "name": meta.name, "ownerReferences": _owner()}
    made = await _create(api, tree)
    _say(f"WeightSync {meta.namespace}/{meta.name} is made; a step of it must be verified within {limit:g} s")
    watching = asyncio.ensure_future(_watch(api, meta.namespace, meta.name, limit))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, watching.cancel)
    try:
        return await watching
    except asyncio.CancelledError:
        _say("ended before a step was verified")
        return EXIT_FAILED
    finally:
        await api.delete(KIND, meta.namespace, meta.name, made["metadata"]["uid"])


async def _create(api: KubeApi, tree: Tree) -> Tree:
    """Raises ApiError. One of an earlier test, which is about to go, is waited for."""
    began = time.monotonic()
    while True:
        try:
            return await api.create(tree)
        except ApiError as error:
            if error.status != 409 or time.monotonic() - began > LEFTOVER_SECONDS:
                raise
        await asyncio.sleep(POLL_SECONDS)


def _owner() -> list[Tree]:
    name, uid = os.environ.get("POD_NAME"), os.environ.get("POD_UID")
    return [{"apiVersion": PLACES[POD].api_version, "kind": POD, "name": name, "uid": uid}] if name and uid else []


async def _watch(api: KubeApi, namespace: str, name: str, limit: float) -> int:
    """Raises ApiError."""
    began, said, status = time.monotonic(), "", WeightSyncStatus()
    silent = False
    while (passed := time.monotonic() - began) < limit:
        status = await _status(api, namespace, name) or status
        if (step := _verified(status)) is not None:
            _say(_praise(step, status, passed))
            return EXIT_DONE
        ready = condition(status, ConditionType.READY)
        if ready is None and passed > UNANSWERED_SECONDS and not silent:
            silent = True
            _say(f"no operator says a word: does it run, and does it watch {namespace}?")
        if ready is not None and ready.message != said:
            said = ready.message
            _say(f"{ready.reason}: {said}")
        await asyncio.sleep(POLL_SECONDS)
    _say(f"no step was verified within {limit:g} s. The last that is known:")
    for known in status.conditions:
        _say(f"  {known.type} {known.status} {known.reason}: {known.message}")
    for agent in status.agents:
        place = f"{agent.pod} on {agent.node or 'no node'}"
        _say(f"  rank {agent.rank} {agent.role} {place}: {agent.state} {agent.message}")
    return EXIT_FAILED


async def _status(api: KubeApi, namespace: str, name: str) -> WeightSyncStatus | None:
    """None: none yet, or not to be had at this moment. Raises ApiError where it won't be had."""
    try:
        tree = await api.get(KIND, namespace, name)
    except ApiError as error:
        if error.refused:
            raise
        _say(f"the API server: {error}")
        return None
    if tree is None:
        raise ApiError(404, "NotFound", f"WeightSync {namespace}/{name} was deleted meanwhile")
    try:
        return read_resource(tree).status
    except UnreadableError as error:
        raise ApiError(422, "Unreadable", str(error)) from None


def _verified(status: WeightSyncStatus) -> StepStatus | None:
    steps = [*status.history, *([status.last_step] if status.last_step else [])]
    return next((step for step in steps if step.verified and step.complete), None)


def _praise(step: StepStatus, status: WeightSyncStatus, passed: float) -> str:
    return (
        f"step {step.step} is verified, {passed:.0f} s after the start: {step.bytes} bytes to {step.receivers} "
        f"receiver(s) over {status.route or status.transport} in {latency(step.duration_microseconds)} "
        f"({rate(step.bytes, step.duration_microseconds)})"
    )


def _say(line: str) -> None:
    click.echo(line)


if __name__ == "__main__":
    main()
