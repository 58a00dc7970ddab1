"""Helm on one cluster, and an operator that is what the chart installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from control_plane import ControlPlane, end_with_parent
from kubectl import Kubectl, Tree
from loopback import addresses
from operator_process import OperatorProcess, Sender, eventually, manifest, run_pods

CHART = Path(__file__).parents[2] / "charts" / "weightsync"
CRD = "weightsyncs.weightsync.dev"


class Helm:
    """The chart, on the cluster of a kubectl. `program`: helm."""

    def __init__(self, cluster: Kubectl, chart: Path = CHART) -> None:
        self.program = cluster.program.with_name("helm")
        self.chart = chart
        self._environment = cluster.environment

    def run(self, *arguments: str, check: bool = True, timeout: float = 250) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(self.program), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=self._environment,
        )
        assert not check or done.returncode == 0, f"helm {' '.join(arguments)}: {done.stderr}"
        return done

    def template(self, namespace: str, *arguments: str) -> str:
        """What would be installed, without the test."""
        return self.run("template", "weightsync", str(self.chart), "-n", namespace, "--skip-tests", *arguments).stdout

    def install(self, namespace: str, *arguments: str) -> str:
        """Gives the notes."""
        return self.run("install", "weightsync", str(self.chart), "-n", namespace, *arguments).stdout

    def upgrade(self, namespace: str, *arguments: str) -> str:
        return self.run("upgrade", "weightsync", str(self.chart), "-n", namespace, *arguments).stdout

    def rollback(self, namespace: str, revision: int) -> None:
        self.run("rollback", "weightsync", str(revision), "-n", namespace)

    def uninstall(self, namespace: str) -> None:
        self.run("uninstall", "weightsync", "-n", namespace, "--wait")


class InstalledOperator(OperatorProcess):
    """The operator as a chart's Deployment would run it: its arguments, with a token of its ServiceAccount."""

    def __init__(self, cluster: ControlPlane, namespace: str, name: str = "weightsync") -> None:
        deployment = cluster.get("deployment", name, namespace)
        assert deployment is not None
        self.deployment = deployment
        pod: Tree = deployment["spec"]["template"]["spec"]
        self.user = f"system:serviceaccount:{namespace}:{pod['serviceAccountName']}"
        self.http = f"{next(addresses)}:8080"
        (container,) = pod["containers"]
        assert container["command"] == ["weightsync-operator"]
        arguments = [f"--http={self.http}" if a.startswith("--http=") else a for a in container["args"]]
        assert arguments != container["args"]
        self._cluster = cluster
        self._began = len(list(cluster.audit(self.user)))
        self._log = (cluster.dir / f"operator-{self.http}.log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "weightsync_operator.main", *arguments],
            env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig_of(namespace, pod["serviceAccountName"]))},
            stderr=self._log,
            preexec_fn=end_with_parent,
        )

    def forbidden(self) -> list[str]:
        """What it was not allowed to do, by the API server's word and by its own."""
        answers = [
            f"{event['verb']} {event['requestURI']}"
            for event in self.requests()
            if event.get("responseStatus", {}).get("code") in (401, 403)
        ]
        return answers + re.findall(r".*(?:[Ff]orbidden|[Pp]ermission).*", self.log())

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def requests(self) -> list[Tree]:
        return list(self._cluster.audit(self.user))[self._began :]


def everything(cluster: Kubectl) -> set[str]:
    """Names of all objects of all kinds, but for what comes and goes by itself: events, and what namespaces have."""
    found: set[str] = set()
    trees: list[Tree] = []

    def listed() -> bool:
        nonlocal trees
        kinds = cluster.kubectl("api-resources", "--verbs=list", "-o", "name").split()
        asked = ",".join(kind for kind in kinds if not kind.startswith(("events", "componentstatuses")))
        done = cluster.run("get", asked, "-A", "-o", "json", check=False)
        trees = json.loads(done.stdout)["items"] if done.returncode == 0 else []
        return done.returncode == 0

    eventually(listed)  # a kind whose definition has just gone is still among them for a moment
    for tree in trees:
        meta = tree["metadata"]
        place = f"{tree['kind']} {meta.get('namespace', '')}/{meta['name']}"
        # The API server's own, which it makes for each definition, and renews.
        made = (meta.get("labels") or {}).keys() & {
            "kube-aggregator.kubernetes.io/automanaged",
            "apiserver.kubernetes.io/identity",
        }
        if not made:
            found.add(place)
    return found


@contextmanager
def new_namespace(cluster: Kubectl, prefix: str, **labels: str) -> Iterator[str]:
    name = f"{prefix}-{uuid.uuid4().hex[:8]}"
    tree = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(tree))
    # It comes a moment later, and would be one more of `everything` than there was.
    eventually(lambda: cluster.get("serviceaccount", "default", name) is not None)
    yield name
    cluster.kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=false")


def established(cluster: Kubectl, *names: str) -> None:
    """Returns once their objects can be asked for. `kubectl wait` fails where there are no conditions yet."""
    words = ["wait", "--for=condition=Established", "--timeout=30s", *(f"crd/{name}" for name in names)]
    eventually(lambda: cluster.run(*words, check=False).returncode == 0)
    # kubectl knows them by discovery, which follows later.
    eventually(lambda: cluster.run("get", ",".join(names), "-A", check=False).returncode == 0)


def applied(cluster: Kubectl, tree: Tree, where: str) -> None:
    """The API server serves a definition some moments after Helm has made it."""
    eventually(lambda: cluster.apply(tree, where).returncode == 0)


def pod_uids(cluster: Kubectl, where: str) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in cluster.list("pods", where)}


def is_ready(cluster: Kubectl, where: str, name: str = "demo") -> bool:
    tree = cluster.get("weightsync", name, where) or {}
    conditions = tree.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def rendered_test(helm: Helm, where: str, *arguments: str) -> list[Tree]:
    shown = ["--show-only", "templates/tests/step.yaml", *arguments]
    return list(yaml.safe_load_all(helm.run("template", "weightsync", str(CHART), "-n", where, *shown).stdout))


def work_through(cluster: ControlPlane, where: str, sender: Sender) -> None:
    """All that an operator does for one WeightSync."""
    applied(cluster, manifest(receivers={"replicas": 2}), where)
    eventually(lambda: len(cluster.list("pods", where)) == 3)
    run_pods(cluster, where, sender)
    sender.step()
    eventually(lambda: is_ready(cluster, where))
    # One receiver needs no budget.
    cluster.kubectl("-n", where, "scale", "ws/demo", "--replicas=1")
    eventually(lambda: cluster.list("poddisruptionbudgets", where) == [])
    eventually(lambda: len(cluster.list("pods", where)) == 2)  # else the next three may be those that were there
    cluster.kubectl("-n", where, "scale", "ws/demo", "--replicas=2")
    eventually(lambda: len(cluster.list("pods", where)) == 3)
    run_pods(cluster, where, sender)
    eventually(lambda: is_ready(cluster, where))
