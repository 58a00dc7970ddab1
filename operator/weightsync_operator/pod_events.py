"""Events of pods that don't run, and of StatefulSets that lack pods: what nothing but an event tells."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .kinds import EVENT, STATEFUL_SET
from .kube_api import KubeApi
from .plan import Key, Plan
from .pod_status import wants_events
from .readers import ChildId, Stored

Tree = dict[str, Any]

EVENT_SECONDS = 1.5
"""For which the events of an object are not asked for again. A pod that waits changes nothing that is watched: passes
that only its events explain come by themselves, after twice this time, and then after twice as long each time."""
MAX_EVENT_WAIT = 64.0
MAX_EVENT_LOOKUPS = 3
"""Pods of one WeightSync whose events are asked for in one pass: a sentence names no more."""


class PodEvents:
    """Asks for them where they are needed, and no more often than a reader of the condition would notice.

    Args:
        api: the API server.
        wake: called where a pass is due because an event may have come.
    """

    def __init__(self, api: KubeApi, wake: Callable[[Key], None]) -> None:
        self._api = api
        self._wake = wake
        self._events: dict[Key, dict[str, tuple[float, list[Tree]]]] = {}
        """UID -> when its events were asked for, and they."""
        self._waits: dict[Key, tuple[float, float]] = {}
        """Key -> when the next pass for events is due, and how long after this one that is."""

    def forget(self, key: Key) -> None:
        self._waits.pop(key, None)
        self._events.pop(key, None)

    async def about(
        self, planned: Plan, pods: Mapping[str, Tree], children: Mapping[ChildId, Stored]
    ) -> dict[str, Sequence[Tree]]:
        """Of the pods that don't run for a reason that only their events have, and of sets that lack pods."""
        asked: list[tuple[str, str]] = []
        key = planned.key
        for pods_of in planned.pod_sets:
            names = [pods_of.pod_name(n) for n in range(pods_of.replicas)]
            live = children.get((STATEFUL_SET, pods_of.name))
            if live is not None and any(name not in pods for name in names):
                asked.append((pods_of.name, live.uid))
            asked += [(n, pods[n]["metadata"]["uid"]) for n in names if n in pods and wants_events(pods[n])]
        if not asked:
            self._waits.pop(key, None)
            self._events.pop(key, None)
            return {}
        due, wait = self._waits.get(key, (0.0, EVENT_SECONDS))
        if time.monotonic() >= due:
            wait = min(wait * 2, MAX_EVENT_WAIT)
            self._waits[key] = time.monotonic() + wait, wait
            asyncio.get_running_loop().call_later(wait, self._wake, key)
        known = self._events.get(key, {})
        self._events[key] = {uid: known[uid] for _, uid in asked if uid in known}
        return {name: await self._events_about(key, uid) for name, uid in asked[:MAX_EVENT_LOOKUPS]}

    async def _events_about(self, key: Key, uid: str) -> list[Tree]:
        shelf = self._events.setdefault(key, {})
        at, known = shelf.get(uid, (0.0, []))
        if at and time.monotonic() - at < EVENT_SECONDS:  # passes come in bursts
            return known
        found = await self._api.list(EVENT, key.namespace, fields=f"involvedObject.uid={uid}")
        names = ("type", "reason", "message", "lastTimestamp")
        kept = [{name: event.get(name) for name in names} for event in sorted(found, key=_when)]
        shelf[uid] = time.monotonic(), kept
        return kept


def _when(event: Mapping[str, Any]) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp") or "")
