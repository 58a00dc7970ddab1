"""Whether this operator hears of changes.

A watch can go deaf without an error. It is noticed by two things: the bookmarks that the API server sends each minute
don't come (Kopf reconnects then, and says nothing; where that does not help, this process does not live on blind); and
what the API server has differs for long from what is known here, whatever the cause.
"""

from __future__ import annotations

import asyncio
import logging
import time

from weightsync_api.v1alpha1 import KIND

from .kube_api import FORBIDDEN, ApiError, KubeApi
from .plan import Key
from .readers import WatchedReader, owner_key, version_of
from .watch_session import Heard

log = logging.getLogger("weightsync.health")

CHECK_SECONDS = 60.0
DEAF_SECONDS = 45.0
"""A change that was not heard for this long."""
SILENT_SECONDS = 240.0
"""Without an event or a bookmark of a watch, of which one is due each minute. Kopf begins a watch anew after 70 s: it
has tried three times by then."""


class WatchHealth:
    """Compares from time to time.

    Args:
        namespaces: those that are watched; empty: all.
        heard: of the watches.
        silent: seconds without an event or bookmark.
    """

    def __init__(
        self,
        api: KubeApi,
        reader: WatchedReader,
        namespaces: tuple[str, ...],
        heard: Heard,
        silent: float = SILENT_SECONDS,
    ) -> None:
        self._api = api
        self._reader = reader
        self._namespaces = namespaces
        self._heard = heard
        self._silent = silent
        self._unheard: dict[Key, tuple[float, tuple[str, str] | None]] = {}
        """Key -> since when, and the version that was known then."""
        self._late = ""
        self._untold: set[str] = set()
        """Namespaces that may not be read, such as one that was deleted with the rights in it."""

    @property
    def deaf(self) -> str:
        """Why it is not healthy; empty: it is."""
        path, seconds = self._heard.longest(self._untold)
        if seconds > self._silent:
            return f"no event and no bookmark of {path} for {seconds:.0f} s"
        return self._late

    async def run(self, every: float = CHECK_SECONDS) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(every)
            try:
                await self.check()
            except ApiError as error:
                log.warning("the watches were not checked: %s", error)
            if self.deaf:
                log.error("%s", self.deaf)

    async def check(self) -> None:
        """One comparison. Raises ApiError."""
        there: dict[Key, tuple[str, str]] = {}
        untold: set[str] = set()
        for namespace in self._namespaces or ("",):
            try:
                async for trees, _ in self._api.pages(KIND, namespace, metadata_only=True):
                    there |= {key: version_of(tree) for tree in trees if (key := owner_key(KIND, tree)) is not None}
            except ApiError as error:
                if error.status != FORBIDDEN or not namespace:
                    raise
                untold.add(namespace)
        versions, now = self._reader.versions(), time.monotonic()
        known = {key: version for key, version in versions.items() if key.namespace not in untold}
        differing = {key for key in there.keys() | known.keys() if there.get(key) != known.get(key)}
        unheard: dict[Key, tuple[float, tuple[str, str] | None]] = {}
        for key in differing:
            since, was = self._unheard.get(key, (now, known.get(key)))
            # What moved on meanwhile is heard of: it only is behind at this moment.
            unheard[key] = (since, was) if was == known.get(key) else (now, known.get(key))
        self._unheard, self._untold = unheard, untold
        late = [key for key, (since, _) in unheard.items() if now - since > DEAF_SECONDS]
        self._late = f"{late[0]} changed {DEAF_SECONDS:g} s ago or more, and no watch told" if late else ""
