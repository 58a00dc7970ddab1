"""Whether this operator hears of changes: what it knows is compared with what the API server has.

A watch can go deaf without an error (a connection that a load balancer forgot). Kopf notices by the bookmarks that
don't come; this notices whatever the cause: a WeightSync whose version at the API server differs from the known one,
and still does a while later, is a change that nobody told.
"""

from __future__ import annotations

import asyncio
import logging
import time

from weightsync_api.v1alpha1 import KIND

from .kube_api import FORBIDDEN, ApiError, KubeApi
from .plan import Key
from .readers import WatchedReader, owner_key, version_of

log = logging.getLogger("weightsync.health")

CHECK_SECONDS = 60.0
DEAF_SECONDS = 45.0
"""A change that was not heard for this long."""


class WatchHealth:
    """Compares from time to time.

    Args:
        namespaces: those that are watched; empty: all.
    """

    def __init__(self, api: KubeApi, reader: WatchedReader, namespaces: tuple[str, ...]) -> None:
        self._api = api
        self._reader = reader
        self._namespaces = namespaces
        self._unheard: dict[Key, tuple[float, tuple[str, str] | None]] = {}
        """Key -> since when, and the version that was known then."""
        self.deaf: str = ""
        """Why it is not healthy; empty: it is."""

    async def run(self, every: float = CHECK_SECONDS) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(every)
            try:
                await self.check()
            except ApiError as error:
                # Not this process' fault: another one would not do better.
                log.warning("the watches were not checked: %s", error)

    async def check(self) -> None:
        """One comparison. Raises ApiError."""
        there: dict[Key, tuple[str, str]] = {}
        untold: set[str] = set()
        """Namespaces that may not be read, such as one that was deleted with the rights in it."""
        for namespace in self._namespaces or ("",):
            try:
                trees = await self._api.list(KIND, namespace, metadata_only=True)
            except ApiError as error:
                if error.status != FORBIDDEN or not namespace:
                    raise
                untold.add(namespace)
                continue
            for tree in trees:
                key = owner_key(KIND, tree)
                if key is not None:
                    there[key] = version_of(tree)
        versions, now = self._reader.versions(), time.monotonic()
        known = {key: version for key, version in versions.items() if key.namespace not in untold}
        differing = {key for key in there.keys() | known.keys() if there.get(key) != known.get(key)}
        unheard: dict[Key, tuple[float, tuple[str, str] | None]] = {}
        for key in differing:
            since, was = self._unheard.get(key, (now, known.get(key)))
            # What moved on meanwhile is heard of: it only is behind at this moment.
            unheard[key] = (since, was) if was == known.get(key) else (now, known.get(key))
        self._unheard = unheard
        late = [key for key, (since, _) in unheard.items() if now - since > DEAF_SECONDS]
        self.deaf = f"{late[0]} changed {DEAF_SECONDS:g} s ago or more, and no watch told" if late else ""
        if self.deaf:
            log.error("%s", self.deaf)
