"""Manifest files that nobody wrote with care: sentences, and nothing but sentences."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from contract import MANIFESTS, merged
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from weightsync_api.validation import (
    MAX_SENTENCES,
    Document,
    ManifestError,
    check,
    load_manifests,
    parse_manifests,
    read_weightsyncs,
)

GOOD: dict[str, Any] = {
    "apiVersion": "weightsync.dev/v1alpha1",
    "kind": "WeightSync",
    "metadata": {"name": "good"},
    "spec": {"device": "CPU", "sender": {"source": {"trainer": {}}}},
}
HEAD = b"apiVersion: weightsync.dev/v1alpha1\nkind: WeightSync\nmetadata: {name: x}\n"


def errors(text: str | bytes) -> tuple[str, ...]:
    documents = parse_manifests(text.encode() if isinstance(text, str) else text)
    return tuple(sentence for document in documents for sentence in document.errors)


def assert_sentences(documents: list[Document]) -> None:
    """Each document is a WeightSync, or refused with sentences fit for a terminal."""
    assert documents
    for document in documents:
        assert (document.resource is None) == bool(document.errors)
        for sentence in document.errors:
            assert sentence.isprintable(), sentence
            assert 0 < len(sentence) < 1000
            assert not {"Traceback", "pydantic", "input_value", "<class"} & set(sentence.replace("'", " ").split())
            assert "errors.pydantic.dev" not in sentence


# Files


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError) as caught:
        read_weightsyncs(tmp_path / "nope.yaml")
    assert caught.value.sentences == (f"{tmp_path}/nope.yaml: no such file",)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError) as caught:
        read_weightsyncs(tmp_path)
    assert caught.value.sentences == (f"{tmp_path}: is a directory: name a manifest file",)


def test_a_path_that_no_system_takes_is_refused() -> None:
    assert_sentences(load_manifests(Path("a\0b")))
    assert_sentences(load_manifests(Path("x" * 5000)))


def test_ten_megabytes_of_noise_are_refused_by_size(tmp_path: Path) -> None:
    noise = tmp_path / "noise.yaml"
    noise.write_bytes(random.Random(0).randbytes(10_000_000))
    assert [document.errors for document in load_manifests(noise)] == [("is larger than 1 MiB: that is no manifest",)]


def test_a_file_without_end_is_not_read_to_its_end() -> None:
    assert [document.errors for document in load_manifests(Path("/dev/zero"))] == [
        ("is larger than 1 MiB: that is no manifest",)
    ]


def test_a_pipe_can_be_read(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, json.dumps(GOOD).encode())
    os.close(write)
    try:
        assert [ws.metadata.name for ws in read_weightsyncs(Path(f"/dev/fd/{read}"))] == ["good"]
    finally:
        os.close(read)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "is empty: it holds no WeightSync"),
        (b"---\n---\n...\n", "is empty: it holds no WeightSync"),
        (b"\xff\xfe\x00\x01", "is no text: byte 0xff at offset 0 is not UTF-8"),
        (b"a: 1\n\x00b: 2", "is no text: control character 0x00 in line 2"),
        (b"a: 1\x1b[31m", "is no text: control character 0x1b in line 1"),
        (b"a: 1\n b: 2", "is no YAML: line 2, column 3: mapping values are not allowed in this context"),
        (b"\ta: 1", "is no YAML: line 1, column 1: found character that cannot start any token"),
        (b"a: *b", "is no YAML: line 1, column 4: found undefined alias"),
        (b"a: &a [*a]", "line 1: an anchor holds an alias of itself"),
        (b"a: 1\n'a': 2", 'line 2: key "a" is already set in line 1'),
        (b"? [a]\n: 1", "line 1: a key must be text"),
        (b"a: .nan", "holds a number that is infinite or none"),
        (b"[" * 200 + b"]" * 200, "line 1: nested deeper than 64 levels"),
        (b"---\n{}\n" * 200, "holds more than 100 documents"),
    ],
)
def test_what_is_no_manifest_gets_one_sentence(data: bytes, sentence: str) -> None:
    assert errors(data)[-1] == sentence


@pytest.mark.parametrize("data", [b"[" * 500_000, b"{a: " * 200_000, b"- " * 300_000, b"a: " * 10_000, b"? " * 10_000])
def test_deep_nesting_is_no_crash(data: bytes) -> None:
    assert_sentences(parse_manifests(data))


def test_aliases_that_expand_to_billions_are_refused_before_they_do() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert errors("\n".join(lines)) == ("line 6: holds more than 100000 values",)
    lines = ["a0: &a0 {k0: 1, l0: 1, m0: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}], k{n}: 1}}" for n in range(1, 12)]
    assert "holds more than 100000 values" in errors("\n".join(lines))[0]


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system [ls]", "!!python/name:os.system", "!!binary aGk=",
                                 "!!set {a}", "!!timestamp 2020-99-99", "!!int ''", "!!int x", "!!float x", "!!bool 5",
                                 "!mine x", "!!null x", "!!str [a]", "!!map [a]", "!!seq {a: b}"])  # fmt: skip
def test_tags_neither_run_code_nor_crash(tag: str) -> None:
    assert_sentences(parse_manifests(b"metadata: {name: " + tag.encode() + b"}\n"))


# Scalars, as kubectl reads them


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("2020-01-01", "2020-01-01"), ("12:30:45", "12:30:45"), ("y", True), ("No", False), ("off", False),
        ("0x10", 16), ("0o17", 15), ("017", 15), ("0b101", 5), ("1_000", 1000), ("-5", -5), ("08", 8), ("2.0", 2),
        ("1e3", 1000), ("1.5", 1.5), ("~", None), ("", None), ("Null", None), ('"5"', "5"), ("256Mi", "256Mi"),
        ("99999999999999999999", 1e20), ("1.2.3", "1.2.3"), ("0", 0), ("+7", 7),
    ],
)  # fmt: skip
def test_scalars_mean_what_they_mean_to_kubectl(written: str, read: Any) -> None:
    text = HEAD + b"spec:\n  sender:\n    source: {trainer: {}}\n    template:\n      value: " + written.encode()
    (document,) = parse_manifests(text)
    assert document.resource is not None
    value = document.resource.spec.sender.template["value"]
    assert (value, type(value)) == (read, type(read))


def test_keys_that_are_numbers_or_booleans_are_text() -> None:
    text = HEAD + b"spec: {sender: {source: {trainer: {}}, template: {1: a, true: b, 1.5: c}}}"
    (document,) = parse_manifests(text)
    assert document.resource is not None
    assert document.resource.spec.sender.template == {"1": "a", "true": "b", "1.5": "c"}


def test_a_merge_key_may_be_overridden() -> None:
    text = HEAD + b"spec:\n  sender: {source: {trainer: {}}, template: {a: &a {k: 1, l: 2}, b: {<<: *a, k: 3}}}"
    (document,) = parse_manifests(text)
    assert document.resource is not None
    assert document.resource.spec.sender.template["b"] == {"k": 3, "l": 2}


# Documents


def test_a_bad_document_does_not_hide_the_others() -> None:
    documents = parse_manifests(
        json.dumps(GOOD).encode() + b"\n---\n- 1\n---\n" + HEAD + b"spec: {sender: {source: {}}}\n---\na: [\n"
    )
    assert [(document.index, document.name, bool(document.resource)) for document in documents] == [
        (1, "good", True), (2, "", False), (3, "x", False), (4, "", False),
    ]  # fmt: skip


def test_sentences_name_file_document_and_resource(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    bad = merged(GOOD, {"metadata": {"name": "bad"}, "spec": {"transfer": {"slots": 0}}})
    path.write_text(f"{json.dumps(GOOD)}\n---\n{json.dumps(bad)}\n")
    with pytest.raises(ManifestError) as caught:
        read_weightsyncs(path)
    assert caught.value.sentences == (
        f'{path}: document 2, WeightSync "bad": '
        "spec.transfer.slots: Invalid value: 0: should be greater than or equal to 1",
    )


def test_two_namespaces_may_hold_the_same_name() -> None:
    other = merged(GOOD, {"metadata": {"namespace": "other"}})
    assert errors(f"{json.dumps(GOOD)}\n---\n{json.dumps(other)}\n") == ()


def test_many_faults_are_counted_not_told() -> None:
    spec = {"spec": {f"wrong{n}": 1 for n in range(50)}}
    told = check(merged(GOOD, spec)).errors
    assert len(told) == MAX_SENTENCES + 1
    assert told[-1] == "and 30 more faults"


@pytest.mark.parametrize(
    ("patch", "sentence"),
    [
        ({"transfr": {}}, 'unknown field "spec.transfr"; did you mean "transfer"?'),
        ({"receiver": {}}, 'unknown field "spec.receiver"; did you mean "receivers"?'),
        ({"slots": 1}, 'unknown field "spec.slots"; did you mean "spec.transfer.slots"?'),
        ({"bucket_size": 1}, 'unknown field "spec.bucket_size"; did you mean "spec.transfer.bucketSize"?'),
        ({"receivers": {"replica": 1}}, 'unknown field "spec.receivers.replica"; did you mean "replicas"?'),
        (
            {"receivers": {"zzz": 1}},
            'unknown field "spec.receivers.zzz"; known here: replicas, gpusPerPod, template, engine',
        ),
        (
            {"sender": {"source": {"trainer": {"zzz": 1}}}},
            'unknown field "spec.sender.source.trainer.zzz"; no fields are known here',
        ),
        (
            {"device": "GPU"},
            'spec.device: Unsupported value: "GPU": supported values: "CUDA", "CPU"',
        ),
        (
            {"placement": "dedicated"},
            'spec.placement: Unsupported value: "dedicated": supported values: "Colocated", "Node", "Dedicated"; '
            'did you mean "Dedicated"?',
        ),
        (
            {"transfer": {"bucketSize": "-1"}},
            'spec.transfer.bucketSize: Invalid value: "-1": must be a quantity of bytes from 4Ki to 1Ti, '
            "for example 256Mi",
        ),
    ],
)
def test_a_sentence_helps(patch: dict[str, Any], sentence: str) -> None:
    assert check(merged(GOOD, {"spec": patch})).errors == (sentence,)


def test_a_terminal_is_not_steered_by_a_manifest() -> None:
    hostile = "\x1b[31m\u202e\r\n\x85"
    for patch in ({"metadata": {"name": hostile}}, {"spec": {hostile: 1}}, {"spec": {"device": hostile}}, {hostile: 1}):
        assert_sentences([check(merged(GOOD, patch))])


def test_what_is_read_is_read_again_as_the_same() -> None:
    for path in MANIFESTS.glob("*.yaml"):
        for resource in read_weightsyncs(path):
            written = json.loads(resource.model_dump_json(by_alias=True, exclude_none=True))
            assert check(written).resource == resource


EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.yaml"))


@pytest.mark.parametrize("path", [path for path in EXAMPLES if "build" not in path.parts], ids=lambda path: path.stem)
def test_every_example_is_accepted_whatever_else_is_in_its_file(path: Path) -> None:
    assert [resource.metadata.name for resource in read_weightsyncs(path)] == [path.stem]


def test_objects_of_other_apis_are_left_out_beside_a_weightsync_and_told_where_there_is_none() -> None:
    service = b"apiVersion: v1\nkind: Service\nmetadata: {name: demo}\n---\n"
    (alone,) = parse_manifests(service)
    assert alone.errors[-1] == 'kind: Unsupported value: "Service": supported values: "WeightSync"'
    (found,) = parse_manifests(service + json.dumps(GOOD).encode())
    assert (found.index, found.resource is not None) == (2, True)
    (wrong,) = parse_manifests(service + json.dumps(GOOD | {"apiVersion": "v1"}).encode())
    assert "apiVersion: Unsupported value" in wrong.errors[0]


# Noise

FAST = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
PATHS = st.sampled_from(
    ["metadata", "metadata.name", "metadata.labels", "spec", "spec.device", "spec.sender", "spec.sender.source",
     "spec.sender.source.trainer", "spec.sender.template", "spec.receivers", "spec.receivers.replicas",
     "spec.transfer", "spec.transfer.bucketSize", "spec.transfer.verify.mode", "spec.agent.env", "spec.suspend",
     "spec.gpus.resource", "status", "kind", "apiVersion"]
)  # fmt: skip


@FAST
@given(st.binary(max_size=300))
def test_noise_gets_sentences(data: bytes) -> None:
    assert_sentences(parse_manifests(data))


@FAST
@given(st.text(alphabet="abc:-[]{}&*!|>%@`'\"#,?\n \t<~0.1xe_\\", max_size=120))
@example("a: !!int 0b")
@example("a: 0x_")
@example("a: 0b_")
@example("a: !!float ._")
@example("a: _1")
@example("0: &0 *0")
@example("<<: 1")
@example("a: {<<: [1, 2]}")
@example('a: "\\ud800"')
@example("a: 9" + "9" * 5000)
def test_what_almost_is_yaml_gets_sentences(text: str) -> None:
    assert_sentences(parse_manifests(text.encode()))


@FAST
@given(st.data())
def test_a_damaged_manifest_gets_sentences(data: st.DataObject) -> None:
    text = bytearray((MANIFESTS / "dedicated.yaml").read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 8))] = data.draw(
            st.binary(max_size=4) | st.sampled_from([b"\n", b": "])
        )
    assert_sentences(parse_manifests(bytes(text)))


@FAST
@given(PATHS, JSON)
def test_a_value_in_the_wrong_place_gets_sentences(path: str, value: Any) -> None:
    patch = value
    for key in reversed(path.split(".")):
        patch = {key: patch}
    assert_sentences([check(merged(GOOD, patch))])


@FAST
@given(JSON)
def test_any_tree_gets_sentences(value: Any) -> None:
    assert_sentences([check(value)])
