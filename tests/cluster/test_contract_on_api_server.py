"""The table of contract cases, judged by a real API server through kubectl, as `weightsync run` judges it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from contract import MANIFESTS, Case, at, cases, server_sentences
from control_plane import ControlPlane

CASES = [case for case in cases() if not case.local]


@pytest.mark.parametrize("case", [case for case in CASES if not case.update], ids=str)
def test_a_manifest_is_accepted_or_refused_with_the_sentences_of_the_table(cluster: ControlPlane, case: Case) -> None:
    done = cluster.run(
        "create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(case.manifest), check=False
    )
    assert (done.returncode != 0) == bool(case.refused), done.stderr
    assert sorted(server_sentences(done.stderr)) == sorted(case.refused), done.stderr
    if not case.refused:
        assert {path: at(json.loads(done.stdout), path) for path in case.holds} == case.holds


@pytest.mark.parametrize("case", [case for case in CASES if case.update], ids=str)
def test_a_change_is_accepted_or_refused_with_the_sentences_of_the_table(
    cluster: ControlPlane, namespace: str, case: Case
) -> None:
    assert case.update is not None
    assert cluster.apply(case.manifest, namespace).returncode == 0
    done = cluster.apply(case.update, namespace)
    assert (done.returncode != 0) == bool(case.refused), done.stderr
    assert sorted(server_sentences(done.stderr)) == sorted(case.refused), done.stderr


@pytest.mark.parametrize("path", sorted(MANIFESTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_good_manifests_are_taken(cluster: ControlPlane, path: Path) -> None:
    cluster.kubectl("create", "--dry-run=server", "-f", str(path))


def test_the_cost_of_the_rules_is_within_the_api_server_s_budget(cluster: ControlPlane) -> None:
    crd = cluster.get("crd", "weightsyncs.weightsync.dev", "default")
    assert crd is not None
    states = {condition["type"]: condition["status"] for condition in crd["status"]["conditions"]}
    assert states["Established"] == "True"
    assert states.get("NonStructuralSchema", "False") == "False"
