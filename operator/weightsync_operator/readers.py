"""Where the platform reads what there is: from the API server each time, or from what watches brought.

A platform that reads from watches asks the API server nothing while nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from weightsync_api.v1alpha1 import KIND

from .kube_api import POD, KubeApi
from .plan import LABEL_NAME, Key
from .pod_status import trimmed

Tree = dict[str, Any]
ChildId = tuple[str, str]
"""Kind and name."""


class Reader(Protocol):
    """Reads one WeightSync's objects. Raises ApiError."""

    async def resource(self, key: Key) -> Tree | None: ...

    async def children(self, key: Key, ids: Sequence[ChildId]) -> Mapping[ChildId, Tree]:
        """Those of `ids` that exist; they need not be ours."""
        ...

    async def pods(self, key: Key) -> Mapping[str, Tree]:
        """By name, as `pod_status.trimmed`."""
        ...

    def wrote(self, tree: Tree) -> None:
        """The platform has written this object: no reading from now on may give an older one."""


class LiveReader:
    """Asks the API server each time."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api

    async def resource(self, key: Key) -> Tree | None:
        return await self._api.get(KIND, key.namespace, key.name)

    async def children(self, key: Key, ids: Sequence[ChildId]) -> Mapping[ChildId, Tree]:
        found = {}
        for kind, name in ids:
            tree = await self._api.get(kind, key.namespace, name)
            if tree is not None:
                found[kind, name] = tree
        return found

    async def pods(self, key: Key) -> Mapping[str, Tree]:
        pods = await self._api.list(POD, key.namespace, labels=f"{LABEL_NAME}={key.name}")
        return {pod["metadata"]["name"]: trimmed(pod) for pod in pods}

    def wrote(self, tree: Tree) -> None:
        pass


class WatchedReader:
    """Keeps what watches bring: `put` and `drop`. Only objects with the label weightsync.dev/name are watched, so that
    one in the way that is not ours has to be looked for: an object that is missing here is asked for once a write is
    due, by the platform.
    """

    def __init__(self) -> None:
        self._resources: dict[Key, Tree] = {}
        self._children: dict[Key, dict[ChildId, Tree]] = {}
        self._pods: dict[Key, dict[str, Tree]] = {}

    def put(self, kind: str, tree: Tree) -> Key | None:
        """Takes an object in, unless this version or a newer one is known. Gives the WeightSync that has news by it."""
        key = owner_key(kind, tree)
        if key is None:
            return None
        name = tree["metadata"]["name"]
        shelf: dict[Any, Tree]
        at: Any
        if kind == KIND:
            shelf, at = self._resources, key
        elif kind == POD:
            shelf, at, tree = self._pods.setdefault(key, {}), name, trimmed(tree)
        else:
            shelf, at = self._children.setdefault(key, {}), (kind, name)
        if at in shelf and not _newer(tree, shelf[at]):
            return None
        shelf[at] = without_noise(tree)
        return key

    def drop(self, kind: str, tree: Tree) -> Key | None:
        """Takes an object out. Gives the WeightSync that it belonged to."""
        key = owner_key(kind, tree)
        if key is None:
            return None
        name, uid = tree["metadata"]["name"], tree["metadata"].get("uid")
        if kind == KIND:
            if _uid(self._resources.get(key)) == uid:
                del self._resources[key]
        elif kind == POD:
            _out(self._pods, key, name, uid)
        else:
            _out(self._children, key, (kind, name), uid)
        return key

    def replace(self, kind: str, trees: Sequence[Tree], namespace: str, version: str) -> set[Key]:
        """Takes in all objects of a kind (of a namespace; empty: of all) as they were at `version`, and out what was
        gone by then. Gives the WeightSyncs that have news by it."""
        news = {key for tree in trees if (key := self.put(kind, {"kind": kind, **tree})) is not None}
        there = {str(tree["metadata"].get("uid")) for tree in trees}
        for tree in self._all(kind, namespace):
            uid, known = version_of(tree)
            if uid not in there and known.isdigit() and version.isdigit() and int(known) <= int(version):
                gone = self.drop(kind, tree)
                news |= {gone} if gone is not None else set()
        return news

    def _all(self, kind: str, namespace: str) -> list[Tree]:
        if kind == KIND:
            found = [(key, tree) for key, tree in self._resources.items()]
        elif kind == POD:
            found = [(key, tree) for key, shelf in self._pods.items() for tree in shelf.values()]
        else:
            shelves = self._children.items()
            found = [(key, tree) for key, shelf in shelves for at, tree in shelf.items() if at[0] == kind]
        return [tree for key, tree in found if namespace in ("", key.namespace)]

    def versions(self) -> dict[Key, tuple[str, str]]:
        """UID and version of every WeightSync."""
        return {key: version_of(tree) for key, tree in self._resources.items()}

    async def resource(self, key: Key) -> Tree | None:
        return self._resources.get(key)

    async def children(self, key: Key, ids: Sequence[ChildId]) -> Mapping[ChildId, Tree]:
        known = self._children.get(key, {})
        return {child: known[child] for child in ids if child in known}

    async def pods(self, key: Key) -> Mapping[str, Tree]:
        return self._pods.get(key, {})

    def wrote(self, tree: Tree) -> None:
        self.put(tree["kind"], tree)


def owner_key(kind: str, tree: Mapping[str, Any]) -> Key | None:
    """Which WeightSync an object is, or is labelled as belonging to."""
    meta = tree["metadata"]
    name = meta["name"] if kind == KIND else (meta.get("labels") or {}).get(LABEL_NAME)
    return Key(meta["namespace"], name) if name else None


def version_of(tree: Mapping[str, Any]) -> tuple[str, str]:
    """UID and version of an object."""
    meta = tree["metadata"]
    return str(meta.get("uid", "")), str(meta.get("resourceVersion", ""))


def without_noise(tree: Tree) -> Tree:
    meta = {key: value for key, value in tree["metadata"].items() if key != "managedFields"}
    return {**tree, "metadata": meta}


def _out(shelves: dict[Key, dict[Any, Tree]], key: Key, at: Any, uid: Any) -> None:
    """Unless another object of the same name is there by now."""
    shelf = shelves.get(key, {})
    if _uid(shelf.get(at)) == uid:
        shelf.pop(at, None)
    if not shelf:
        shelves.pop(key, None)


def _uid(tree: Tree | None) -> Any:
    return tree["metadata"].get("uid") if tree else None


def _newer(tree: Tree, known: Tree) -> bool:
    """Whether this is a later version of the object, or another object. Versions of one kind are numbers that grow."""
    one, other = tree["metadata"], known["metadata"]
    if one.get("uid") != other.get("uid"):
        return True
    versions = str(one.get("resourceVersion", "")), str(other.get("resourceVersion", ""))
    if not all(version.isdigit() for version in versions):
        return versions[0] != versions[1]
    return int(versions[0]) > int(versions[1])
