"""The chart's files agree with each other, with the package, and with docs/helm.md."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from weightsync_api.crd import render
from weightsync_api.validation import read_weightsyncs
from weightsync_operator.objects import Options
from weightsync_operator.objects import render as render_objects
from weightsync_operator.plan import ClusterAddresses, PlanDefaults, plan

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "weightsync"
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())

Row = tuple[str, Any, str]


def resolved(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """What it refers to, but with its own description where it has one."""
    if "$ref" not in node:
        return node
    found: Any = SCHEMA
    for part in node["$ref"].removeprefix("#/").split("/"):
        found = found[part]
    return {**resolved(found), **{key: value for key, value in node.items() if key != "$ref"}}


def rows(schema: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "") -> Iterator[Row]:
    """Name, default and description of every value that has no parts with names of their own."""
    for name, value in values.items():
        node = resolved(schema["properties"][name])
        if node.get("properties") and "limits" not in node["properties"]:
            yield from rows(node, value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, node["description"]


ROWS = list(rows(SCHEMA, VALUES))


def test_the_page_lists_every_value_as_the_chart_has_it() -> None:
    shown = [f"| `{name}` | `{json.dumps(value)}` | {text} |" for name, value, text in ROWS]
    table = "\n".join(["| value | default | meaning |", "| --- | --- | --- |", *shown])
    assert f"\n{table}\n" in (ROOT / "docs" / "helm.md").read_text(), f"the page should have:\n{table}"


def test_every_value_of_the_schema_has_a_default() -> None:
    def names(schema: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
        for name, child in schema["properties"].items():
            node = resolved(child)
            if node.get("properties") and "limits" not in node["properties"]:
                yield from names(node, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}"

    assert set(names(SCHEMA)) - {"global"} == {name for name, _, _ in ROWS}


def test_no_object_of_the_schema_takes_unknown_names() -> None:
    def objects(node: Any, where: str) -> Iterator[str]:
        if isinstance(node, dict):
            if "properties" in node and "type" in node and node.get("additionalProperties") is not False:
                yield where
            for key, child in node.items():
                yield from objects(child, f"{where}/{key}")

    assert not [where for where in objects(SCHEMA, "") if "/imagePullSecrets/" not in where]


def test_the_charts_definition_is_the_generated_one() -> None:
    assert (CHART / "files" / "weightsync.dev_weightsyncs.yaml").read_text() == render()


def test_the_chart_has_the_packages_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_example_is_a_plan_without_problems(file: Path) -> None:
    for ws in read_weightsyncs(file):
        made = render_objects(plan(ws, PlanDefaults(ClusterAddresses())), Options(image="agent:1"))
        assert [problem.message for problem in made.problems] == []
        assert {tree["kind"] for tree in made.objects} >= {"StatefulSet", "Service", "ConfigMap", "NetworkPolicy"}
