"""The table of contract cases, judged by `weightsync run`. A cluster test judges it by `kubectl apply`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from contract import (
    BAD_MANIFEST_SENTENCES,
    BAD_MANIFESTS,
    BAD_SOURCES,
    MANIFESTS,
    Case,
    at,
    canonical,
    cases,
    server_sentences,
)
from weightsync_api.base import ApiModel, Rule, Ruled, model_of
from weightsync_api.crd import crd
from weightsync_api.v1alpha1 import WeightSync
from weightsync_api.validation import ManifestError, check, load_manifests, parse_manifests, read_weightsyncs


@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_manifest_is_accepted_or_refused_with_the_sentences_of_the_table(case: Case) -> None:
    (document,) = parse_manifests(json.dumps(case.manifest).encode())
    wanted = () if case.update else case.refused
    assert sorted(map(canonical, document.errors)) == sorted(wanted)
    assert (document.resource is None) == bool(wanted)


@pytest.mark.parametrize("case", [case for case in cases() if case.holds], ids=str)
def test_defaults_are_those_of_the_table(case: Case) -> None:
    resource = check(case.manifest).resource
    assert resource is not None
    written = resource.model_dump(mode="json", by_alias=True)
    assert {path: at(written, path) for path in case.holds} == case.holds


@pytest.mark.parametrize("case", [case for case in cases() if case.update], ids=str)
def test_an_update_is_a_good_manifest_by_itself(case: Case) -> None:
    """Only the transition may be at fault, and that only the API server can know."""
    assert check(case.update).errors == ()


def test_names_of_the_cases_are_unique() -> None:
    names = [case.name for case in cases()]
    assert len(names) == len(set(names))


def _rules(model: type[ApiModel]) -> set[Rule]:
    found = set(model.rules)
    for field in model.model_fields.values():
        found.update(rule for note in field.metadata if isinstance(note, Ruled) for rule in note.rules)
        if (inner := model_of(field.annotation)) is not None:
            found |= _rules(inner)
    return found


def test_the_table_breaks_every_rule() -> None:
    told = {sentence.split(": ", 1)[1] for case in cases() for sentence in case.refused if ": " in sentence}
    assert {rule.message for rule in _rules(WeightSync)} <= told


def _limits(schema: dict[str, Any], path: str) -> list[str]:
    """Every sentence that bounds and enums of the spec can cause, as far as the schema tells."""
    found = []
    if "enum" in schema:
        found.append(f"{path}: Unsupported value: ")
    if "minimum" in schema:
        found.append(f"{path}: should be greater than or equal to {schema['minimum']}")
    if schema.get("maximum", 2**31 - 1) < 2**31 - 1:
        found.append(f"{path}: should be less than or equal to {schema['maximum']}")
    for name, inner in schema.get("properties", {}).items():
        found += _limits(inner, f"{path}.{name}")
        if inner.get("items", {}).get("properties"):
            found += _limits(inner["items"], f"{path}.{name}[0]")
    return found + [f"{path}.{name}: Required value" for name in schema.get("required", ())]


def test_the_table_breaks_every_bound_and_enum_and_leaves_out_every_required_field() -> None:
    told = [sentence for case in cases() for sentence in case.refused]
    root = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    limits = _limits(root["properties"]["spec"], "spec")
    assert [limit for limit in limits if not any(sentence.startswith(limit) for sentence in told)] == []


@pytest.mark.parametrize("path", sorted(MANIFESTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_good_manifests_are_read(path: Path) -> None:
    assert read_weightsyncs(path)


@pytest.mark.parametrize("name", sorted(BAD_MANIFEST_SENTENCES))
def test_a_bad_manifest_is_refused_with_one_sentence(name: str) -> None:
    path = BAD_MANIFESTS / name
    with pytest.raises(ManifestError) as caught:
        read_weightsyncs(path)
    assert caught.value.sentences == (f"{path}: {BAD_MANIFEST_SENTENCES[name]}",)


@pytest.mark.parametrize("name", sorted(BAD_SOURCES))
def test_what_a_manifest_names_on_disk_is_not_the_contract_s_to_judge(name: str) -> None:
    assert [document.errors for document in load_manifests(BAD_MANIFESTS / name)] == [()]


def test_every_bad_manifest_has_its_sentence() -> None:
    assert {path.name for path in BAD_MANIFESTS.iterdir()} == BAD_MANIFEST_SENTENCES.keys() | BAD_SOURCES.keys()


def test_the_api_server_s_sentences_take_the_same_form() -> None:
    """As kubectl 1.34 printed them."""
    one = (
        'The WeightSync "case" is invalid: spec: Invalid value: "object": transport IPC needs placement Colocated or '
        "Node: pods of their own can't map each other's memory"
    )
    assert server_sentences(one) == [
        "spec: transport IPC needs placement Colocated or Node: pods of their own can't map each other's memory"
    ]
    several = """The WeightSync "case" is invalid:
* spec.receivers.replicas: Invalid value: -1: spec.receivers.replicas in body should be greater than or equal to 0
* .spec.receivers.replicas: Invalid value: -1: should be a non-negative integer
* spec.device: Unsupported value: "GPU": supported values: "CUDA", "CPU"
* <nil>: Invalid value: "null": some validation rules were not checked because the object was invalid; correct it
"""
    assert server_sentences(several) == [
        "spec.receivers.replicas: should be greater than or equal to 0",
        'spec.device: Unsupported value: "GPU": supported values: "CUDA", "CPU"',
    ]
    strict = (
        'Error from server (BadRequest): error when creating "STDIN": WeightSync in version "v1alpha1" cannot be '
        'handled as a WeightSync: strict decoding error: unknown field "spec.foo", unknown field "spec.transfr"'
    )
    assert server_sentences(strict) == ['unknown field "spec.foo"', 'unknown field "spec.transfr"']
