"""Helm on one cluster, and an operator that is what the chart installed."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from control_plane import ControlPlane
from kubectl import Kubectl, Tree
from operator_process import OperatorProcess

CHART = Path(__file__).parents[2] / "charts" / "weightsync"
CRD = "weightsyncs.weightsync.dev"


class Helm:
    """The chart, on the cluster of a kubectl. `program`: helm."""

    def __init__(self, cluster: Kubectl, chart: Path = CHART) -> None:
        self.program = cluster.program.with_name("helm")
        self.chart = chart
        self._environment = cluster.environment

    def run(self, *arguments: str, check: bool = True, timeout: float = 100) -> subprocess.CompletedProcess[str]:
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
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.http = f"127.0.0.1:{free.getsockname()[1]}"
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
    found = set()
    kinds = cluster.kubectl("api-resources", "--verbs=list", "-o", "name").split()
    asked = ",".join(kind for kind in kinds if not kind.startswith(("events", "componentstatuses")))
    for tree in json.loads(cluster.kubectl("get", asked, "-A", "-o", "json"))["items"]:
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
