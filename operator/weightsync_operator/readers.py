"""Where the platform reads what there is: from the API server each time, or from what watches brought.

A platform that reads from watches asks the API server nothing while nothing changes.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from weightsync_api.v1alpha1 import API_VERSION, KIND

from .kinds import POD, STATEFUL_SET
from .kube_api import KubeApi
from .plan import LABEL_NAME, Key
from .pod_status import trimmed

Tree = dict[str, Any]
ChildId = tuple[str, str]
"""Kind and name."""


class Stored:
    """What matters of one object at one version: of a pod its state, of a child its plan.

    It is kept as compressed JSON: with 1,000 WeightSyncs there are some 16,000 objects, which as Python's objects
    would be about ten times as large, and few of them are looked at twice.
    """

    __slots__ = ("_packed", "content", "uid", "version")

    def __init__(self, kind: str, tree: Tree) -> None:
        self.uid, self.version = version_of(tree)
        kept = trimmed(tree) if kind == POD else _without_noise(kind, tree)
        meta = {name: value for name, value in kept["metadata"].items() if name != "resourceVersion"}
        kept = {**kept, "metadata": meta}
        for name, value in (("apiVersion", API_VERSION), ("kind", KIND)):
            kept.pop(name, None)  # watches tell them, lists don't
            kept |= {name: value} if kind == KIND else {}
        text = json.dumps(kept, separators=(",", ":"), sort_keys=True).encode()
        self.content = hashlib.blake2b(text, digest_size=12).digest()
        """Differs wherever two versions differ in what matters."""
        self._packed = zlib.compress(text, 1)

    @property
    def tree(self) -> Tree:
        """A new copy each time."""
        found: Tree = json.loads(zlib.decompress(self._packed))
        found["metadata"]["resourceVersion"] = self.version
        return found


class Reader(Protocol):
    """Reads one WeightSync's objects. Raises ApiError."""

    async def resource(self, key: Key) -> Stored | None: ...

    async def children(self, key: Key, ids: Sequence[ChildId]) -> Mapping[ChildId, Stored]:
        """Those of `ids` that exist; they need not be ours."""
        ...

    async def pods(self, key: Key) -> Mapping[str, Stored]:
        """By name; their trees are as `pod_status.trimmed`."""
        ...

    def wrote(self, tree: Tree) -> None:
        """The platform has written this object: no reading from now on may give an older one."""


class LiveReader:
    """Asks the API server each time."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api

    async def resource(self, key: Key) -> Stored | None:
        tree = await self._api.get(KIND, key.namespace, key.name)
        return Stored(KIND, tree) if tree is not None else None

    async def children(self, key: Key, ids: Sequence[ChildId]) -> Mapping[ChildId, Stored]:
        found = {}
        for kind, name in ids:
            tree = await self._api.get(kind, key.namespace, name)
            if tree is not None:
                found[kind, name] = Stored(kind, tree)
        return found

    async def pods(self, key: Key) -> Mapping[str, Stored]:
        pods = await self._api.list(POD, key.namespace, labels=f"{LABEL_NAME}={key.name}")
        return {pod["metadata"]["name"]: Stored(POD, pod) for pod in pods}

    def wrote(self, tree: Tree) -> None:
        pass


class WatchedReader:
    """Keeps what watches bring: `put` and `drop`. Only objects with the label weightsync.dev/name are watched, so that
    one in the way that is not ours has to be looked for: an object that is missing here is asked for once a write is
    due, by the platform.
    """

    def __init__(self) -> None:
        self._resources: dict[Key, Stored] = {}
        self._children: dict[Key, dict[ChildId, Stored]] = {}
        self._pods: dict[Key, dict[str, Stored]] = {}

    def put(self, kind: str, tree: Tree) -> Key | None:
        """Takes an object in, unless this version or a newer one is known. Gives the WeightSync that has news by it:
        another content, not only another version."""
        key = owner_key(kind, tree)
        if key is None:
            return None
        shelf, at = self._place(kind, key, tree["metadata"]["name"])
        known = shelf.get(at)
        if known is not None and not _newer(version_of(tree), known):
            return None
        stored = shelf[at] = Stored(kind, tree)
        return None if known is not None and known.content == stored.content else key

    def drop(self, kind: str, tree: Tree) -> Key | None:
        """Takes an object out, unless another one of its name is there by now. Gives the WeightSync that it was of."""
        key = owner_key(kind, tree)
        if key is not None:
            self._drop(kind, key, tree["metadata"]["name"], version_of(tree)[0])
        return key

    def knows(self, kind: str, tree: Mapping[str, Any]) -> bool:
        """Whether this version of an object, or a newer one, is here. `tree`: its metadata will do."""
        key = owner_key(kind, tree)
        if key is None:
            return True
        shelf, at = self._place(kind, key, tree["metadata"]["name"])
        return at in shelf and not _newer(version_of(tree), shelf[at])

    def keep(self, kind: str, namespace: str, uids: set[str], version: str) -> set[Key]:
        """Takes out what was gone by `version`, when these were all objects of a kind (of a namespace; empty: of all).

        Gives the WeightSyncs that have news by it.
        """
        gone = [
            (key, name, stored)
            for key, name, stored in self._all(kind)
            if namespace in ("", key.namespace) and stored.uid not in uids and _at_most(stored.version, version)
        ]
        for key, name, stored in gone:
            self._drop(kind, key, name, stored.uid)
        return {key for key, _, _ in gone}

    def versions(self) -> dict[Key, tuple[str, str]]:
        """UID and version of every WeightSync."""
        return {key: (stored.uid, stored.version) for key, stored in self._resources.items()}

    async def resource(self, key: Key) -> Stored | None:
        return self._resources.get(key)

    async def children(self, key: Key, ids: Sequence[ChildId]) -> Mapping[ChildId, Stored]:
        known = self._children.get(key, {})
        return {child: known[child] for child in ids if child in known}

    async def pods(self, key: Key) -> Mapping[str, Stored]:
        return self._pods.get(key, {})

    def wrote(self, tree: Tree) -> None:
        self.put(tree["kind"], tree)

    def _place(self, kind: str, key: Key, name: str) -> tuple[dict[Any, Stored], Any]:
        """The shelf that an object is on, and its place there."""
        if kind == KIND:
            return self._resources, key
        if kind == POD:
            return self._pods.setdefault(key, {}), name
        return self._children.setdefault(key, {}), (kind, name)

    def _drop(self, kind: str, key: Key, name: str, uid: str) -> None:
        shelf, at = self._place(kind, key, name)
        if at in shelf and shelf[at].uid == uid:
            del shelf[at]
        if not self._pods.get(key, True):
            del self._pods[key]
        if not self._children.get(key, True):
            del self._children[key]

    def _all(self, kind: str) -> Iterator[tuple[Key, str, Stored]]:
        if kind == KIND:
            yield from ((key, key.name, stored) for key, stored in self._resources.items())
        elif kind == POD:
            yield from ((key, at, stored) for key, shelf in self._pods.items() for at, stored in shelf.items())
        else:
            for key, shelf in self._children.items():
                yield from ((key, name, stored) for (of, name), stored in shelf.items() if of == kind)


def owner_key(kind: str, tree: Mapping[str, Any]) -> Key | None:
    """Which WeightSync an object is, or is labelled as belonging to."""
    meta = tree["metadata"]
    name = meta["name"] if kind == KIND else (meta.get("labels") or {}).get(LABEL_NAME)
    return Key(meta["namespace"], name) if name else None


def version_of(tree: Mapping[str, Any]) -> tuple[str, str]:
    """UID and version of an object."""
    meta = tree["metadata"]
    return str(meta.get("uid", "")), str(meta.get("resourceVersion", ""))


def _without_noise(kind: str, tree: Tree) -> Tree:
    """What of an object is read: not who manages which field, and of a child's status only a set's revision."""
    kept = {**tree, "metadata": {key: value for key, value in tree["metadata"].items() if key != "managedFields"}}
    if kind != KIND:
        status = kept.pop("status", None) or {}
        if kind == STATEFUL_SET:
            kept["status"] = {name: status.get(name) for name in ("observedGeneration", "updateRevision")}
    return kept


def _newer(one: tuple[str, str], known: Stored) -> bool:
    """Whether this is a later version of the object, or another object."""
    uid, version = one
    return uid != known.uid or (version != known.version and not _at_most(version, known.version))


def _at_most(one: str, other: str) -> bool:
    """Versions of one kind are numbers that grow."""
    return one.isdigit() and other.isdigit() and int(one) <= int(other)
