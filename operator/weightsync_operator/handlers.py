"""Kopf's part: it lists and watches, and its handlers only put objects on the shelf and wake workers.

No handler changes anything in the cluster: there is no finalizer, no annotation and no state of Kopf's on any object.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import kopf
from kopf._core.reactor.inventory import ResourceMemories, ResourceMemory  # a parameter of kopf.operator has this type
from weightsync_api.v1alpha1 import KIND

from .kinds import PLACES, WATCHED
from .plan import LABEL_NAME
from .readers import WatchedReader
from .watch_session import Heard, session_for
from .workers import Workers

log = logging.getLogger("weightsync.watch")

PREFIX = "weightsync.dev"


def registry_for(reader: WatchedReader, workers: Workers, stop: asyncio.Event, heard: Heard) -> kopf.OperatorRegistry:
    """The handlers of one operator. `stop`: Kopf's stop flag; set at the end, whatever brought it."""
    registry = kopf.OperatorRegistry()

    async def login(**kwargs: Any) -> Any:
        info = kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)
        return session_for(info, heard) if info is not None else None

    kopf.on.login(registry=registry, id="login")(login)

    async def close(**_: Any) -> None:
        stop.set()
        await workers.close()

    # Kopf waits for 5 s for every task that is left, ours and its own that waits for the flag: they end before.
    kopf.on.cleanup(registry=registry, id="close")(close)
    for kind in WATCHED:
        place = PLACES[kind]
        on_event = kopf.on.event(place.group, place.version, place.plural, registry=registry, id=f"take-{kind.lower()}")
        on_event(_handler(kind, reader, workers))
    return registry


def settings() -> kopf.OperatorSettings:
    """Kopf's settings. The timeouts are those that keep a watch from going deaf behind a load balancer."""
    made = kopf.OperatorSettings()
    made.peering.standalone = True  # another operator's peering object would pause this one
    made.posting.enabled = False
    made.watching.server_timeout, made.watching.client_timeout, made.watching.connect_timeout = 300, 310, 30
    made.watching.reconnect_backoff = 1
    # Kopf lists all kinds at the same time: so many objects of each are in memory at once, in full.
    made.watching.chunk_size = 50
    for kind in WATCHED:
        if kind != KIND:
            place = PLACES[kind]
            made.watching.label_selectors[place.group, place.version, place.plural] = LABEL_NAME
    made.networking.request_timeout, made.networking.connect_timeout = 30, 5
    made.networking.error_backoffs = (0.5, 1, 2, 3, 5, 8)
    made.networking.enforce_retry_after = True
    made.persistence.finalizer = f"{PREFIX}/unused"
    made.persistence.diffbase_storage = _NoDiffs()
    made.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=PREFIX)
    # A worker of Kopf's holds the whole object that it was made for until it ends.
    made.queueing.idle_timeout = 0.1
    made.process.ultimate_exiting_timeout = 8
    return made


class Forgetful(ResourceMemories):
    """Kopf remembers each object for daemons and for handlers of changes: here that is a kilobyte each for nothing."""

    async def recall(self, raw_body: Any, *, ephemeral: bool = True, **kwargs: Any) -> ResourceMemory:
        return await super().recall(raw_body, ephemeral=True, **kwargs)


class _NoDiffs(kopf.DiffBaseStorage):
    """Kopf copies every object of every event for its handlers of changes, also where there are none."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None) -> Any:
        return {}

    def fetch(self, *, body: kopf.Body) -> Any:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: Any) -> None:
        pass


def _handler(kind: str, reader: WatchedReader, workers: Workers) -> Callable[..., Any]:
    async def take(event: Mapping[str, Any], body: kopf.Body, **_: Any) -> None:
        change = reader.drop if event["type"] == "DELETED" else reader.put
        key = change(kind, dict(body))
        if key is not None:
            workers.wake(key)

    return take
