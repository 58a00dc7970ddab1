"""One control plane for the tests without nodes, and a namespace for each; the chart installed for those with pods."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Generator, Iterator

import pytest
from control_plane import ControlPlane, programs
from helm import CRD, Helm, established, new_namespace
from kubectl import WAIT
from operator_process import eventually
from pod_cluster import FAILED, PodCluster, alone, must_not_skip, why_no_pods
from reconciling import Operator
from weightsync_api.crd import render


@pytest.fixture(scope="session")
def cluster() -> Iterator[ControlPlane]:
    """With the CustomResourceDefinition of WeightSync."""
    folder = programs()
    if folder is None:
        pytest.skip("the programs of Kubernetes are not built: make test-cluster builds them, with Go, and runs these")
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing, which makes the control plane's key")
    with ControlPlane(folder) as plane:
        plane.kubectl("apply", "--server-side", "-f", "-", stdin=render())
        established(plane, "weightsyncs.weightsync.dev")
        yield plane


@pytest.fixture
def namespace(cluster: ControlPlane) -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    # Without it no pod is taken, which the operator would tell.
    eventually(lambda: cluster.get("serviceaccount", "default", name) is not None)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def operator(cluster: ControlPlane, namespace: str) -> Operator:
    """Passes one at a time."""
    return Operator(cluster, namespace)


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """A cluster of its own: these tests install and remove the CustomResourceDefinition."""
    folder = programs()
    reason = ""
    if folder is None or not (folder / "helm").exists():
        reason = "the programs of Kubernetes are not built: make test-cluster builds them, with Go, and runs these"
    elif shutil.which("openssl") is None:
        reason = "openssl is missing, which makes the control plane's key"
    if reason and must_not_skip():
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    assert folder is not None
    with ControlPlane(folder, scheduler=False) as made:
        yield made


@pytest.fixture
def helm(plane: ControlPlane) -> Helm:
    return Helm(plane)


@pytest.fixture
def home(plane: ControlPlane) -> Iterator[str]:
    """Namespace of a release, which is uninstalled at the end, whatever became of the test."""
    with new_namespace(plane, "system") as name:
        yield name
        Helm(plane).run("uninstall", "weightsync", "-n", name, "--ignore-not-found", "--wait")
        plane.kubectl("delete", "crd", CRD, "--ignore-not-found", WAIT)


@pytest.fixture
def team(plane: ControlPlane) -> Iterator[str]:
    with new_namespace(plane, "team") as name:
        yield name


@pytest.fixture(scope="module")
def pod_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodCluster]:
    """With the operator installed by the chart."""
    if reason := why_no_pods():
        if must_not_skip():
            pytest.fail(f"{reason} (WEIGHTSYNC_NO_SKIP is set: nothing is skipped)")
        pytest.skip(reason)
    made = PodCluster(tmp_path_factory.mktemp("home"))
    with alone():
        made.install()
        yield made
        made.uninstall()


@pytest.fixture
def pod_namespace(pod_cluster: PodCluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """Takes restricted pods only. Of a test that failed it tells what was there at the end."""
    with pod_cluster.namespace() as name:
        yield name
        if request.node.stash.get(FAILED, False):
            print(pod_cluster.told(name))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report
