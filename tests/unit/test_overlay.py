"""Overlays are merged as Kubernetes merges a strategic patch, and contradictions are found with their path."""

from __future__ import annotations

import pytest
from weightsync_operator.overlay import OverlayError, clashes, merge


def test_objects_merge_and_a_null_takes_a_field_away() -> None:
    base = {"spec": {"a": 1, "b": {"c": 2, "d": 3}}}
    assert merge(base, {"spec": {"a": None, "b": {"d": 4}, "e": 5}}) == {"spec": {"b": {"c": 2, "d": 4}, "e": 5}}
    assert base == {"spec": {"a": 1, "b": {"c": 2, "d": 3}}}


def test_lists_with_a_key_merge_by_it_and_keep_their_order() -> None:
    base = {"volumes": [{"name": "x", "emptyDir": {"medium": "Memory"}}, {"name": "y", "emptyDir": {}}]}
    overlay = {"volumes": [{"name": "z", "emptyDir": {}}, {"name": "x", "emptyDir": {"sizeLimit": "1Gi"}}]}
    assert merge(base, overlay)["volumes"] == [
        {"name": "x", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        {"name": "y", "emptyDir": {}},
        {"name": "z", "emptyDir": {}},
    ]


def test_tolerations_are_added_and_other_lists_replaced() -> None:
    base = {"tolerations": [{"key": "a"}], "command": ["x", "y"]}
    assert merge(base, {"tolerations": [{"key": "b"}], "command": ["z"]}) == {
        "tolerations": [{"key": "a"}, {"key": "b"}],
        "command": ["z"],
    }


def test_a_variable_has_either_a_value_or_a_source() -> None:
    base = {"env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]}
    overlay = {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "y"}}}, {"name": "B", "value": "2"}]}
    assert merge(base, overlay)["env"] == [
        {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "y"}}},
        {"name": "B", "value": "2"},
    ]


@pytest.mark.parametrize(
    ("overlay", "path", "sentence"),
    [
        ({"spec": []}, "spec", "is [], where an object belongs"),
        ({"spec": {"volumes": {}}}, "spec.volumes", "is {}, where a list belongs"),
        ({"spec": {"volumes": ["x"]}}, "spec.volumes[0]", "has no name: entries are merged by it"),
        ({"spec": {"volumes": [{"emptyDir": {}}]}}, "spec.volumes[0]", "has no name: entries are merged by it"),
        ({"spec": {"volumes": [{"name": {}}]}}, "spec.volumes[0].name", "is {}, where text belongs"),
        ({"spec": {"tolerations": "all"}}, "spec.tolerations", 'is "all", where a list belongs'),
    ],
)
def test_an_overlay_of_another_shape_is_refused_with_its_path(overlay: object, path: str, sentence: str) -> None:
    with pytest.raises(OverlayError) as caught:
        merge({"spec": {"volumes": [{"name": "x"}]}}, overlay)
    assert (caught.value.path, str(caught.value)) == (path, sentence)


def test_another_kind_of_probe_or_volume_takes_the_place_of_the_usual_one() -> None:
    base = {
        "livenessProbe": {"httpGet": {"path": "/healthz", "port": 8080}, "periodSeconds": 10},
        "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}],
    }
    overlay = {
        "livenessProbe": {"exec": {"command": ["true"]}},
        "volumes": [{"name": "tmp", "persistentVolumeClaim": {"claimName": "scratch"}}],
    }
    assert merge(base, overlay) == {
        "livenessProbe": {"exec": {"command": ["true"]}, "periodSeconds": 10},
        "volumes": [{"name": "tmp", "persistentVolumeClaim": {"claimName": "scratch"}}],
    }
    assert merge(base, {"livenessProbe": {"httpGet": {"port": 9}}})["livenessProbe"] == {
        "httpGet": {"path": "/healthz", "port": 9},
        "periodSeconds": 10,
    }


def test_a_clash_is_a_field_that_both_set_to_different_values() -> None:
    needed = {
        "restartPolicy": "Always",
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
        "resources": {"limits": {"gpu": "1"}},
        "tolerations": [{"key": "a"}],
    }
    overlay = {
        "restartPolicy": "Always",
        "env": [{"name": "A", "value": "3"}, {"name": "C", "value": "4"}],
        "resources": {"limits": {"gpu": 1, "cpu": 2}},
        "tolerations": [{"key": "b"}],
        "nodeSelector": {"x": "y"},
    }
    assert list(clashes(needed, overlay)) == [("env[A].value", "3", "1")]
