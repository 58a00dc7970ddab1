"""A WeightSync between the API server's tree of JSON values and the models."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from weightsync_api.v1alpha1 import ConditionType, WeightSync, WeightSyncStatus

log = logging.getLogger("weightsync.cluster")

Tree = dict[str, Any]


class UnreadableError(Exception):
    """The API server's WeightSync is none that this operator knows: its CRD is of another version."""


def read_resource(tree: Mapping[str, Any]) -> WeightSync:
    """A WeightSync as the API server holds it. A status that can't be read is passed over, and written anew.

    Raises UnreadableError.
    """
    meta = tree["metadata"]
    plain = {name: value for name, value in tree.items() if name != "status"}
    try:
        ws = WeightSync.model_validate(plain)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UnreadableError(
            f"{meta.get('namespace')}/{meta.get('name')}: {where}: {first['msg']}: the CustomResourceDefinition and "
            "the operator are of different versions"
        ) from None
    if tree.get("status"):
        try:
            status = WeightSyncStatus.model_validate(tree["status"])
        except ValidationError as error:
            log.warning("%s/%s: its status is written anew: %s", meta.get("namespace"), meta.get("name"), error)
        else:
            ws = ws.model_copy(update={"status": _in_order(status)})
    return ws


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
