"""The CustomResourceDefinition: committed as generated, structural, with the models' own defaults and descriptions."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from weightsync_api.columns import COLUMNS
from weightsync_api.crd import crd, render
from weightsync_api.v1alpha1 import API_VERSION, KIND, WeightSync, WeightSyncStatus

COMMITTED = Path(__file__).parents[2] / "crds" / "weightsync.dev_weightsyncs.yaml"

VERSION: dict[str, Any] = crd()["spec"]["versions"][0]
ROOT: dict[str, Any] = VERSION["schema"]["openAPIV3Schema"]

FORBIDDEN = {
    "$ref", "$defs", "definitions", "title", "const", "anyOf", "oneOf", "allOf", "not", "additionalProperties",
    "exclusiveMinimum", "exclusiveMaximum", "prefixItems", "nullable", "examples", "uniqueItems",
}  # fmt: skip


def walk(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema below and including `schema`, with its path."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from walk(inner, f"{path}.{name}")
    if "items" in schema:
        yield from walk(schema["items"], f"{path}[]")


def test_the_committed_file_is_the_generated_one() -> None:
    printed = subprocess.run([sys.executable, "-m", "weightsync_api.crd"], check=True, capture_output=True, text=True)
    assert COMMITTED.read_text() == render() == printed.stdout
    assert yaml.safe_load(printed.stdout) == crd()


def test_no_construct_that_a_structural_schema_forbids_occurs() -> None:
    assert [(path, word) for path, schema in walk(ROOT) for word in schema.keys() & FORBIDDEN] == []


def test_every_schema_has_a_type() -> None:
    def typed(schema: dict[str, Any]) -> bool:
        return ("type" in schema) != bool(schema.get("x-kubernetes-int-or-string"))

    assert [path for path, schema in walk(ROOT) if not typed(schema)] == []


def test_every_field_is_described() -> None:
    bare = [path for path, schema in walk(ROOT) if not schema.get("description", "").strip()]
    # The API server describes metadata itself; an item of an overlay list is described by its list.
    assert [path for path in bare if not path.startswith(".metadata") and not path.endswith("env[]")] == []


def test_every_list_of_the_spec_and_status_is_bounded() -> None:
    assert [path for path, schema in walk(ROOT) if schema.get("type") == "array" and "maxItems" not in schema] == []


def test_every_text_that_a_user_writes_is_bounded() -> None:
    spec = walk(ROOT["properties"]["spec"], "spec")
    texts = [(path, schema) for path, schema in spec if schema.get("type", "string") == "string"]
    assert [path for path, schema in texts if not schema.keys() & {"maxLength", "enum"}] == []


def _filled(schema: dict[str, Any], value: Any) -> Any:
    """What the API server makes of a value: absent properties get their defaults, then theirs."""
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    filled = dict(value)
    for name, inner in schema["properties"].items():
        if name not in filled and "default" in inner:
            filled[name] = inner["default"]
        if name in filled:
            filled[name] = _filled(inner, filled[name])
    return filled


def test_the_schema_s_defaults_are_the_models_defaults() -> None:
    for source in ({"synthetic": {"model": "qwen3-0.6b"}}, {"checkpoint": {"path": "/w"}}, {"trainer": {}}):
        manifest = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": "x"},
            "spec": {"sender": {"source": source}},
        }
        model = WeightSync.model_validate(manifest).model_dump(mode="json", by_alias=True, exclude_none=True)
        assert _filled(ROOT, manifest)["spec"] == model["spec"]


def test_a_description_tells_the_default() -> None:
    silent = [
        path
        for path, schema in walk(ROOT["properties"]["spec"])
        if schema.get("default", "") not in ("", {}, []) and "Default: " not in schema["description"]
    ]
    assert silent == []


def test_the_status_has_no_defaults_and_knows_every_field_of_the_model() -> None:
    status = ROOT["properties"]["status"]
    assert [path for path, schema in walk(status) if "default" in schema] == []
    wire = {field.alias or name for name, field in WeightSyncStatus.model_fields.items()}
    assert status["properties"].keys() == wire


def test_lists_that_server_side_apply_merges_have_keys_that_are_required() -> None:
    lists = {path: schema for path, schema in walk(ROOT) if schema.get("x-kubernetes-list-type") == "map"}
    keys = {path: schema["x-kubernetes-list-map-keys"] for path, schema in lists.items()}
    assert keys == {".status.conditions": ["type"], ".status.history": ["step"], ".status.agents": ["rank"]}
    assert all(set(keys[path]) <= set(schema["items"]["required"]) for path, schema in lists.items())


def test_rules_have_sentences_of_a_length_that_the_api_server_takes() -> None:
    rules = [rule for _, schema in walk(ROOT) for rule in schema.get("x-kubernetes-validations", ())]
    assert rules
    assert all(0 < len(rule["message"]) <= 2048 and "\n" not in rule["message"] for rule in rules)


def test_the_columns_are_those_of_kubectl_get_ws() -> None:
    shown = [column.name.upper() for column in COLUMNS if column.priority == 0]
    assert shown == ["READY", "STATUS", "TRANSPORT", "RECEIVERS", "STEP", "RESERVED", "DELTA", "ACK", "RATE", "AGE"]
    assert VERSION["additionalPrinterColumns"] == [column.schema() for column in COLUMNS]


def test_every_column_reads_a_field_that_exists() -> None:
    known = {path for path, _ in walk(ROOT)} | {".metadata.creationTimestamp"}
    paths = [re.sub(r"\[\?\(.*?\)\]", "[]", column.json_path) for column in COLUMNS]
    assert [path for path in paths if path not in known] == []


def test_scale_reads_and_writes_the_receivers() -> None:
    scale = VERSION["subresources"]["scale"]
    assert scale["specReplicasPath"] == ".spec.receivers.replicas"
    known = dict(walk(ROOT))
    assert [known[path]["type"] for path in scale.values()] == ["integer", "integer", "string"]
