"""The platform of the operator: plans carried out as objects of a Kubernetes cluster.

Children are written by server-side apply, only where they differ, and are garbage-collected through their owner
references: nothing is left when a WeightSync is deleted, also while the operator is down. An object that is in the way
and not ours is never taken over.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from weightsync_api.reports import Report
from weightsync_api.v1alpha1 import API_VERSION, KIND, WeightSync, WeightSyncStatus

from .curve_keys import CurveKeys
from .drift import covered
from .kinds import POD, SECRET, STATEFUL_SET
from .kube_api import ApiError, KubeApi, Tree
from .objects import ANNOTATION_HASH, Options, Rendered, child_names, render
from .plan import HTTP_PORT, ClusterAddresses, Key, Plan, PlanDefaults, plan
from .platform import Observed, Problem
from .pod_events import PodEvents
from .pod_status import observe_agents
from .readers import ChildId, Reader, Stored
from .reports_client import ReportsClient, ReportUnavailableError
from .resource_tree import UnreadableError, read_resource, read_status, status_tree, unreadable_status
from .rolling import outdated

log = logging.getLogger("weightsync.cluster")

RETRY_SECONDS = 30.0
"""After which what the API server refused is tried again: a quota may have been raised since."""
OLD_DEFINITION = (
    "the CustomResourceDefinition is older than this operator, and no status can be written: upgrade the chart with "
    "crds.enabled=true, or run weightsync crd | kubectl apply --server-side --force-conflicts -f -"
)

Contents = frozenset[tuple[ChildId, bytes]]
Children = dict[ChildId, Stored]

DEFAULTS = PlanDefaults(ClusterAddresses())


@dataclass(frozen=True)
class _Refusal:
    """What the API server did not take."""

    plan: Plan
    problem: Problem
    at: float


@dataclass(frozen=True)
class _Sender:
    """Who reports for a WeightSync."""

    uid: str
    """The WeightSync's."""
    pod: str
    """For life: a placement can't be changed."""
    receivers: int
    """How many it may report."""

    @classmethod
    def of(cls, ws: WeightSync, planned: Plan) -> _Sender:
        # Those that it had before a change of the spec count too: it goes on reporting of them for a while.
        receivers = max(planned.config.receivers, len(ws.status.agents) if ws.status else 0)
        return cls(ws.metadata.uid, planned.pod_sets[0].pod_name(0), receivers)


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
        self._events = PodEvents(api, wake)
        self._refusals: dict[Key, _Refusal] = {}
        self._settled: dict[tuple[Key, ChildId], tuple[str, bytes]] = {}
        """Child -> (hash, content) as the API server left it, where that never covers the plan."""
        self._clean: dict[Key, tuple[bytes, Contents]] = {}
        """What was found as planned: it is compared again once the plan or an object is another one."""
        self._made: dict[Key, tuple[bytes, Contents, Rendered]] = {}
        """What `observe` has rendered, for the `apply` that follows."""
        self._beyond: dict[Key, tuple[bytes, tuple[str, ...]]] = {}
        """What of the pods of a plan goes beyond the Pod Security level restricted."""
        self._senders: dict[Key, _Sender] = {}
        """Whom `report` asks, as the last `observe` found it."""

    async def close(self) -> None:
        await self._reports.close()

    # --- the platform's interface -----------------------------------------------------------------------------------

    def defaults(self, ws: WeightSync) -> PlanDefaults:
        return DEFAULTS

    async def resource(self, key: Key) -> WeightSync | None:
        """Raises ApiError, UnreadableError."""
        stored = await self._reader.resource(key)
        tree = stored.tree if stored is not None else None
        if tree is None or tree["metadata"].get("deletionTimestamp"):
            # In a foreground deletion it is there until its children are gone: they must not be made anew.
            return None
        return read_resource(tree)

    async def observe(self, key: Key) -> Observed:
        """Raises ApiError."""
        try:
            ws = await self.resource(key)
        except UnreadableError as error:
            return Observed(None, unreadable=await self._tell_unreadable(error))
        if ws is None:
            return Observed(None)
        planned = plan(ws, self.defaults(ws))
        self._senders[key] = _Sender.of(ws, planned)
        children = await self._children(planned)
        problems: list[Problem] = []
        fingerprint, beyond = self._beyond.get(key, (b"", ()))
        if not self._is_clean(planned, children) or fingerprint != _fingerprint(planned):
            made = render(planned, self._options, _keys(children, planned))
            problems = [*made.problems, *_in_the_way(planned, made, children)]
            if not problems:
                self._made[key] = _fingerprint(planned), _contents(children), made
            _, beyond = self._beyond[key] = _fingerprint(planned), tuple(made.beyond_restricted)
        refusal = self._refusals.get(key)
        if refusal is not None and not problems:
            if refusal.plan != planned or time.monotonic() - refusal.at > RETRY_SECONDS:
                await self._carry_out(planned, children)
                refusal = self._refusals.get(key)
            problems = [refusal.problem] if refusal else []
        pods = {name: pod.tree for name, pod in (await self._reader.pods(key)).items()}
        agents = observe_agents(planned, pods, await self._events.about(planned, pods, children))
        return Observed(ws, agents, tuple(problems), beyond)

    async def apply(self, planned: Plan) -> None:
        """Raises ApiError where the API server does not answer; what it refuses is told by the next `observe`."""
        children = await self._children(planned)
        await self._carry_out(planned, children)
        await self._roll(planned, children)

    async def report(self, key: Key, after: int, wait: float) -> Report | None:
        stored = await self._reader.resource(key)
        if stored is None:
            return None
        sender = self._senders.get(key)
        if sender is None or sender.uid != stored.uid:
            ws = read_resource(stored.tree)
            sender = self._senders[key] = _Sender.of(ws, plan(ws, self.defaults(ws)))
        pod = (await self._reader.pods(key)).get(sender.pod)
        address = str((pod.tree.get("status") or {}).get("podIP") or "") if pod is not None else ""
        if not address:
            return None
        host = f"[{address}]" if ":" in address else address
        try:
            return await self._reports.fetch(after, wait, f"http://{host}:{HTTP_PORT}", sender.receivers)
        except ReportUnavailableError as error:
            log.debug("%s: no report: %s", key, error)
            return None

    async def write_status(self, ws: WeightSync, status: WeightSyncStatus) -> None:
        """Raises ApiError. A WeightSync that is gone, or is another one by now, has no status to write."""
        meta = ws.metadata
        await self._write_status(meta.namespace, meta.name, meta.uid, status_tree(status))

    async def _tell_unreadable(self, error: UnreadableError) -> WeightSyncStatus:
        """Writes it into the status, once. Gives that."""
        meta = error.tree["metadata"]
        status = unreadable_status(error.tree, error.problem, datetime.now(UTC))
        if status != error.tree.get("status"):
            log.warning("%s", error)
            await self._write_status(meta["namespace"], meta["name"], meta["uid"], status)
        return read_status({**error.tree, "status": status}) or WeightSyncStatus()

    async def _write_status(self, namespace: str, name: str, uid: str, status: Tree) -> None:
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"namespace": namespace, "name": name, "uid": uid},
            "status": status,
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
        self._made.pop(key, None)
        self._beyond.pop(key, None)
        self._senders.pop(key, None)
        self._settled = {at: value for at, value in self._settled.items() if at[0] != key}
        self._events.forget(key)

    # --- applying ---------------------------------------------------------------------------------------------------

    async def _children(self, planned: Plan) -> Children:
        return dict(await self._reader.children(planned.key, child_names(planned)))

    def _is_clean(self, planned: Plan, children: Children) -> bool:
        return self._clean.get(planned.key) == (_fingerprint(planned), _contents(children))

    async def _carry_out(self, planned: Plan, children: Children) -> None:
        key = planned.key
        if self._is_clean(planned, children):
            return
        try:
            made = await self._look(planned, children)
            # What pods mount comes before them.
            before = [tree for tree in made.objects if tree["kind"] != STATEFUL_SET]
            await _together(self._apply_one(planned, tree, children) for tree in before)
            sets = [tree for tree in made.objects if tree["kind"] == STATEFUL_SET]
            await _together(self._apply_one(planned, tree, children) for tree in sets)
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
        self._clean[key] = _fingerprint(planned), _contents(children)

    async def _look(self, planned: Plan, children: Children) -> Rendered:
        """The objects to apply, once it is known that none of their names is taken. Raises _InTheWay, ApiError.

        Watches bring labelled objects only, and may lag: what is missing may be there all the same. And there are new
        keys only where there are none: other keys roll the pods.
        """
        fingerprint, contents, made = self._made.pop(planned.key, (b"", frozenset(), Rendered((), ())))
        seen = (fingerprint, contents) == (_fingerprint(planned), _contents(children))
        if not seen:
            made = render(planned, self._options, _keys(children, planned))
        missing = [at for tree in made.objects if (at := _child(tree)) not in children]

        async def look(kind: str, name: str) -> None:
            live = await self._api.get(kind, planned.namespace, name)
            if live is not None:
                children[kind, name] = Stored(kind, live)

        await _together(look(kind, name) for kind, name in missing)
        if not (seen and not missing) and (in_the_way := _in_the_way(planned, made, children)):
            raise _InTheWay(in_the_way[0])
        if not (missing and planned.config.curve_dir):
            return made
        return render(planned, self._options, _keys(children, planned) or CurveKeys.generate())

    async def _apply_one(self, planned: Plan, tree: Tree, children: Children) -> None:
        kind, _ = at = _child(tree)
        stored = children.get(at)
        if stored is not None:
            if self._is_as_planned(planned.key, at, tree, stored):
                return
            tree = {**tree, "metadata": {**tree["metadata"], "uid": stored.uid}}
        written = await self._api.apply(tree)
        self._reader.wrote(written)
        stored = children[at] = Stored(kind, written)
        if not covered(_body(tree), _body(written)):
            self._settled[planned.key, at] = tree["metadata"]["annotations"][ANNOTATION_HASH], stored.content

    def _is_as_planned(self, key: Key, at: ChildId, tree: Tree, stored: Stored) -> bool:
        live = stored.tree
        wanted = tree["metadata"]["annotations"][ANNOTATION_HASH]
        if (live["metadata"].get("annotations") or {}).get(ANNOTATION_HASH) != wanted:
            return False
        return covered(_body(tree), _body(live)) or self._settled.get((key, at)) == (wanted, stored.content)

    async def _prune(self, planned: Plan, made: Rendered, children: Children) -> None:
        wanted = {(tree["kind"], tree["metadata"]["name"]) for tree in made.objects}
        for (kind, name), stored in children.items():
            if (kind, name) in wanted:
                continue
            live = stored.tree
            if _ours(planned, live) and not live["metadata"].get("deletionTimestamp"):
                await self._api.delete(kind, planned.namespace, name, live["metadata"]["uid"])

    async def _roll(self, planned: Plan, children: Children) -> None:
        """Ends pods of an earlier revision that hold nothing, all at once."""
        pods = await self._reader.pods(planned.key)
        for pods_of in planned.pod_sets:
            live = children.get((STATEFUL_SET, pods_of.name))
            if live is None or not any(pods_of.pod_name(n) in pods for n in range(pods_of.replicas)):
                continue
            trees = {name: pod.tree for name, pod in pods.items()}
            for pod in outdated(pods_of, live.tree, trees):
                try:
                    await self._api.delete(POD, planned.namespace, pod.name, pod.uid)
                except ApiError as error:
                    if not error.refused:
                        raise
                    log.debug("%s: %s is left to the StatefulSet's controller: %s", planned.key, pod.name, error)
                    return

    def _refuse(self, planned: Plan, problem: Problem) -> None:
        key = planned.key
        known = self._refusals.get(key)
        self._refusals[key] = _Refusal(planned, problem, time.monotonic())
        if known is None or known.problem != problem:
            log.warning("%s: %s", key, problem.message)
            self._wake(key)


class _InTheWay(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def _keys(children: Children, planned: Plan) -> CurveKeys | None:
    """The keys in the Secret, where it is ours and whole."""
    for (kind, _), stored in children.items():
        if kind == SECRET and _ours(planned, live := stored.tree):
            try:
                data = {k: base64.b64decode(v, validate=True).decode() for k, v in (live.get("data") or {}).items()}
            except (binascii.Error, ValueError, TypeError):
                return None
            keys = CurveKeys(data)
            return keys if keys.complete else None
    return None


async def _together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All at once, and to the end. Raises the first one's error."""
    for done in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(done, BaseException):
            raise done


def _child(tree: Tree) -> ChildId:
    return tree["kind"], tree["metadata"]["name"]


def _contents(children: Children) -> Contents:
    return frozenset((child, stored.content) for child, stored in children.items())


def _fingerprint(planned: Plan) -> bytes:
    return hashlib.blake2b(planned.model_dump_json().encode(), digest_size=12).digest()


def _ours(planned: Plan, live: Tree) -> bool:
    owners = live["metadata"].get("ownerReferences") or ()
    return any(owner.get("controller") and owner.get("uid") == planned.config.uid for owner in owners)


def _in_the_way(planned: Plan, made: Rendered, children: Children) -> list[Problem]:
    """Objects that have the name of a planned one and are not ours."""
    live = [(at, children[at].tree) for tree in made.objects if (at := _child(tree)) in children]
    return [_not_ours(kind, tree) for (kind, _), tree in live if not _ours(planned, tree)]


def _not_ours(kind: str, live: Tree) -> Problem:
    meta = live["metadata"]
    owner = next((o for o in meta.get("ownerReferences") or () if o.get("controller")), None)
    whose = f"belongs to {owner.get('kind')} {owner.get('name')}" if owner else "was not made by the operator"
    return Problem(
        "NameTaken",
        f"{kind} {meta['name']} {whose}, and is left alone: delete or rename it, or give the WeightSync another name",
    )


def _body(tree: Tree) -> Tree:
    meta = tree["metadata"]
    kept = {name: meta.get(name) for name in ("labels", "annotations", "ownerReferences")}
    # What lists give has neither kind nor version.
    noise = ("apiVersion", "kind", "metadata", "status")
    return {**{name: value for name, value in tree.items() if name not in noise}, "metadata": kept}


def _word(reason: str) -> str:
    """One CamelCase word."""
    return reason if reason.isalpha() else "Refused"
