"""Events on transitions of conditions, and on nothing else: `kubectl describe` shows them, and they don't pile up."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from weightsync_api.v1alpha1 import API_VERSION, KIND, ConditionType, WeightSync, WeightSyncStatus

from .kinds import EVENT, PLACES
from .kube_api import ApiError, KubeApi, Tree
from .objects import MANAGER
from .text import timestamp

log = logging.getLogger("weightsync.events")

MAX_MESSAGE = 1024
"""Characters, as the API server allows."""

_ALARMS = frozenset(
    {
        ConditionType.MEMORY_STABLE,
        ConditionType.ACKS_TIMELY,
        ConditionType.TRANSPORT_OPTIMAL,
        ConditionType.IPC_VERIFIED,
        ConditionType.PODS_RESTRICTED,
    }
)


class Transition(NamedTuple):
    """One event."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def transitions(before: WeightSyncStatus | None, after: WeightSyncStatus) -> Iterator[Transition]:
    """What is worth an event: Ready that turned or has another reason for being False, an alarm that began or ended,
    a suspension."""
    old = {c.type: c for c in before.conditions} if before else {}
    for now in after.conditions:
        was = old.get(now.type)
        if was is not None and (was.status, was.reason) == (now.status, now.reason):
            continue
        if now.type == ConditionType.READY:
            if now.status == "True":
                if was is None or was.status != "True":
                    yield Transition("Normal", now.reason, now.message)
            elif was is not None and now.reason not in ("Suspended", "Starting"):
                expected = now.reason.startswith("WaitingFor")
                yield Transition("Normal" if expected else "Warning", now.reason, now.message)
        elif now.type in _ALARMS:
            if now.status == "False":
                yield Transition("Warning", now.reason, now.message)
            elif now.status == "True" and was is not None and was.status == "False":
                yield Transition("Normal", now.reason, now.message)
        elif now.type == ConditionType.SUSPENDED and "True" in (now.status, was.status if was else ""):
            yield Transition("Normal", "Suspended" if now.status == "True" else "Resumed", now.message)


class EventPoster:
    """Writes events about WeightSyncs."""

    def __init__(self, api: KubeApi, instance: str) -> None:
        self._api = api
        self._instance = instance

    async def post(self, ws: WeightSync, transition: Transition) -> None:
        """Never raises ApiError: an event that is not written is a line in the log."""
        try:
            await self._api.create(self._event(ws, transition))
        except ApiError as error:
            log.warning("%s/%s: the event %s was not written: %s", *_place(ws), transition.reason, error)

    def _event(self, ws: WeightSync, transition: Transition) -> Tree:
        namespace, name = _place(ws)
        now = timestamp(datetime.now(UTC))
        message = transition.message
        return {
            "apiVersion": PLACES[EVENT].api_version,
            "kind": EVENT,
            "metadata": {"namespace": namespace, "name": f"{name}.{uuid.uuid4().hex[:16]}"},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "namespace": namespace,
                "name": name,
                "uid": ws.metadata.uid,
            },
            "type": transition.type,
            "reason": transition.reason,
            "message": message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…",
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "reportingInstance": self._instance,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }


def _place(ws: WeightSync) -> tuple[str, str]:
    return ws.metadata.namespace, ws.metadata.name
