"""Manifest files -> WeightSyncs, or sentences that say what is wrong with them.

`weightsync run` refuses what `kubectl apply` would, in the API server's words: the path first, then what it should
be (k8s.io/apimachinery/pkg/util/validation/field/errors.go), without the parts that tell a reader nothing
(`Invalid value: "object"`, `in body`). Never a traceback, never more than one line a fault.

    try:
        resources = read_weightsyncs(path)
    except ManifestError as error:
        for sentence in error.sentences: ...   # print, exit code 2

Whether files and GPUs that a manifest names exist is not judged here.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from .base import DEFER_RULES, ApiModel, broken_rules, inner_type, model_of
from .documents import MAX_BYTES, DocumentError, read_documents
from .v1alpha1 import API_VERSION, KIND, WeightSync, WeightSyncSpec

MAX_SENTENCES = 20
"""Sentences told of one document; then how many more there are."""

MAX_QUOTED = 80
"""Characters of a bad value that a sentence quotes."""

OBJECT_META = frozenset({
    "name", "generateName", "namespace", "selfLink", "uid", "resourceVersion", "generation", "creationTimestamp",
    "deletionTimestamp", "deletionGracePeriodSeconds", "labels", "annotations", "ownerReferences", "finalizers",
    "managedFields",
})  # fmt: skip
"""Fields of metav1.ObjectMeta."""

_TYPES = {
    "int_type": "integer",
    "int_parsing": "integer",
    "int_from_float": "integer",
    "string_type": "string",
    "bool_type": "boolean",
    "bool_parsing": "boolean",
    "list_type": "array",
    "dict_type": "object",
    "model_type": "object",
    "model_attributes_type": "object",
}


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
    return Document(1, name, None, tuple(map(_printable, sentences)))


def _fault(sentence: str, index: int = 0) -> Document:
    return Document(index, "", None, (_printable(sentence),))


def _located(document: Document, path: Path, count: int) -> Iterator[str]:
    where = [f"document {document.index}"] if document.index and count > 1 else []
    who = [f"{KIND} {_quote(document.name)}"] if document.name else []
    prefix = ", ".join(where + who)
    for sentence in document.errors:
        yield f"{_printable(str(path))}: {prefix + ': ' if prefix else ''}{sentence}"


def _without_namesakes(documents: list[Document]) -> list[Document]:
    """Two documents of one name would be one object: the later one is refused."""
    first: dict[tuple[str, str], int] = {}
    checked: list[Document] = []
    for document in documents:
        if document.resource:
            metadata = document.resource.metadata
            index = first.setdefault((metadata.namespace, metadata.name), document.index)
            if index != document.index:
                sentence = f"metadata.name: Duplicate value: {_quote(metadata.name)}: document {index} has it too"
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
        yield f"is no {KIND}: found {_type_name(value)} in the place of apiVersion, kind, metadata and spec"
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
    strangers = [*_unknown_metadata(value), *(_unknown(fault["loc"]) for fault in unknown)]
    if strangers:
        yield from strangers
    elif faults:
        yield from (_sentence(fault) for fault in faults)
    else:
        yield from (_broken(path, at, rule.message) for path, at, rule in broken_rules(resource))


def _foreign(value: dict[str, Any]) -> Iterator[str]:
    """Why this is another kind of object, or none."""
    for field, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if value.get(field) is None:
            yield f"{field}: Required value: write {wanted}"
        elif value[field] != wanted:
            yield f'{field}: Unsupported value: {_show(value[field])}: supported values: "{wanted}"'


def _unknown_metadata(value: dict[str, Any]) -> Iterator[str]:
    metadata = value.get("metadata")
    for key in metadata if isinstance(metadata, dict) else ():
        if key not in OBJECT_META:
            yield f"unknown field {_quote('metadata.' + key)}{_meant(key, OBJECT_META)}"


def _sentence(fault: ErrorDetails) -> str:
    path, kind, value, context = _path(fault["loc"]), fault["type"], fault["input"], fault.get("ctx", {})
    field = _field(fault["loc"])
    if kind == "missing":
        hint = ": name or generateName is required" if path == "metadata.name" else ""
        return f"{path}: Required value{hint}"
    if kind in ("enum", "literal_error"):
        values = _values(field)
        supported = ", ".join(f'"{word}"' for word in values)
        # Nearer than for fields: GPU is not CPU.
        meant = _meant(value, values, cutoff=0.75) if isinstance(value, str) else ""
        return f"{path}: Unsupported value: {_show(value)}: supported values: {supported}{meant}"
    if kind in _TYPES:
        wanted, found = _wanted_type(field, _TYPES[kind]), _type_name(value)
        return f'{path}: Invalid value: "{found}": must be of type {wanted}: "{found}"'
    if kind == "string_too_long":
        return f"{path}: Too long: may not be more than {context['max_length']} bytes"
    if kind == "too_long":
        return f"{path}: Too many: {context['actual_length']}: must have at most {context['max_length']} items"
    return f"{path}: Invalid value: {_show(value)}: {_bound(kind, context) or fault['msg']}"


def _bound(kind: str, context: dict[str, Any]) -> str:
    if kind == "greater_than_equal":
        return f"should be greater than or equal to {context['ge']}"
    if kind == "less_than_equal":
        return f"should be less than or equal to {context['le']}"
    if kind == "string_too_short":
        return f"should be at least {context['min_length']} chars long"
    return ""


def _broken(path: Iterable[str], value: Any, message: str) -> str:
    shown = f"Invalid value: {_show(value)}: " if isinstance(value, str | int) else ""
    return f"{'.'.join(path)}: {shown}{message}"


def _unknown(loc: tuple[int | str, ...]) -> str:
    model, key = _model(loc[:-1]), str(loc[-1])
    known = [field.alias or name for name, field in model.model_fields.items()] if model else []
    # A typo first; then the right name in the wrong place; then what is a little alike.
    meant = _meant(key, known, cutoff=0.85) or _elsewhere(key) or _meant(key, known) or _known(known)
    return f"unknown field {_quote(_path(loc))}{meant}"


def _meant(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean "x"?` with the nearest known word, if one is near."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(_bare(word), by_lower, n=1, cutoff=cutoff)
    return f'; did you mean "{by_lower[near[0]]}"?' if near else ""


def _bare(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")


def _elsewhere(word: str) -> str:
    """Where in the spec a field of that name is, if anywhere."""
    paths = [path for path in _spec_paths(WeightSyncSpec, "spec") if _bare(path.rsplit(".", 1)[1]) == _bare(word)]
    return f"; did you mean {' or '.join(map(_quote, paths))}?" if paths else ""


def _known(known: Sequence[str]) -> str:
    return f"; known here: {', '.join(known)}" if known else "; no fields are known here"


def _spec_paths(model: type[ApiModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        path = f"{prefix}.{field.alias or name}"
        yield path
        if (inner := model_of(field.annotation)) is not None:
            yield from _spec_paths(inner, path)


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _field(loc: tuple[int | str, ...]) -> FieldInfo | None:
    """Definition of the field at a path; None where the path leads into an overlay or a list."""
    model = _model(loc[:-1])
    fields = model.model_fields.items() if model else ()
    return next((field for name, field in fields if (field.alias or name) == loc[-1]), None)


def _model(loc: tuple[int | str, ...]) -> type[ApiModel] | None:
    if not loc:
        return WeightSync
    field = _field(loc[:-1] if isinstance(loc[-1], int) else loc)
    return model_of(field.annotation) if field else None


def _values(field: FieldInfo | None) -> list[str]:
    inner = inner_type(field.annotation) if field else None
    if isinstance(inner, type) and issubclass(inner, StrEnum):
        return [str(word) for word in inner]
    return [str(word) for word in get_args(inner)] if get_origin(inner) is Literal else []


def _wanted_type(field: FieldInfo | None, wanted: str) -> str:
    extra = field.json_schema_extra if field else None
    return "integer,string" if isinstance(extra, dict) and extra.get("x-kubernetes-int-or-string") else wanted


def _type_name(value: Any) -> str:
    """The JSON type, in the API server's words."""
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "object"


def _show(value: Any) -> str:
    return _quote(value) if isinstance(value, str) else _shorten(json.dumps(value))


def _quote(text: str) -> str:
    return json.dumps(_shorten(text), ensure_ascii=False)


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 1] + "…"


def _printable(sentence: str) -> str:
    """On one line, and without anything that could steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence)
