"""The API server, in trees of JSON values: get, list, server-side apply, delete. Every request has a deadline.

The official client brings configuration, credentials and their renewal, and the connections.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio import client, config

from .kinds import PLACES
from .objects import MANAGER

log = logging.getLogger("weightsync.api")

Tree = dict[str, Any]
Trees = list[Tree]

REQUEST_SECONDS = 30.0
PAGE = 100
"""Objects in one answer to a list."""
MAX_CONNECTIONS = 16
"""Each has a quarter of a MiB of its own for TLS."""
JSON = "application/json"
APPLY = "application/apply-patch+yaml"
FORBIDDEN = 403
METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

Observer = Callable[[str, int, float], None]
"""Told of every request: its verb, the status (0: no answer), and the seconds that it took."""


class ApiError(Exception):
    """The API server did not do what was asked. `status` 0: it did not answer."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason

    @property
    def refused(self) -> bool:
        """It will refuse the same request again: by its rules, by a quota, or for want of a permission."""
        return self.status in (400, 403, 404, 405, 413, 415, 422)


class KubeApi:
    """One client of one API server. Make it with `connect`."""

    def __init__(self, configuration: Any, observer: Observer | None = None) -> None:
        self._client = client.ApiClient(configuration)
        self._observer = observer

    @classmethod
    async def connect(cls, kubeconfig: Path | None = None, observer: Observer | None = None) -> Self:
        """By the pod's service account; else, or where it is given, by a kubeconfig. Raises ConfigException."""
        configuration = client.Configuration()
        if kubeconfig is None:
            try:
                config.load_incluster_config(client_configuration=configuration)
            except config.ConfigException:
                await config.load_kube_config(client_configuration=configuration)
        else:
            await config.load_kube_config(str(kubeconfig), client_configuration=configuration)
        configuration.retries = False  # a pass that failed comes again as a whole
        configuration.connection_pool_maxsize = MAX_CONNECTIONS
        return cls(configuration, observer)

    async def close(self) -> None:
        await self._client.close()

    # --- requests ---------------------------------------------------------------------------------------------------

    async def get(self, kind: str, namespace: str, name: str) -> Tree | None:
        """The object; None where there is none. Raises ApiError."""
        try:
            return await self._request("get", _path(kind, namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(
        self, kind: str, namespace: str = "", *, labels: str = "", fields: str = "", metadata_only: bool = False
    ) -> list[Tree]:
        """The objects of a namespace, or of all. Raises ApiError."""
        pages = self.pages(kind, namespace, labels=labels, fields=fields, metadata_only=metadata_only)
        return [tree async for items, _ in pages for tree in items]

    async def pages(
        self, kind: str, namespace: str = "", *, labels: str = "", fields: str = "", metadata_only: bool = False
    ) -> AsyncIterator[tuple[Trees, str]]:
        """As `list`, some at a time, each with the version at which the whole list was so. Raises ApiError."""
        query = {k: v for k, v in {"labelSelector": labels, "fieldSelector": fields}.items() if v}
        query["limit"] = str(PAGE)
        accept = METADATA if metadata_only else JSON
        while True:
            answer = await self._request("list", _path(kind, namespace), query, accept=accept)
            meta = answer.get("metadata") or {}
            yield answer.get("items") or [], str(meta.get("resourceVersion") or "")
            if not meta.get("continue"):
                return
            query["continue"] = meta["continue"]
            del answer  # a page at a time: with all their fields, all objects are much larger than what is kept

    async def apply(self, tree: Tree, subresource: str = "") -> Tree:
        """Server-side apply as the operator, which takes every field that it sets. Gives the object as it is now.

        With `metadata.uid` only that very object is changed. Raises ApiError.
        """
        meta = tree["metadata"]
        path = _path(tree["kind"], meta["namespace"], meta["name"], subresource)
        return await self._request("apply", path, {"fieldManager": MANAGER, "force": "true"}, tree, APPLY)

    async def create(self, tree: Tree) -> Tree:
        """Raises ApiError."""
        path = _path(tree["kind"], tree["metadata"]["namespace"])
        return await self._request("create", path, {"fieldManager": MANAGER}, tree)

    async def replace(self, tree: Tree) -> Tree:
        """Fails with status 409 where `metadata.resourceVersion` is not the present one. Raises ApiError."""
        meta = tree["metadata"]
        path = _path(tree["kind"], meta["namespace"], meta["name"])
        return await self._request("update", path, {"fieldManager": MANAGER}, tree)

    async def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Deletes that very object; what is gone already is well. Raises ApiError."""
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }
        try:
            await self._request("delete", _path(kind, namespace, name), {}, body)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def _request(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Tree | None = None,
        content_type: str = JSON,
        accept: str = JSON,
    ) -> Tree:
        headers = {"Accept": accept, "Content-Type": content_type}
        method = _METHODS[verb]
        began, status = time.monotonic(), 0
        try:
            await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
            url = self._client.configuration.host + path + (f"?{urlencode(query)}" if query else "")
            async with asyncio.timeout(REQUEST_SECONDS):
                response = await self._client.call_api(method, url, headers, body, _request_timeout=REQUEST_SECONDS)
                status = response.status
                data = await response.read()
        except client.ApiException as error:
            raise ApiError(0, "NoAnswer", f"{verb} {path}: {error}") from None
        except TimeoutError:
            raise ApiError(0, "Timeout", f"{verb} {path}: no answer within {REQUEST_SECONDS:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(0, "NoAnswer", f"{verb} {path}: {error or type(error).__name__}") from None
        finally:
            if self._observer is not None:
                self._observer(verb, status, time.monotonic() - began)
        return _answer(verb, path, status, data)


_METHODS: Mapping[str, str] = {
    "get": "GET",
    "list": "GET",
    "apply": "PATCH",
    "create": "POST",
    "update": "PUT",
    "delete": "DELETE",
}


def _answer(verb: str, path: str, status: int, data: bytes) -> Tree:
    try:
        tree = json.loads(data)
    except ValueError:
        tree = None
    if not isinstance(tree, dict):
        tree = {}
        if 200 <= status < 300:
            raise ApiError(status, "Unreadable", f"{verb} {path}: the answer is no JSON object")
    if not 200 <= status < 300:
        message = str(tree.get("message") or data[:200].decode(errors="replace"))
        raise ApiError(status, str(tree.get("reason") or status), message)
    return tree


def _path(kind: str, namespace: str, name: str = "", subresource: str = "") -> str:
    version, plural = PLACES[kind]
    parts = ["/api" if version == "v1" else "/apis", version]
    if namespace:
        parts += ["namespaces", quote(namespace, safe="")]
    parts.append(plural)
    parts += [quote(part, safe="") for part in (name, subresource) if part]
    return "/".join(parts)
