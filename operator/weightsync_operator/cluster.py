"""The platform of the operator: plans carried out as objects of a Kubernetes cluster.

Children are written by server-side apply, only where they differ, and are garbage-collected through their owner
references: nothing is left when a WeightSync is deleted, also while the operator is down. An object that is in the way
and not ours is never taken over.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from weightsync_api.reports import Report
from weightsync_api.v1alpha1 import API_VERSION, KIND, ConditionType, WeightSync, WeightSyncStatus

from .curve_keys import CurveKeys
from .drift import covered
from .kube_api import EVENT, ApiError, KubeApi, Tree
from .objects import ANNOTATION_HASH, SECRET, STATEFUL_SET, Options, Rendered, child_names, render
from .plan import HTTP_PORT, ClusterAddresses, Key, Plan, PlanDefaults, plan
from .platform import Observed, Problem
from .pod_status import observe_agents, wants_events
from .pods import keys_name
from .readers import ChildId, Reader, version_of
from .reports_client import ReportsClient, ReportUnavailableError

log = logging.getLogger("weightsync.cluster")

RETRY_SECONDS = 30.0
"""After which what the API server refused is tried again: a quota may have been raised since."""
EVENT_SECONDS = 1.5
"""For which the events of an object are not asked for again. A pod that waits changes nothing that is watched: passes
that only its events explain come by themselves, after twice this time, and then after twice as long each time."""
MAX_EVENT_WAIT = 64.0
MAX_EVENT_LOOKUPS = 3
"""Pods of one WeightSync whose events are asked for in one pass: a sentence names no more."""

OLD_DEFINITION = (
    "the CustomResourceDefinition is older than this operator, and no status can be written: upgrade the chart with "
    "crds.enabled=true, or run weightsync crd | kubectl apply --server-side --force-conflicts -f -"
)

Versions = frozenset[tuple[ChildId, tuple[str, str]]]

DEFAULTS = PlanDefaults(ClusterAddresses())


@dataclass(frozen=True)
class _Refusal:
    """What the API server did not take."""

    plan: Plan
    problem: Problem
    at: float


class ClusterPlatform:
    """Carries out plans on one cluster.

    Args:
        api: the API server.
        reader: where it reads what there is.
        options: what the installation decides.
        wake: called where a pass is due because of what this pass did.
    """

    def __init__(self, api: KubeApi, reader: Reader, options: Options, wake: Callable[[Key], None]) -> None:
        self._api = api
        self._reader = reader
        self._options = options
        self._wake = wake
        self._reports = ReportsClient()
        self._refusals: dict[Key, _Refusal] = {}
        self._settled: dict[tuple[Key, ChildId], tuple[str, str]] = {}
        """Child -> (hash, version) as the API server left it, where that never covers the plan."""
        self._events: dict[tuple[Key, str], tuple[float, list[Tree]]] = {}
        self._clean: dict[Key, tuple[Plan, Versions]] = {}
        """What was found as planned: it is compared again once the plan or an object is another one."""
        self._waits: dict[Key, tuple[float, float]] = {}
        """Key -> when the next pass for events is due, and how long after this one that is."""

    async def close(self) -> None:
        await self._reports.close()

    # --- the platform's interface -----------------------------------------------------------------------------------

    def defaults(self, ws: WeightSync) -> PlanDefaults:
        return DEFAULTS

    async def observe(self, key: Key) -> Observed:
        """Raises ApiError, UnreadableError."""
        tree = await self._reader.resource(key)
        if tree is None or tree["metadata"].get("deletionTimestamp"):
            # In a foreground deletion it is there until its children are gone: they must not be made anew.
            return Observed(None)
        ws = read_resource(tree)
        planned = plan(ws, self.defaults(ws))
        children = await self._children(planned)
        problems: list[Problem] = []
        if self._clean.get(key) != (planned, _versions(children)):
            made = render(planned, self._options, _keys(children, planned))
            problems = [*made.problems, *_foreign(planned, children)]
        refusal = self._refusals.get(key)
        if refusal is not None and not problems:
            if refusal.plan != planned or time.monotonic() - refusal.at > RETRY_SECONDS:
                await self._carry_out(planned, children)
                refusal = self._refusals.get(key)
            problems = [refusal.problem] if refusal else []
        pods = await self._reader.pods(key)
        agents = observe_agents(planned, pods, await self._events_of(planned, pods, children))
        return Observed(ws, agents, tuple(problems))

    async def apply(self, planned: Plan) -> None:
        """Raises ApiError where the API server does not answer; what it refuses is told by the next `observe`."""
        await self._carry_out(planned, await self._children(planned))

    async def report(self, key: Key, after: int, wait: float) -> Report | None:
        tree = await self._reader.resource(key)
        if tree is None:
            return None
        ws = read_resource(tree)
        sender = plan(ws, self.defaults(ws)).pod_sets[0].pod_name(0)
        pod = (await self._reader.pods(key)).get(sender) or {}
        address = str((pod.get("status") or {}).get("podIP") or "")
        if not address:
            return None
        host = f"[{address}]" if ":" in address else address
        try:
            return await self._reports.fetch(after, wait, f"http://{host}:{HTTP_PORT}")
        except ReportUnavailableError as error:
            log.debug("%s: no report: %s", key, error)
            return None

    async def write_status(self, ws: WeightSync, status: WeightSyncStatus) -> None:
        """Raises ApiError. A WeightSync that is gone, or is another one by now, has no status to write."""
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"namespace": ws.metadata.namespace, "name": ws.metadata.name, "uid": ws.metadata.uid},
            "status": status_tree(status),
        }
        try:
            self._reader.wrote(await self._api.apply(body, "status"))
        except ApiError as error:
            if "not declared in schema" in str(error):
                raise ApiError(error.status, error.reason, f"{error}: {OLD_DEFINITION}") from None
            if error.status not in (404, 409):
                raise

    async def delete(self, key: Key) -> None:
        """The API server's garbage collector ends what belonged to it; this only forgets."""
        self._refusals.pop(key, None)
        self._clean.pop(key, None)
        self._waits.pop(key, None)
        self._settled = {at: value for at, value in self._settled.items() if at[0] != key}
        self._events = {at: value for at, value in self._events.items() if at[0] != key}

    # --- applying ---------------------------------------------------------------------------------------------------

    async def _children(self, planned: Plan) -> dict[ChildId, Tree]:
        return dict(await self._reader.children(planned.key, child_names(planned)))

    async def _carry_out(self, planned: Plan, children: dict[ChildId, Tree]) -> None:
        key = planned.key
        if self._clean.get(key) == (planned, _versions(children)):
            return
        try:
            made = render(planned, self._options, await self._curve_keys(planned, children))
            for tree in made.objects:
                await self._apply_one(planned, tree, children)
            await self._prune(planned, made, children)
        except _InTheWay as error:
            self._refuse(planned, error.problem)
            return
        except ApiError as error:
            if not error.refused:
                raise
            self._refuse(planned, Problem(_word(error.reason), f"the API server refused a part of it: {error}"))
            return
        self._refusals.pop(key, None)
        self._clean[key] = planned, _versions(children)

    async def _curve_keys(self, planned: Plan, children: dict[ChildId, Tree]) -> CurveKeys | None:
        """Those that there are, and new ones only where there are none: other keys roll the pods."""
        if not planned.config.curve_dir:
            return None
        if (keys := _keys(children, planned)) is not None:
            return keys
        live = await self._api.get(SECRET, planned.namespace, keys_name(planned))
        if live is not None:
            if not _ours(planned, live):
                raise _InTheWay(_not_ours(live))
            children[SECRET, keys_name(planned)] = live
        return _keys(children, planned) or CurveKeys.generate()

    async def _apply_one(self, planned: Plan, tree: Tree, children: dict[ChildId, Tree]) -> None:
        at = (tree["kind"], tree["metadata"]["name"])
        live = children.get(at)
        if live is not None and self._is_as_planned(planned.key, at, tree, live):
            return
        if live is None:
            # Watches bring labelled objects only, and may lag: one of the same name may be there all the same.
            live = await self._api.get(*_place(tree))
            if live is not None and not _ours(planned, live):
                raise _InTheWay(_not_ours(live))
        if live is not None:
            tree = {**tree, "metadata": {**tree["metadata"], "uid": live["metadata"]["uid"]}}
        written = await self._api.apply(tree)
        children[at] = written
        self._reader.wrote(written)
        if not covered(_body(tree), _body(written)):
            self._settled[planned.key, at] = _version(tree, written)

    def _is_as_planned(self, key: Key, at: ChildId, tree: Tree, live: Tree) -> bool:
        wanted = tree["metadata"]["annotations"][ANNOTATION_HASH]
        if (live["metadata"].get("annotations") or {}).get(ANNOTATION_HASH) != wanted:
            return False
        return covered(_body(tree), _body(live)) or self._settled.get((key, at)) == _version(tree, live)

    async def _prune(self, planned: Plan, made: Rendered, children: dict[ChildId, Tree]) -> None:
        wanted = {(tree["kind"], tree["metadata"]["name"]) for tree in made.objects}
        for (kind, name), live in children.items():
            if (kind, name) not in wanted and _ours(planned, live) and not live["metadata"].get("deletionTimestamp"):
                await self._api.delete(kind, planned.namespace, name, live["metadata"]["uid"])

    def _refuse(self, planned: Plan, problem: Problem) -> None:
        key = planned.key
        known = self._refusals.get(key)
        self._refusals[key] = _Refusal(planned, problem, time.monotonic())
        if known is None or known.problem != problem:
            log.warning("%s: %s", key, problem.message)
            self._wake(key)

    # --- events -----------------------------------------------------------------------------------------------------

    async def _events_of(
        self, planned: Plan, pods: Mapping[str, Tree], children: Mapping[ChildId, Tree]
    ) -> dict[str, Sequence[Tree]]:
        """Of the pods that don't run for a reason that only their events have, and of sets that lack pods."""
        asked: list[tuple[str, str]] = []
        key = planned.key
        for pods_of in planned.pod_sets:
            names = [pods_of.pod_name(n) for n in range(pods_of.replicas)]
            live = children.get((STATEFUL_SET, pods_of.name))
            if live is not None and any(name not in pods for name in names):
                asked.append((pods_of.name, live["metadata"]["uid"]))
            asked += [(n, pods[n]["metadata"]["uid"]) for n in names if n in pods and wants_events(pods[n])]
        if not asked:
            self._waits.pop(key, None)
            return {}
        due, wait = self._waits.get(key, (0.0, EVENT_SECONDS))
        if time.monotonic() >= due:
            wait = min(wait * 2, MAX_EVENT_WAIT)
            self._waits[key] = time.monotonic() + wait, wait
            asyncio.get_running_loop().call_later(wait, self._wake, key)
        return {name: await self._events_about(key, uid) for name, uid in asked[:MAX_EVENT_LOOKUPS]}

    async def _events_about(self, key: Key, uid: str) -> list[Tree]:
        at, known = self._events.get((key, uid), (0.0, []))
        if at and time.monotonic() - at < EVENT_SECONDS:  # passes come in bursts
            return known
        found = await self._api.list(EVENT, key.namespace, fields=f"involvedObject.uid={uid}")
        names = ("type", "reason", "message", "lastTimestamp")
        kept = [{name: event.get(name) for name in names} for event in sorted(found, key=_when)]
        self._events[key, uid] = time.monotonic(), kept
        return kept


class UnreadableError(Exception):
    """The API server's WeightSync is none that this operator knows: its CRD is of another version."""


class _InTheWay(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


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


def _keys(children: Mapping[ChildId, Tree], planned: Plan) -> CurveKeys | None:
    """The keys in the Secret, where it is ours and whole."""
    for (kind, _), live in children.items():
        if kind == SECRET and _ours(planned, live):
            try:
                data = {k: base64.b64decode(v, validate=True).decode() for k, v in (live.get("data") or {}).items()}
            except (binascii.Error, ValueError, TypeError):
                return None
            keys = CurveKeys(data)
            return keys if keys.complete else None
    return None


def _versions(children: Mapping[ChildId, Tree]) -> Versions:
    return frozenset((child, version_of(tree)) for child, tree in children.items())


def _ours(planned: Plan, live: Tree) -> bool:
    owners = live["metadata"].get("ownerReferences") or ()
    return any(owner.get("controller") and owner.get("uid") == planned.config.uid for owner in owners)


def _foreign(planned: Plan, children: Mapping[ChildId, Tree]) -> list[Problem]:
    return [_not_ours(live) for live in children.values() if not _ours(planned, live)]


def _not_ours(live: Tree) -> Problem:
    meta = live["metadata"]
    owner = next((o for o in meta.get("ownerReferences") or () if o.get("controller")), None)
    whose = f"belongs to {owner.get('kind')} {owner.get('name')}" if owner else "was not made by the operator"
    return Problem(
        "NameTaken",
        f"{live.get('kind', 'an object')} {meta['name']} {whose}, and is left alone: delete or rename it, or give the "
        "WeightSync another name",
    )


def _place(tree: Tree) -> tuple[str, str, str]:
    return tree["kind"], tree["metadata"]["namespace"], tree["metadata"]["name"]


def _body(tree: Tree) -> Tree:
    meta = tree["metadata"]
    kept = {name: meta.get(name) for name in ("labels", "annotations", "ownerReferences")}
    # What lists give has neither kind nor version.
    noise = ("apiVersion", "kind", "metadata", "status")
    return {**{name: value for name, value in tree.items() if name not in noise}, "metadata": kept}


def _version(tree: Tree, live: Tree) -> tuple[str, str]:
    meta = live["metadata"]
    generation = str(meta.get("generation") or meta.get("resourceVersion", ""))
    return tree["metadata"]["annotations"][ANNOTATION_HASH], generation


def _when(event: Mapping[str, Any]) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp") or "")


def _word(reason: str) -> str:
    """One CamelCase word."""
    return reason if reason.isalpha() else "Refused"
