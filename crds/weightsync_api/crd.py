"""The CustomResourceDefinition of WeightSync, generated from the models.

`python -m weightsync_api.crd` prints what is committed as crds/weightsync.dev_weightsyncs.yaml.

The schema is structural
(https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#specifying-a-structural-schema):
references are written out, null is absence, unknown fields are the API server's to refuse. Defaults of the
spec are kept, so that the API server fills in what the models would. The status has none: it holds what the
operator wrote.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, cast, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from .base import ApiModel, Ruled, StatusModel, inner_type
from .columns import COLUMNS
from .v1alpha1 import GROUP, KIND, PLURAL, VERSION, WeightSync, WeightSyncStatus

Schema = dict[str, Any]

HEADER = "# Generated from the models by `python -m weightsync_api.crd`: change them, not this file.\n"

_KEPT = frozenset({
    "description", "type", "format", "enum", "default", "minimum", "maximum", "minLength", "maxLength",
    "pattern", "minItems", "maxItems", "items",
})  # fmt: skip
"""Keywords of a JSON schema that mean the same in a structural schema. Extensions (x-kubernetes-...) are kept too."""

INT32_MAX = 2**31 - 1
MAX_CONDITION_TYPE = 316  # characters; as metav1.Condition


Model = ApiModel | StatusModel


def crd() -> Schema:
    """The CustomResourceDefinition (apiextensions.k8s.io/v1), as a tree of JSON values."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["ws"],
                "categories": ["weightsync"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.receivers.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": [column.schema() for column in COLUMNS],
                    "schema": {"openAPIV3Schema": _root()},
                }
            ],
        },
    }


def render() -> str:
    """The CustomResourceDefinition as YAML, with a header that says where it comes from."""
    return HEADER + yaml.safe_dump(crd(), sort_keys=False, width=110, allow_unicode=True)


def _root() -> Schema:
    schema = _object(WeightSync, defaults=True)
    text = {"type": "string"}
    properties = schema["properties"]
    # The API server owns these three; metadata may only restrict the name, which the root's rule names by its path.
    properties["apiVersion"] = text | {"description": "Version of the schema of this object."}
    properties["kind"] = text | {"description": "Kind of this object."}
    properties["metadata"] = {"type": "object", "properties": {"name": dict(text)}}
    schema["required"] = ["spec"]
    return schema


def _object(model: type[Model], *, defaults: bool) -> Schema:
    """Schema of a model. `defaults`: whether its fields' defaults are written."""
    properties: Schema = {}
    required: list[str] = []
    for name, field, leaf in _fields(model):
        in_status = field.annotation is not None and inner_type(field.annotation) is WeightSyncStatus
        properties[name] = _field(field, leaf, defaults=defaults and not in_status)
        if field.is_required():
            required.append(name)
    schema: Schema = {
        "type": "object",
        "description": " ".join((model.__doc__ or "").split()),
        "properties": properties,
    }
    if required:
        schema["required"] = required
    if model.rules:
        schema["x-kubernetes-validations"] = [rule.schema() for rule in model.rules]
    return schema


def _fields(model: type[Model]) -> Iterator[tuple[str, FieldInfo, Schema]]:
    """Fields of a model: name on the wire, definition, pydantic's schema with enums written out."""
    whole = model.model_json_schema(by_alias=True)
    for key, field in model.model_fields.items():
        name = field.alias or key
        leaf = whole["properties"][name]
        if "$ref" in leaf:
            leaf = whole["$defs"][leaf["$ref"].rsplit("/", 1)[1]] | leaf
        yield name, field, leaf


def _field(field: FieldInfo, leaf: Schema, *, defaults: bool) -> Schema:
    inner = inner_type(field.annotation)
    description = {"description": field.description}
    extensions = {key: value for key, value in leaf.items() if key.startswith("x-kubernetes-")}
    if _is_model(inner):
        schema = _object(cast(type[Model], inner), defaults=defaults) | description
    elif get_origin(inner) is list and _is_model(get_args(inner)[0]):
        items = _object(get_args(inner)[0], defaults=defaults)
        schema = {"type": "array", **description, **_bounds(leaf), "items": items, **extensions}
    else:
        schema = {key: leaf[key] for key in leaf if key in _KEPT and key != "default"} | description | extensions
        if schema.get("type") == "integer":
            schema["format"] = "int32" if schema.get("maximum", INT32_MAX + 1) <= INT32_MAX else "int64"
        if extensions.get("x-kubernetes-int-or-string"):
            del schema["type"]
        if isinstance(inner, type) and issubclass(inner, StrEnum) and not defaults:
            # A status' enum is open, so that a newer operator can report to a cluster with an older definition.
            schema = {"type": "string", "maxLength": MAX_CONDITION_TYPE, **description}
    rules = [rule.schema() for note in field.metadata if isinstance(note, Ruled) for rule in note.rules]
    if rules:
        schema["x-kubernetes-validations"] = rules
    if defaults and not field.is_required():
        default = _default(field, inner)
        if default is not None:
            schema["default"] = default
        if default not in (None, "", {}, []):
            # `kubectl explain` prints descriptions, not defaults.
            schema["description"] += f" Default: {default if isinstance(default, str) else json.dumps(default)}."
    return schema


def _bounds(leaf: Schema) -> Schema:
    return {key: leaf[key] for key in ("minItems", "maxItems") if key in leaf}


def _default(field: FieldInfo, inner: Any) -> Any:
    """The field's default as a JSON value; None: absent. A model's is {}: the API server fills in the nested ones."""
    if not _is_model(inner):
        default = field.get_default(call_default_factory=True, validated_data={})
        return str(default) if isinstance(default, StrEnum) else default
    if field.default_factory is None:
        return None
    if inner.rules:
        # The API server judges the default {} itself, before the nested defaults are there.
        raise TypeError(f"{inner.__name__} has rules and is absent by default: move them to the model that holds it")
    return {}


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, ApiModel | StatusModel)


if __name__ == "__main__":
    sys.stdout.write(render())
