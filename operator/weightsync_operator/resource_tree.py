"""A WeightSync between the API server's tree of JSON values and the models."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import version
from typing import Any

from pydantic import ValidationError
from weightsync_api.v1alpha1 import ConditionType, WeightSync, WeightSyncStatus

from .platform import Problem
from .text import listed, timestamp

log = logging.getLogger("weightsync.cluster")

Tree = dict[str, Any]


class UnreadableError(Exception):
    """The API server's WeightSync is none that this operator knows: its CRD is of another version.

    `tree`: as the API server holds it. `problem`: why, and what to do.
    """

    def __init__(self, tree: Mapping[str, Any], problem: Problem) -> None:
        super().__init__(f"{tree['metadata'].get('namespace')}/{tree['metadata'].get('name')}: {problem.message}")
        self.tree = tree
        self.problem = problem


def read_resource(tree: Mapping[str, Any]) -> WeightSync:
    """A WeightSync as the API server holds it. A status that can't be read is passed over, and written anew.

    Raises UnreadableError.
    """
    plain = {name: value for name, value in tree.items() if name != "status"}
    try:
        ws = WeightSync.model_validate(plain)
    except ValidationError as error:
        raise UnreadableError(tree, _problem(error)) from None
    return ws.model_copy(update={"status": read_status(tree)})


def read_status(tree: Mapping[str, Any]) -> WeightSyncStatus | None:
    """None: it has none, or none that can be read. Conditions that only a later operator knows are passed over."""
    found = tree.get("status")
    if not found:
        return None
    kinds = set(ConditionType)
    known = [c for c in found.get("conditions") or () if c.get("type") in kinds]
    try:
        return _in_order(WeightSyncStatus.model_validate({**found, "conditions": known}))
    except ValidationError as error:
        meta = tree["metadata"]
        log.warning("%s/%s: its status is written anew: %s", meta.get("namespace"), meta.get("name"), error)
        return None


def unreadable_status(tree: Mapping[str, Any], problem: Problem, now: datetime) -> Tree:
    """The status of a WeightSync that can't be read: Ready and Progressing tell the problem, and all else stays as it
    is, also what only a later operator knows.
    """
    status: Tree = dict(tree.get("status") or {})
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    for kind in (ConditionType.READY.value, ConditionType.PROGRESSING.value):
        old = conditions.get(kind) or {}
        stamp = timestamp(now)
        conditions[kind] = {
            "type": kind,
            "status": "False",
            "reason": problem.reason,
            "message": problem.message,
            "lastTransitionTime": old["lastTransitionTime"] if old.get("status") == "False" else stamp,
            "observedGeneration": tree["metadata"].get("generation", 0),
        }
    status["conditions"] = list(conditions.values())
    summary: Tree = dict(status.get("summary") or {})
    if summary.get("status") != "Complete":  # by which a sender that finished is known later
        summary["status"] = "Degraded"
    return {**status, "summary": summary}


def _problem(error: ValidationError) -> Problem:
    us = f"weightsync-operator {version('weightsync')}"
    after = (
        "Until then nothing is made or changed, what runs goes on, and the rest of this status is the last known one"
    )
    told, strange = [], []
    for found in error.errors(include_url=False):
        where = ".".join(str(part) for part in found["loc"])
        told.append(f"{where}: {found['msg']}")
        if found["type"] == "extra_forbidden":
            strange.append(f"{where}: {us} does not know this field")
        elif found["type"] in ("enum", "literal_error"):
            strange.append(f"{where}: {us} does not know the value {str(found['input'])[:64]!r}")
    if strange:
        return Problem(
            "UnreadableSpec",
            f"{listed(strange)}; it is older than the CustomResourceDefinition: upgrade the operator, or take this out "
            f"of the spec. {after}",
        )
    return Problem(
        "UnreadableSpec",
        f"{listed(told)}; {us} and the CustomResourceDefinition are of different versions: bring both to the same one. "
        f"{after}",
    )


def status_tree(status: WeightSyncStatus) -> Tree:
    """As it is stored: steps are told apart by their number, of which the API server takes each once."""
    tree: Tree = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    tree["history"] = list({step["step"]: step for step in tree["history"]}.values())
    return tree


def _in_order(status: WeightSyncStatus) -> WeightSyncStatus:
    """Server-side apply keeps entries by their keys, not by their order."""
    kinds = list(ConditionType)
    return status.model_copy(
        update={
            "conditions": sorted(status.conditions, key=lambda c: kinds.index(c.type)),
            "history": sorted(status.history, key=lambda step: (step.started_at, step.step)),
            "agents": sorted(status.agents, key=lambda agent: agent.rank),
        }
    )
