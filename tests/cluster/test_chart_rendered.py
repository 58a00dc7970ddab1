"""What the chart renders is taken by a real API server; what can not be meant is refused by its name."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
import yaml
from control_plane import ControlPlane
from helm import (
    CHART,
    CRD,
    Helm,
    established,
    new_namespace,
    rendered_test,
)
from kubectl import Tree
from weightsync_api.validation import read_weightsyncs
from weightsync_operator.cluster import DEFAULTS
from weightsync_operator.objects import Options
from weightsync_operator.objects import render as render_objects
from weightsync_operator.plan import plan

EXAMPLES = sorted((CHART.parents[1] / "examples").glob("*.yaml"))
VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
MONITORING = Path(__file__).with_name("monitoring_crds.yaml")


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda path: path.stem)
def test_the_api_server_takes_the_examples_and_all_that_they_become(
    plane: ControlPlane, helm: Helm, home: str, team: str, file: Path
) -> None:
    helm.install(home)
    established(plane, CRD)
    words = ["-n", team, "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"]
    plane.kubectl(*words, stdin=file.read_text())
    for ws in read_weightsyncs(file):
        meta = ws.metadata.model_copy(update={"namespace": team})
        made = render_objects(plan(ws.model_copy(update={"metadata": meta}), DEFAULTS), Options(image="agent:1"))
        plane.kubectl(*words, stdin=yaml.safe_dump_all(made.objects))


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_lint_finds_nothing(helm: Helm, values: Path) -> None:
    helm.run("lint", "--strict", str(CHART), "-f", str(values))


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_the_api_server_takes_what_is_rendered(plane: ControlPlane, helm: Helm, values: Path) -> None:
    plane.kubectl("apply", "--server-side", "-f", str(MONITORING))
    crds = [tree["metadata"]["name"] for tree in yaml.safe_load_all(MONITORING.read_text())]
    established(plane, *crds)
    watched = yaml.safe_load(values.read_text()).get("watchNamespaces", [])
    home = f"home-{uuid.uuid4().hex[:8]}"
    for name in (home, *watched):
        plane.kubectl("create", "namespace", name)
    try:
        text = helm.run("template", "weightsync", str(CHART), "-n", home, "-f", str(values)).stdout
        # A pod is not taken, even for a trial, before its ServiceAccount is there.
        accounts = [tree for tree in yaml.safe_load_all(text) if tree and tree["kind"] == "ServiceAccount"]
        if accounts:
            plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(accounts))
        plane.kubectl("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text)
    finally:
        for name in (home, *watched):
            plane.kubectl("delete", "namespace", name)


def test_the_tests_weightsync_is_valid(plane: ControlPlane, helm: Helm, home: str) -> None:
    helm.install(home, "--set", "imagePullSecrets[0].name=registry")
    established(plane, CRD)
    (text,) = (tree["data"]["weightsync.yaml"] for tree in rendered_test(helm, home) if tree["kind"] == "ConfigMap")
    plane.kubectl("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text)


def test_all_pods_satisfy_the_restricted_level(plane: ControlPlane, helm: Helm) -> None:
    with new_namespace(plane, "strict", **{"pod-security.kubernetes.io/enforce": "restricted"}) as where:
        plane.kubectl("-n", where, "create", "serviceaccount", "weightsync")
        plane.kubectl("-n", where, "create", "serviceaccount", "weightsync-test")
        trees = [t for t in yaml.safe_load_all(helm.template(where)) if t and t["kind"] == "Deployment"]
        pods: list[Tree] = [
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "operator"},
                "spec": tree["spec"]["template"]["spec"],
            }
            for tree in trees
        ]
        pods += [tree for tree in rendered_test(helm, where) if tree["kind"] == "Pod"]
        assert len(pods) == 2
        for pod in pods:
            done = plane.run("-n", where, "create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod), check=False)
            assert done.returncode == 0, done.stderr
            assert "Warning" not in done.stderr


@pytest.mark.parametrize(
    ("typo", "named"),
    [
        ("replcias=2", "replcias"),
        ("image.tagg=1", "tagg"),
        ("agent.image.pullPolicy=Always", "pullPolicy"),
        ("metrics.podmonitor.enabled=true", "podmonitor"),
        ("crds.kept=false", "kept"),
        ("watchNamespace=team-a", "watchNamespace"),
        ("resources.limit.memory=1Gi", "limit"),
    ],
)
def test_a_typo_is_refused_by_its_name(helm: Helm, typo: str, named: str) -> None:
    done = helm.run("template", "weightsync", str(CHART), "--set", typo, check=False)
    assert done.returncode != 0
    assert f"'{named}' not allowed" in done.stderr


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ("replicas=two", "/replicas"),
        ("logLevel=LOUD", "/logLevel"),
        ("watchNamespaces[0]=Team_A", "/watchNamespaces/0"),
        ("agent.image.digest=sha256:12", "/agent/image/digest"),
        ("image.repository=weightsync/operator:1.0", "/image/repository"),
        ("test.timeoutSeconds=0", "/test/timeoutSeconds"),
        ("serviceAccount.create=false", "serviceAccount.name"),
    ],
)
def test_a_value_that_can_not_be_is_refused_with_its_place(helm: Helm, bad: str, named: str) -> None:
    done = helm.run("template", "weightsync", str(CHART), "--set", bad, check=False)
    assert done.returncode != 0
    assert named in done.stderr


def test_two_monitors_are_refused(helm: Helm) -> None:
    both = "metrics.podMonitor.enabled=true,metrics.serviceMonitor.enabled=true"
    done = helm.run("template", "weightsync", str(CHART), "--set", both, check=False)
    assert done.returncode != 0
    assert "metrics.podMonitor.enabled and metrics.serviceMonitor.enabled are both true" in done.stderr


def test_another_charts_globals_are_no_typo(helm: Helm) -> None:
    helm.run("template", "weightsync", str(CHART), "--set", "global.imageRegistry=registry.example")
