"""Pure: which pods of an earlier revision can go at once.

A StatefulSet's controller replaces one pod after another, and waits each time until the new one is ready: right for
receivers that hold weights and serve. Of pods that are not ready nothing is lost, and none of them need wait for
another: eight that can't pull a mistyped image all go when it is corrected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .plan import PodSet

Tree = Mapping[str, Any]

LABEL_REVISION = "controller-revision-hash"
"""Of a StatefulSet's pod: https://kubernetes.io/docs/concepts/workloads/controllers/statefulset/"""


class Outdated(NamedTuple):
    """A pod to delete."""

    name: str
    uid: str


def outdated(pods_of: PodSet, live_set: Tree, pods: Mapping[str, Tree]) -> Iterator[Outdated]:
    """The pods of a set that are not of its newest revision, not ready, and not ended already."""
    status = live_set.get("status") or {}
    newest = status.get("updateRevision")
    if not newest or int(status.get("observedGeneration") or 0) < int(live_set["metadata"].get("generation") or 0):
        return  # the controller has not seen the newest template yet
    for ordinal in range(pods_of.replicas):
        name = pods_of.pod_name(ordinal)
        meta = (pods.get(name) or {}).get("metadata") or {}
        revision = (meta.get("labels") or {}).get(LABEL_REVISION)
        if revision in (None, newest) or meta.get("deletionTimestamp") or _ready(pods[name]):
            continue
        yield Outdated(name, str(meta.get("uid", "")))


def _ready(pod: Tree) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
