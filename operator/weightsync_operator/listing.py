"""All there is, read at once: before the watches begin, and compared with what they brought from time to time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from weightsync_api.v1alpha1 import KIND

from .kinds import WATCHED
from .kube_api import FORBIDDEN, ApiError, KubeApi
from .plan import LABEL_NAME, Key
from .readers import WatchedReader, version_of

log = logging.getLogger("weightsync.listing")


class Listing:
    """Reads everything of some namespaces.

    Args:
        reader: where what is found goes.
        wake: told of every WeightSync that has news by it.
        namespaces: those that are read; empty: all.
    """

    def __init__(
        self, api: KubeApi, reader: WatchedReader, wake: Callable[[Key], None], namespaces: tuple[str, ...]
    ) -> None:
        self._api = api
        self._reader = reader
        self._wake = wake
        self._namespaces = namespaces or ("",)

    async def read(self) -> None:
        """Puts all there is on the shelf. Raises ApiError.

        Before the watches begin, so that the first pass sees everything. (Kopf's indices would do that too, but they
        wake every waiting object at each one's end: with N objects N * N times.)
        """
        await self._of_all(self._read)

    async def compare(self) -> None:
        """Compares the versions of all there is with the shelf's, and puts right what differs. Raises ApiError.

        Once the watches have begun: what was deleted between `read` and Kopf's own lists is told by nobody. And from
        time to time, for whatever else was missed.
        """
        await self._of_all(self._compare)

    async def _of_all(self, work: Callable[[str, str], Awaitable[None]]) -> None:
        """Every kind in each namespace.

        A namespace of several that may not be read is left out: with a namespace that is deleted the rights in it go
        too, and the others' WeightSyncs must not wait for it.
        """
        refused: dict[str, ApiError] = {}
        for namespace in self._namespaces:
            # All kinds at the same time: while the API server makes one's page, another's is read.
            done = await asyncio.gather(*(work(kind, namespace) for kind in WATCHED), return_exceptions=True)
            for error in done:
                if isinstance(error, ApiError) and error.status == FORBIDDEN:
                    refused[namespace] = error
                elif isinstance(error, BaseException):
                    raise error
        if len(refused) == len(self._namespaces):
            raise next(iter(refused.values()))
        for namespace, why in refused.items():
            log.warning("the namespace %s is left out; is it still there? %s", namespace, why)

    async def _read(self, kind: str, namespace: str) -> None:
        async for trees, _ in self._api.pages(kind, namespace, labels=_labels(kind)):
            for tree in trees:
                if (key := self._reader.put(kind, tree)) is not None:
                    self._wake(key)

    async def _compare(self, kind: str, namespace: str) -> None:
        uids: set[str] = set()
        listed_at = ""
        async for trees, version in self._api.pages(kind, namespace, labels=_labels(kind), metadata_only=True):
            listed_at = version
            for tree in trees:
                uids.add(version_of(tree)[0])
                if self._reader.knows(kind, tree):
                    continue
                # By a list: for pods and WeightSyncs the operator has no other right.
                meta = tree["metadata"]
                for live in await self._api.list(kind, meta["namespace"], fields=f"metadata.name={meta['name']}"):
                    if (key := self._reader.put(kind, live)) is not None:
                        self._wake(key)
        for key in self._reader.keep(kind, namespace, uids, listed_at):
            self._wake(key)


def _labels(kind: str) -> str:
    return "" if kind == KIND else LABEL_NAME
