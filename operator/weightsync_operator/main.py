"""`weightsync-operator`: the operator's process.

It ends with code 0 when asked to (SIGTERM, SIGINT), and with 1 where it must be started anew: its Lease is another's,
or a watch broke beyond repair.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import sys
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import click
import kopf
from aiohttp import web
from prometheus_client.exposition import choose_encoder

from .cluster import ClusterPlatform
from .handlers import Forgetful, registry_for, settings
from .health import SILENT_SECONDS, WatchHealth
from .kube_api import ApiError, KubeApi
from .lease import Lease, LeaseLostError
from .listing import Listing
from .metrics import OperatorMetrics
from .objects import Options
from .plan import Key
from .readers import WatchedReader
from .reconcile import Pass, Reconciler
from .transitions import EventPoster, transitions
from .watch_session import Heard
from .workers import RESYNC_SECONDS, Workers

log = logging.getLogger("weightsync.operator")

EXIT_DONE, EXIT_FAILED = 0, 1
ASK_TO_END = (signal.SIGINT, signal.SIGTERM)
RETRY_SECONDS = 2.0
COMPARE_SOON_SECONDS, COMPARE_SECONDS = 30.0, 3600.0


@dataclass(frozen=True)
class Settings:
    """How the operator was started."""

    image: str
    namespaces: tuple[str, ...] = ()
    lease: Key | None = None
    identity: str = ""
    operator_namespace: str = ""
    status_interval: float = 2.0
    max_silence: float = SILENT_SECONDS
    resync: float = RESYNC_SECONDS
    http: tuple[str, int] | None = None


class Operator:
    """All parts of one process, put together."""

    def __init__(self, api: KubeApi, made: Settings, metrics: OperatorMetrics) -> None:
        self._metrics = metrics
        self._events = EventPoster(api, made.identity)
        self.reader = WatchedReader()
        options = Options(image=made.image, operator_namespace=made.operator_namespace)
        self.platform = ClusterPlatform(api, self.reader, options, lambda key: self.workers.wake(key))
        self.reconciler = Reconciler(self.platform, status_interval=made.status_interval)
        self.workers = Workers(self.reconciler, self._passed, made.resync)
        self._listing = Listing(api, self.reader, self.workers.wake, made.namespaces)
        self.heard = Heard()
        self.health = WatchHealth(api, self.reader, made.namespaces, self.heard, made.max_silence)
        self.leads = made.lease is None

    async def read_all(self) -> None:
        """Everything there is; tried again until the API server gives it."""
        while True:
            try:
                return await self._listing.read()
            except ApiError as error:
                log.warning("what there is can't be read yet, is the CustomResourceDefinition installed? %s", error)
                await asyncio.sleep(RETRY_SECONDS)

    async def compare(self) -> None:
        """Once the watches run, and from time to time."""
        pause = COMPARE_SOON_SECONDS
        while True:
            await asyncio.sleep(pause * random.uniform(0.75, 1))
            try:
                await self._listing.compare()
                pause = COMPARE_SECONDS
            except ApiError as error:
                log.warning("what is known was not compared with what there is: %s", error)
                pause = COMPARE_SOON_SECONDS

    async def _passed(self, key: Key, done: Pass | None, seconds: float) -> None:
        if done is None:
            self._metrics.passed("failed", seconds)
            return
        if done.resource is None:
            self._metrics.passed("failed" if done.status else "gone", seconds)
            self._metrics.know(key, done.status)
            return
        self._metrics.passed("written" if done.written else "unchanged", seconds)
        self._metrics.know(key, done.status)
        if done.written and done.status is not None:
            for transition in transitions(done.resource.status, done.status):
                await self._events.post(done.resource, transition)


async def serve(made: Settings) -> int:
    """Runs until it is asked to end. Gives the exit code."""
    metrics = OperatorMetrics(lambda: operator.workers.waiting)
    api = await KubeApi.connect(observer=metrics.requested)
    operator = Operator(api, made, metrics)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(api.close)
        stack.push_async_callback(operator.platform.close)
        await stack.enter_async_context(_http(operator, metrics, made.http))
        stop = asyncio.Event()
        tasks: list[Coroutine[Any, Any, None]] = [operator.health.run()]
        if made.lease is not None:
            lease = Lease(api, made.lease, made.identity)
            if not await _unless_asked(lease.acquire()):
                return EXIT_DONE
            operator.leads = True
            stack.push_async_callback(lease.release)
            tasks.append(lease.keep())
        stack.push_async_callback(operator.workers.close)
        if not await _unless_asked(operator.read_all()):
            return EXIT_DONE
        operator.workers.open()
        tasks.append(operator.compare())
        log.info("version %s begins", version("weightsync"))
        watching = kopf.operator(
            registry=registry_for(operator.reader, operator.workers, stop, operator.heard),
            settings=settings(),
            memories=Forgetful(),
            clusterwide=not made.namespaces,
            namespaces=made.namespaces,
            stop_flag=stop,
        )
        return await _until_end(watching, tasks, stop)


async def _unless_asked(work: Coroutine[Any, Any, None]) -> bool:
    """Does what comes before the watches. False: asked to end before it was done."""
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    for number in ASK_TO_END:
        loop.add_signal_handler(number, asked.set)
    task, end = asyncio.create_task(work), asyncio.create_task(asked.wait())
    await asyncio.wait([task, end], return_when=asyncio.FIRST_COMPLETED)
    for number in ASK_TO_END:
        loop.remove_signal_handler(number)  # from here on they are Kopf's
    end.cancel()
    if not task.done():
        task.cancel()
        return False
    task.result()
    return True


async def _until_end(
    watching: Coroutine[Any, Any, None], others: list[Coroutine[Any, Any, None]], stop: asyncio.Event
) -> int:
    """Kopf ends by a signal; anything else that ends is a failure."""
    main = asyncio.create_task(watching, name="kopf")
    tasks = [asyncio.create_task(other) for other in others]
    try:
        await asyncio.wait([main, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done() and (error := task.exception()) is not None:
                log.error("the operator ends: %s", error, exc_info=None if isinstance(error, LeaseLostError) else error)
                stop.set()
                await asyncio.wait([main], timeout=5)
                return EXIT_FAILED
        if (error := main.exception()) is not None:
            log.error("the operator ends: %s", error, exc_info=error)
            return EXIT_FAILED
        log.info("the operator ends as it was asked to")
        return EXIT_DONE
    finally:
        for task in (main, *tasks):
            task.cancel()


@contextlib.asynccontextmanager
async def _http(operator: Operator, metrics: OperatorMetrics, address: tuple[str, int] | None) -> Any:
    """/healthz, /readyz and /metrics."""
    if address is None:
        yield
        return

    async def healthz(_: web.Request) -> web.Response:
        deaf = operator.health.deaf
        return web.Response(text=f"{deaf or 'ok'}\n", status=503 if deaf else 200)

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n" if operator.leads else "waits for the Lease\n")

    async def scrape(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(metrics.registry), headers={"Content-Type": content_type})

    app = web.Application(client_max_size=1024)
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", scrape)])
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, *address).start()
    try:
        yield
    finally:
        await runner.cleanup()


@click.command(context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "WEIGHTSYNC_OPERATOR"})
@click.version_option(version("weightsync"), prog_name="weightsync-operator")
@click.option("--agent-image", required=True, help="Agents' image, where a WeightSync names none.")
@click.option("-n", "--namespace", "namespaces", multiple=True, help="Watch only these; all otherwise.")
@click.option("--lease", help="NAMESPACE/NAME of the Lease to hold while acting; none: this is the only operator.")
@click.option("--operator-namespace", default="", help="Where this runs: its pods may reach the agents.")
@click.option("--status-interval", type=click.FloatRange(0, 3600), default=2.0, show_default=True, help="Seconds.")
@click.option(
    "--max-silence",
    type=click.FloatRange(1, 86400),
    default=SILENT_SECONDS,
    show_default=True,
    help="Seconds without an event or bookmark of a watch, of which one is due each minute, until /healthz fails.",
)
@click.option("--http", default="0.0.0.0:8081", show_default=True, help="/healthz, /readyz, /metrics; empty: none.")
@click.option("--log-level", type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"]), default="INFO")
def main(
    agent_image: str,
    namespaces: tuple[str, ...],
    lease: str | None,
    operator_namespace: str,
    status_interval: float,
    max_silence: float,
    http: str,
    log_level: str,
) -> None:
    """Brings the WeightSyncs of a cluster to what their specs say.

    Every option can be given by environment: WEIGHTSYNC_OPERATOR_AGENT_IMAGE, WEIGHTSYNC_OPERATOR_LEASE and so on.
    """
    _log_to_stderr(log_level)
    made = Settings(
        image=agent_image,
        namespaces=tuple(name for word in namespaces for name in word.split(",") if name),
        lease=_key(lease) if lease else None,
        identity=f"{os.environ.get('HOSTNAME') or socket.gethostname()}_{uuid.uuid4().hex[:8]}",
        operator_namespace=operator_namespace,
        status_interval=status_interval,
        max_silence=max_silence,
        http=_address(http) if http else None,
    )
    sys.exit(asyncio.run(serve(made)))


def _key(text: str) -> Key:
    namespace, _, name = text.partition("/")
    if not (namespace and name) or "/" in name:
        raise click.UsageError(f"--lease is {text!r}: write NAMESPACE/NAME")
    return Key(namespace, name)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise click.UsageError(f"--http is {text!r}: write HOST:PORT, such as 0.0.0.0:8081")
    return host.strip("[]") or "0.0.0.0", int(port)


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    if level == "INFO":
        logging.getLogger("kopf").setLevel(logging.WARNING)  # it tells of every event that a handler took


if __name__ == "__main__":
    main()
