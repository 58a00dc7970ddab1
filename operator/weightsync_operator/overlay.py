"""Pure: strategic merge of pod template overlays, and where an overlay contradicts what the agent needs.

Lists that Kubernetes merges by a key are merged by it here too; all others replace (tolerations are added).
https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
    "claims": "name",
}
"""Field of a pod template -> the key that its entries are merged by."""

HANDLERS = frozenset({"exec", "grpc", "httpGet", "tcpSocket"})
UNIONS: Mapping[str, frozenset[str]] = {
    "startupProbe": HANDLERS,
    "livenessProbe": HANDLERS,
    "readinessProbe": HANDLERS,
}
"""Field -> of these fields in it only one may be set. A template's own takes the place of another: a null, which would
take it away too, never reaches the API server by `kubectl apply`, which drops it."""

ADDED = frozenset({"tolerations"})
"""Lists whose entries are added."""

MAX_SHOWN = 60


class OverlayError(Exception):
    """An overlay has another shape than a pod template; `path` is the field's below the template."""

    def __init__(self, path: str, sentence: str) -> None:
        super().__init__(sentence)
        self.path = path


def merge(base: Any, overlay: Any, path: str = "") -> Any:
    """`base` with `overlay` over it; neither is changed. A null takes a field away. Raises OverlayError."""
    if isinstance(base, Mapping):
        if not isinstance(overlay, Mapping):
            raise OverlayError(path, f"is {shown(overlay)}, where an object belongs")
        merged = dict(base)
        for key, value in overlay.items():
            here = f"{path}.{key}" if path else str(key)
            if value is None:
                merged.pop(key, None)
            elif key in KEYS:
                merged[key] = _merge_keyed(base.get(key) or [], value, KEYS[key], here)
            elif key in ADDED:
                merged[key] = [*(base.get(key) or []), *_entries(value, here)]
            elif isinstance(base.get(key), Mapping | list):
                merged[key] = merge(_without_others(base[key], value, UNIONS.get(key)), value, here)
            else:
                merged[key] = value
        return merged
    if isinstance(base, list) and not isinstance(overlay, list):
        raise OverlayError(path, f"is {shown(overlay)}, where a list belongs")
    return overlay


def clashes(needed: Any, overlay: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every field that both set, to different values: (path, what the overlay has, what is needed)."""
    if isinstance(needed, Mapping) and isinstance(overlay, Mapping):
        for key in needed.keys() & overlay.keys():
            here = f"{path}.{key}" if path else str(key)
            if key in KEYS:
                theirs = overlay[key] if isinstance(overlay[key], list) else []
                by_key = {entry.get(KEYS[key]): entry for entry in theirs if isinstance(entry, Mapping)}
                for entry in needed[key]:
                    name = entry[KEYS[key]]
                    if name in by_key:
                        yield from clashes(entry, by_key[name], f"{here}[{name}]")
            elif key not in ADDED and overlay[key] is not None:
                yield from clashes(needed[key], overlay[key], here)
    elif not _same(needed, overlay):
        yield path, overlay, needed


def _without_others(base: Any, overlay: Any, union: frozenset[str] | None) -> Any:
    if union is None or not isinstance(overlay, Mapping) or not union & overlay.keys():
        return base
    return {key: value for key, value in base.items() if key not in union or key in overlay}


def _merge_keyed(base: list[Any], overlay: Any, key: str, path: str) -> list[Any]:
    merged = {entry[key]: entry for entry in base}
    for index, entry in enumerate(_entries(overlay, path)):
        here = f"{path}[{index}]"
        if not isinstance(entry, Mapping) or entry.get(key) in (None, ""):
            raise OverlayError(here, f"has no {key}: entries are merged by it")
        name = entry[key]
        if not isinstance(name, str | int):
            raise OverlayError(f"{here}.{key}", f"is {shown(name)}, where text belongs")
        if name in merged and "valueFrom" in entry:
            merged[name] = {k: v for k, v in merged[name].items() if k != "value"}
        elif name in merged and "value" in entry:
            merged[name] = {k: v for k, v in merged[name].items() if k != "valueFrom"}
        elif name in merged and path.endswith("volumes") and not merged[name].keys() & entry.keys() - {key}:
            merged[name] = {}  # of another kind: a volume has one
        merged[name] = merge(merged.get(name, {}), entry, f"{path}[{name}]")
    return list(merged.values())


def _entries(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise OverlayError(path, f"is {shown(value)}, where a list belongs")
    return value


def _same(one: Any, other: Any) -> bool:
    """As the API server reads them: the quantity 1 is "1"."""
    if isinstance(one, bool) or isinstance(other, bool) or isinstance(one, Mapping | list):
        return bool(one == other)
    return str(one) == str(other)


def shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"
