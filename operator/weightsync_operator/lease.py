"""A Lease of coordination.k8s.io: of several operators one acts, the others wait.

As client-go's leader election: who holds the Lease renews it; who finds it unrenewed for its whole duration, by the
own clock, takes it. A holder that can't renew in time ends before another may begin.
https://kubernetes.io/docs/concepts/architecture/leases/
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import Any

from .kinds import LEASE, PLACES
from .kube_api import ApiError, KubeApi, Tree
from .plan import Key
from .text import timestamp

log = logging.getLogger("weightsync.lease")

DURATION_SECONDS = 15
RENEW_SECONDS = 5.0
RENEW_DEADLINE_SECONDS = 10.0
RETRY_SECONDS = 2.0


class LeaseLostError(Exception):
    """Another operator may act by now: this one must end at once."""


class Lease:
    """One Lease, and this process as one who wants it.

    Args:
        api: the API server.
        key: the Lease's namespace and name.
        identity: of this process, such as its pod's name; unique.
    """

    def __init__(self, api: KubeApi, key: Key, identity: str) -> None:
        self._api = api
        self._key = key
        self._identity = identity
        self._seen: tuple[str, float] = ("", 0.0)
        """Version of the Lease, and when it was first seen."""

    async def acquire(self) -> None:
        """Waits until this process holds it, for ever."""
        told = False
        while True:
            try:
                holder = await self._try()
            except ApiError as error:
                log.warning("the Lease %s can't be had: %s", self._key, error)
                holder = "?"
            if holder == self._identity:
                log.info("holds the Lease %s", self._key)
                return
            if not told:
                log.info("waits for the Lease %s, which %s holds", self._key, holder)
                told = True
            await asyncio.sleep(RETRY_SECONDS)

    async def keep(self) -> None:
        """Renews it for ever. Raises LeaseLostError."""
        renewed = time.monotonic()
        while True:
            await asyncio.sleep(RENEW_SECONDS if time.monotonic() - renewed < RENEW_SECONDS else RETRY_SECONDS)
            try:
                async with asyncio.timeout(RENEW_DEADLINE_SECONDS - RETRY_SECONDS):
                    holder = await self._try()
            except (ApiError, TimeoutError) as error:
                if time.monotonic() - renewed > RENEW_DEADLINE_SECONDS:
                    raise LeaseLostError(f"the Lease {self._key} could not be renewed in time: {error}") from None
                continue
            if holder != self._identity:
                raise LeaseLostError(f"the Lease {self._key} is {holder}'s now")
            renewed = time.monotonic()

    async def release(self) -> None:
        """Gives it back, so that another one need not wait for its end."""
        try:
            live = await self._api.get(LEASE, *self._key)
            if live is not None and live["spec"].get("holderIdentity") == self._identity:
                await self._api.replace({**live, "spec": {**live["spec"], "holderIdentity": "", "renewTime": _now()}})
        except ApiError as error:
            log.warning("the Lease %s was not given back: %s", self._key, error)

    async def _try(self) -> str:
        """Takes or renews it where that may be. Gives the holder. Raises ApiError."""
        live = await self._api.get(LEASE, *self._key)
        if live is None:
            meta = {"namespace": self._key.namespace, "name": self._key.name}
            tree = {"apiVersion": PLACES[LEASE].api_version, "kind": LEASE, "metadata": meta, "spec": self._spec(0)}
            return await self._write(self._api.create(tree))
        spec: dict[str, Any] = live.get("spec") or {}
        holder = str(spec.get("holderIdentity") or "")
        version = str(live["metadata"].get("resourceVersion", ""))
        if version != self._seen[0]:
            self._seen = version, time.monotonic()
        lasts = float(spec.get("leaseDurationSeconds") or DURATION_SECONDS)
        if holder not in ("", self._identity) and time.monotonic() - self._seen[1] < lasts:
            return holder
        transitions = int(spec.get("leaseTransitions") or 0) + (holder != self._identity)
        acquired = spec.get("acquireTime") if holder == self._identity else None
        return await self._write(self._api.replace({**live, "spec": self._spec(transitions, acquired)}))

    async def _write(self, request: Any) -> str:
        try:
            written: Tree = await request
        except ApiError as error:
            if error.status == 409:
                return "another operator"  # it was faster
            raise
        self._seen = str(written["metadata"]["resourceVersion"]), time.monotonic()
        return self._identity

    def _spec(self, transitions: int, acquired: str | None = None) -> Tree:
        now = _now()
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": DURATION_SECONDS,
            "acquireTime": acquired or now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }


def _now() -> str:
    return timestamp(datetime.now(UTC), "microseconds")
