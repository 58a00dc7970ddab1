"""Faults of a manifest -> sentences in the API server's words: the path first, then what it should be
(k8s.io/apimachinery/pkg/util/validation/field/errors.go), with the word that was probably meant.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from .base import ApiModel, inner_type, model_of
from .v1alpha1 import WeightSync, WeightSyncSpec

MAX_QUOTED = 80
"""Characters of a bad value that a sentence quotes."""

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


def sentence_of(fault: ErrorDetails) -> str:
    """Of what pydantic found, but an unknown field."""
    path, kind, value, context = _path(fault["loc"]), fault["type"], fault["input"], fault.get("ctx", {})
    field = _field(fault["loc"])
    if kind == "missing":
        hint = ": name or generateName is required" if path == "metadata.name" else ""
        return f"{path}: Required value{hint}"
    if kind in ("enum", "literal_error"):
        values = _values(field)
        supported = ", ".join(f'"{word}"' for word in values)
        # Nearer than for fields: GPU is not CPU.
        meant = did_you_mean(value, values, cutoff=0.75) if isinstance(value, str) else ""
        return f"{path}: Unsupported value: {shown(value)}: supported values: {supported}{meant}"
    if kind in _TYPES:
        wanted, found = _wanted_type(field, _TYPES[kind]), type_name(value)
        return f'{path}: Invalid value: "{found}": must be of type {wanted}: "{found}"'
    if kind == "string_too_long":
        return f"{path}: Too long: may not be more than {context['max_length']} bytes"
    if kind == "too_long":
        return f"{path}: Too many: {context['actual_length']}: must have at most {context['max_length']} items"
    return f"{path}: Invalid value: {shown(value)}: {_bound(kind, context) or fault['msg']}"


def _bound(kind: str, context: dict[str, Any]) -> str:
    if kind == "greater_than_equal":
        return f"should be greater than or equal to {context['ge']}"
    if kind == "less_than_equal":
        return f"should be less than or equal to {context['le']}"
    if kind == "string_too_short":
        return f"should be at least {context['min_length']} chars long"
    return ""


def broken_rule(path: Iterable[str], value: Any, message: str) -> str:
    """`path`: in camelCase. `message`: the rule's."""
    told = f"Invalid value: {shown(value)}: " if isinstance(value, str | int) else ""
    return f"{'.'.join(path)}: {told}{message}"


def unknown_field(loc: tuple[int | str, ...]) -> str:
    """`loc`: pydantic's, names as in the manifest."""
    model, key = _model(loc[:-1]), str(loc[-1])
    known = [field.alias or name for name, field in model.model_fields.items()] if model else []
    # A typo first; then the right name in the wrong place; then what is a little alike.
    meant = did_you_mean(key, known, cutoff=0.85) or _elsewhere(key) or did_you_mean(key, known) or _known(known)
    return f"unknown field {quoted(_path(loc))}{meant}"


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean "x"?` with the nearest known word, if one is near."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(_bare(word), by_lower, n=1, cutoff=cutoff)
    return f'; did you mean "{by_lower[near[0]]}"?' if near else ""


def _bare(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")


def _elsewhere(word: str) -> str:
    """Where in the spec a field of that name is, if anywhere."""
    paths = [path for path in _spec_paths(WeightSyncSpec, "spec") if _bare(path.rsplit(".", 1)[1]) == _bare(word)]
    return f"; did you mean {' or '.join(map(quoted, paths))}?" if paths else ""


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


def type_name(value: Any) -> str:
    """The JSON type, in the API server's words."""
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "object"


def shown(value: Any) -> str:
    return quoted(value) if isinstance(value, str) else _shorten(json.dumps(value))


def quoted(text: str) -> str:
    return json.dumps(_shorten(text), ensure_ascii=False)


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 1] + "…"


def printable(sentence: str) -> str:
    """On one line, and without anything that could steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence)
