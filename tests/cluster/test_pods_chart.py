"""The chart with real pods: its test, upgrades under running transfers, and an example with programs of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from helm import Helm
from kubectl import Tree
from operator_process import eventually
from pod_cluster import RELEASE, SYSTEM, PodCluster, WeightSyncOnCluster, manifest, uids

pytestmark = pytest.mark.timeout(900)

EXAMPLES = Path(__file__).parents[2] / "examples"
TEST = f"{RELEASE}-test"


@pytest.fixture
def helm(pod_cluster: PodCluster) -> Iterator[Helm]:
    """Whatever a test made of the release, the next one finds it as it was."""
    yield pod_cluster.helm
    pod_cluster.install("--reset-values")


def what_tests_leave(cluster: PodCluster) -> list[str]:
    kinds = "pods,weightsyncs,statefulsets,configmaps,secrets,services,serviceaccounts,roles,rolebindings"
    return [f"{tree['kind']} {tree['metadata']['name']}" for tree in cluster.list(kinds, SYSTEM) if TEST in named(tree)]


def named(tree: Tree) -> str:
    name: str = tree["metadata"]["name"]
    return name


def operator_pods(cluster: PodCluster) -> set[str]:
    return {named(pod) for pod in cluster.list("pods", SYSTEM, "-l", "app.kubernetes.io/name=weightsync")}


def test_helm_test_sees_a_verified_step_and_leaves_nothing(pod_cluster: PodCluster, helm: Helm) -> None:
    done = helm.run("test", RELEASE, "-n", SYSTEM, "--timeout", "300s", check=False, timeout=400)
    told = done.stdout + done.stderr
    print(told)
    assert done.returncode == 0, told
    assert "is verified" in told
    assert "Phase:          Succeeded" in done.stdout
    eventually(lambda: what_tests_leave(pod_cluster) == [])


def test_a_helm_test_that_fails_says_why_and_leaves_nothing(pod_cluster: PodCluster, helm: Helm) -> None:
    pod_cluster.install("--set", "test.timeoutSeconds=25,test.agentResources.requests.cpu=1000")
    done = helm.run("test", RELEASE, "-n", SYSTEM, "--timeout", "300s", check=False, timeout=400)
    assert done.returncode != 0
    told = done.stdout + done.stderr
    assert "no step was verified within 25 s" in told
    assert "Insufficient cpu" in told
    eventually(lambda: what_tests_leave(pod_cluster) == [])


def test_transfers_go_on_while_the_operator_is_upgraded_rolled_back_and_gone(
    pod_cluster: PodCluster, helm: Helm, pod_namespace: str
) -> None:
    ws = pod_cluster.make(pod_namespace, manifest(receivers={"replicas": 2}))
    ws.wait_ready()
    before, operators = uids(ws.pods()), operator_pods(pod_cluster)
    pod_cluster.install("--set", "replicas=2,logLevel=DEBUG")
    # Those of before are listed until they have ended.
    eventually(lambda: len(operator_pods(pod_cluster) - operators) == len(operator_pods(pod_cluster)) == 2)
    goes_on(ws, before)
    helm.run("rollback", RELEASE, "-n", SYSTEM, "--wait", timeout=330)
    eventually(lambda: len(operator_pods(pod_cluster)) == 1)
    goes_on(ws, before)
    # Nobody reads the reports meanwhile, and none that counts is lost.
    last = ws.step()
    helm.run("uninstall", RELEASE, "-n", SYSTEM, "--wait", timeout=330)
    eventually(lambda: operator_pods(pod_cluster) == set())
    assert uids(ws.pods()) == before
    pod_cluster.install()
    goes_on(ws, before)
    ws.wait_step(10)
    steps = [step["step"] for step in ws.status()["history"]]
    assert steps == list(range(steps[0], steps[0] + 10))
    assert steps[-1] > last


def goes_on(ws: WeightSyncOnCluster, before: dict[str, tuple[str, int]]) -> None:
    """The operator of now tells new steps, and the pods are those of before."""
    ws.wait_step(ws.step() + 2)
    assert uids(ws.pods()) == before


def test_the_example_with_programs_of_ones_own_runs_as_it_is_written(
    pod_cluster: PodCluster, pod_namespace: str
) -> None:
    file = EXAMPLES / "dedicated.yaml"
    # The first line of the file's head that is a command, as a user would.
    (line,) = (text for text in file.read_text().splitlines() if text.startswith("#   kubectl create configmap"))
    words = [word.replace("examples/", f"{EXAMPLES}/") for word in line.removeprefix("#   kubectl ").split()]
    pod_cluster.kubectl("-n", pod_namespace, *words)
    ws = pod_cluster.make(pod_namespace, yaml.safe_load(file.read_text()))
    ws.wait_ready()
    ws.wait_step(3)
    assert "sent, sum" in ws.kubectl("logs", "dedicated-sender-0")
    assert "holds, sum" in ws.kubectl("logs", "dedicated-receivers-1")
