"""Manifest files -> WeightSyncs, or sentences that say what is wrong with them.

`weightsync run` refuses what `kubectl apply` would, in the API server's words: the path first, then what it should
be (fault_sentences.py), without the parts that tell a reader nothing (`Invalid value: "object"`, `in body`). Never a
traceback, never more than one line a fault.

    try:
        resources = read_weightsyncs(path)
    except ManifestError as error:
        for sentence in error.sentences: ...   # print, exit code 2

Whether files and GPUs that a manifest names exist is not judged here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .base import DEFER_RULES, broken_rules
from .documents import MAX_BYTES, DocumentError, read_documents
from .fault_sentences import (
    MAX_QUOTED,
    broken_rule,
    did_you_mean,
    printable,
    quoted,
    sentence_of,
    shown,
    type_name,
    unknown_field,
)
from .v1alpha1 import API_VERSION, KIND, WeightSync

MAX_SENTENCES = 20
"""Sentences told of one document; then how many more there are."""

OBJECT_META = frozenset({
    "name", "generateName", "namespace", "selfLink", "uid", "resourceVersion", "generation", "creationTimestamp",
    "deletionTimestamp", "deletionGracePeriodSeconds", "labels", "annotations", "ownerReferences", "finalizers",
    "managedFields",
})  # fmt: skip
"""Fields of metav1.ObjectMeta."""


@dataclass(frozen=True)
class Document:
    """One document of a manifest file: a WeightSync, or the sentences that say why it is none.

    `index` counts the file's documents from 1; 0: the sentences are about the file as a whole.
    `name` is `metadata.name` as far as it could be read, else empty. Sentences don't name the file.
    """

    index: int
    name: str
    resource: WeightSync | None
    errors: tuple[str, ...] = ()


class ManifestError(Exception):
    """A manifest file can't be used. `sentences`: each names the file, and the document where there are several."""

    def __init__(self, sentences: Sequence[str]) -> None:
        super().__init__("\n".join(sentences))
        self.sentences = tuple(sentences)


def read_weightsyncs(path: Path) -> list[WeightSync]:
    """Every WeightSync of a manifest file, in order. Raises ManifestError when any of its documents is at fault."""
    documents = load_manifests(path)
    sentences = [sentence for document in documents for sentence in _located(document, path, len(documents))]
    if sentences:
        raise ManifestError(sentences)
    return [document.resource for document in documents if document.resource]


def load_manifests(path: Path) -> list[Document]:
    """The documents of a manifest file, at least one. Never raises for what the file holds, or for its absence."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except IsADirectoryError:
        return [_fault("is a directory: name a manifest file")]
    except FileNotFoundError:
        return [_fault("no such file")]
    except (OSError, ValueError) as error:
        return [_fault(f"can't be read: {getattr(error, 'strerror', None) or error}")]
    return parse_manifests(data)


def parse_manifests(data: bytes) -> list[Document]:
    """As `load_manifests`, of bytes that were read already (standard input).

    Objects of other APIs beside a WeightSync, such as a Service, are kubectl's alone and left out.
    """
    documents: list[Document] = []
    others: list[Document] = []
    try:
        for index, value in read_documents(data):
            (others if _of_another_api(value) else documents).append(replace(check(value), index=index))
    except DocumentError as error:
        last = max((document.index for document in (*documents, *others)), default=-1)
        documents.append(_fault(str(error), index=last + 1))
    documents = documents or others
    return _without_namesakes(documents) or [_fault(f"is empty: it holds no {KIND}")]


def _of_another_api(value: Any) -> bool:
    version, kind = (value.get("apiVersion"), value.get("kind")) if isinstance(value, dict) else (None, None)
    group = API_VERSION.partition("/")[0]
    return isinstance(version, str) and version.partition("/")[0] != group and isinstance(kind, str) and kind != KIND


def check(value: Any) -> Document:
    """One manifest as a tree of JSON values. Its `status` is ignored, as on creation by the API server."""
    name = _name(value)
    sentences = list(_sentences(value))
    if not sentences:
        resource = WeightSync.model_validate_json(_strip_status(value), strict=True, by_alias=True, by_name=False)
        return Document(1, name, resource)
    more = len(sentences) - MAX_SENTENCES
    if more > 0:
        sentences[MAX_SENTENCES:] = [f"and {more} more faults"]
    return Document(1, name, None, tuple(map(printable, sentences)))


def _fault(sentence: str, index: int = 0) -> Document:
    return Document(index, "", None, (printable(sentence),))


def _located(document: Document, path: Path, count: int) -> Iterator[str]:
    where = [f"document {document.index}"] if document.index and count > 1 else []
    who = [f"{KIND} {quoted(document.name)}"] if document.name else []
    prefix = ", ".join(where + who)
    for sentence in document.errors:
        yield f"{printable(str(path))}: {prefix + ': ' if prefix else ''}{sentence}"


def _without_namesakes(documents: list[Document]) -> list[Document]:
    """Two documents of one name would be one object: the later one is refused."""
    first: dict[tuple[str, str], int] = {}
    checked: list[Document] = []
    for document in documents:
        if document.resource:
            metadata = document.resource.metadata
            index = first.setdefault((metadata.namespace, metadata.name), document.index)
            if index != document.index:
                sentence = f"metadata.name: Duplicate value: {quoted(metadata.name)}: document {index} has it too"
                document = replace(document, resource=None, errors=(sentence,))
        checked.append(document)
    return checked


def _name(value: Any) -> str:
    metadata = value.get("metadata") if isinstance(value, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name[:MAX_QUOTED] if isinstance(name, str) else ""


def _strip_status(value: dict[str, Any]) -> str:
    return json.dumps({key: item for key, item in value.items() if key != "status"})


def _sentences(value: Any) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"is no {KIND}: found {type_name(value)} in the place of apiVersion, kind, metadata and spec"
        return
    foreign = list(_foreign(value))
    if foreign:
        yield from foreign
        return
    try:
        resource = WeightSync.model_validate_json(
            _strip_status(value), strict=True, by_alias=True, by_name=False, context=DEFER_RULES
        )
    except ValidationError as error:
        faults = error.errors(include_url=False)
    else:
        faults = []
    unknown = [fault for fault in faults if fault["type"] == "extra_forbidden"]
    # The API server decodes before it validates, so that it tells unknown fields alone.
    strangers = [*_unknown_metadata(value), *(unknown_field(fault["loc"]) for fault in unknown)]
    if strangers:
        yield from strangers
    elif faults:
        yield from (sentence_of(fault) for fault in faults)
    else:
        yield from (broken_rule(path, at, rule.message) for path, at, rule in broken_rules(resource))


def _foreign(value: dict[str, Any]) -> Iterator[str]:
    """Why this is another kind of object, or none."""
    for field, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if value.get(field) is None:
            yield f"{field}: Required value: write {wanted}"
        elif value[field] != wanted:
            yield f'{field}: Unsupported value: {shown(value[field])}: supported values: "{wanted}"'


def _unknown_metadata(value: dict[str, Any]) -> Iterator[str]:
    metadata = value.get("metadata")
    for key in metadata if isinstance(metadata, dict) else ():
        if key not in OBJECT_META:
            yield f"unknown field {quoted('metadata.' + key)}{did_you_mean(key, OBJECT_META)}"
