"""The table of contract cases; brings both judges' sentences to one form. Used by tests/unit and tests/cluster."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).parent / "data"
MANIFESTS = DATA / "manifests"
BAD_MANIFESTS = DATA / "bad_manifests"

_TABLE = yaml.safe_load((DATA / "contract_cases.yaml").read_text())

BAD_MANIFEST_SENTENCES: dict[str, str] = _TABLE["bad_manifests"]
"""File of BAD_MANIFESTS -> what `weightsync run FILE` says after the file's name."""

BAD_SOURCES: dict[str, str] = _TABLE["bad_sources"]
"""File of BAD_MANIFESTS that only what it names on disk makes bad -> a part of the sentence."""


@dataclass(frozen=True)
class Case:
    """One manifest, and what both judges say of it."""

    name: str
    manifest: dict[str, Any]
    refused: tuple[str, ...] = ()
    """Canonical sentences (see `canonical`); empty: accepted."""
    update: dict[str, Any] | None = None
    """The manifest applied over the accepted one; `refused` is then about this update. Needs an API server."""
    holds: dict[str, Any] = field(default_factory=dict)
    """Values after defaulting, by dotted path."""
    local: bool = False
    """Only `weightsync run` can be asked."""

    def __str__(self) -> str:
        return self.name


def merged(target: Any, patch: Any) -> Any:
    """JSON merge patch (RFC 7396) of a copy of `target`."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def cases() -> list[Case]:
    """Every case of the table. Names are unique."""
    base = _TABLE["base"]
    found = []
    for row in _TABLE["cases"]:
        manifest = row.get("manifest") or merged(base, row.get("patch", {}))
        update = merged(manifest, row["then"]) if "then" in row else None
        refused = tuple(row.get("refused", ()))
        found.append(Case(row["name"], manifest, refused, update, row.get("holds", {}), row.get("local", False)))
    return found


def at(tree: Any, path: str) -> Any:
    """Value at a dotted path of a tree of mappings."""
    for key in path.split("."):
        tree = tree[key]
    return tree


def canonical(sentence: str) -> str:
    """A sentence of either judge without what only one of them says.

    The API server repeats the path (`spec.x in body should be ...`) and quotes a value (`Invalid value: "object": `)
    that says nothing; `weightsync run` adds which field was meant.
    """
    sentence = re.sub(r'; (did you mean ".*"\?|known here: .*|no fields are known here)$', "", sentence.strip())
    sentence = re.sub(r'Invalid value: ("(?:[^"\\]|\\.)*"|[-\w.]+|\{.*?\}|\[.*?\]): ', "", sentence, count=1)
    return re.sub(r"(?<=: )\S+ in body (?=should |must )", "", sentence, count=1)


_UNCHECKED = "some validation rules were not checked"
_SCALE = re.compile(r"^\.spec\.receivers\.replicas: ")  # the scale subresource says the same of replicas again


def server_sentences(stderr: str) -> list[str]:
    """Canonical sentences of what `kubectl apply` or `kubectl create` printed for one refused WeightSync."""
    text = stderr.strip()
    if "strict decoding error: " in text:
        return re.findall(r'unknown field "[^"]*"', text.split("strict decoding error: ", 1)[1])
    _, _, tail = text.partition(" is invalid:")
    lines = [line.strip().removeprefix("* ") for line in tail.splitlines() if line.strip()]
    return [canonical(line) for line in lines if _UNCHECKED not in line and not _SCALE.match(line)]
