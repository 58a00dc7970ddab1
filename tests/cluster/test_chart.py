"""The chart on a real API server: install, upgrade, rollback, uninstall, what is left, and the program of its test."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import yaml
from control_plane import ControlPlane
from helm import (
    CHART,
    CRD,
    Helm,
    InstalledOperator,
    applied,
    everything,
    pod_uids,
    rendered_test,
    work_through,
)
from kubectl import WAIT, Kubectl, Tree
from operator_process import Sender, eventually, manifest, run_pods
from weightsync_api.crd import render


def test_an_upgrade_and_a_rollback_leave_the_receivers_alone(
    plane: ControlPlane, helm: Helm, home: str, team: str
) -> None:
    helm.install(home)
    with closing(Sender(team, receivers=2)) as sender:
        with InstalledOperator(plane, home) as operator:
            work_through(plane, team, sender)
            before = pod_uids(plane, team)
            helm.upgrade(home, "--set", "replicas=2,logLevel=DEBUG,image.tag=next")
            # As the Deployment does: the next one is there before the former goes.
            with InstalledOperator(plane, home) as upgraded:
                operator.process.terminate()
                assert operator.ended() == 0
                eventually(lambda: upgraded.get("readyz") == "ok\n" and upgraded.passes() > 0)
                sender.step()
                eventually(lambda: step_of(plane, team) == 2)
                assert upgraded.forbidden() == []
            assert pod_uids(plane, team) == before
        helm.rollback(home, 1)
        with InstalledOperator(plane, home) as back:
            assert back.deployment["spec"]["replicas"] == 1
            eventually(lambda: back.get("readyz") == "ok\n" and back.passes() > 0)
            sender.step()
            eventually(lambda: step_of(plane, team) == 3)
            assert pod_uids(plane, team) == before


def step_of(cluster: Kubectl, where: str) -> int:
    status: Tree = (cluster.get("weightsync", "demo", where) or {})["status"]
    return int(status["step"])


def test_an_upgrade_brings_the_new_fields_of_the_definition(
    plane: ControlPlane, helm: Helm, home: str, team: str, tmp_path: Path
) -> None:
    old = tmp_path / "weightsync"
    shutil.copytree(CHART, old)
    tree = yaml.safe_load(render())
    properties = tree["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    del properties["spec"]["properties"]["suspend"]
    del properties["status"]["properties"]["observedGeneration"]
    (old / "files" / "weightsync.dev_weightsyncs.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    Helm(plane, old).install(home)
    assert "suspend" not in schema(plane)
    with InstalledOperator(plane, home) as operator:
        applied(plane, manifest(), team)
        # The operator is newer than the definition, as where crds.enabled is false: it says so.
        eventually(lambda: "is older than this operator, and no status can be written" in operator.log())
        helm.upgrade(home)
        assert "suspend" in schema(plane)
        eventually(lambda: "observedGeneration" in (plane.get("weightsync", "demo", team) or {}).get("status", {}))


def schema(cluster: Kubectl) -> Tree:
    tree = json.loads(cluster.kubectl("get", "crd", CRD, "-o", "json"))
    found: Tree = tree["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    return found


def test_the_definition_that_is_installed_is_the_generated_one(plane: ControlPlane, helm: Helm, home: str) -> None:
    helm.install(home)
    live = json.loads(plane.kubectl("get", "crd", CRD, "-o", "json"))
    wanted = yaml.safe_load(render())
    source = wanted["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["sender"]
    trainer = source["properties"]["source"]["properties"]["trainer"]
    assert trainer.pop("properties") == {}  # which the API server leaves out
    assert live["spec"]["versions"][0]["schema"] == wanted["spec"]["versions"][0]["schema"]


def test_what_is_kept_at_uninstall_is_the_definition_and_its_weightsyncs(
    plane: ControlPlane, helm: Helm, home: str, team: str
) -> None:
    before = everything(plane)
    helm.install(home)
    with InstalledOperator(plane, home) as operator:
        eventually(lambda: operator.get("readyz") == "ok\n")
        applied(plane, manifest(), team)
        eventually(lambda: len(plane.list("pods", team)) == 2)
        pods = pod_uids(plane, team)
        helm.uninstall(home)
    left = {name for name in everything(plane) - before if f" {team}/" not in name}
    assert left == {f"CustomResourceDefinition /{CRD}"}
    assert pod_uids(plane, team) == pods
    # The same release takes it back, and finds all as it was.
    helm.install(home)
    with InstalledOperator(plane, home) as again:
        eventually(lambda: again.passes() > 0)
        assert pod_uids(plane, team) == pods


def test_nothing_is_left_at_uninstall_where_the_definition_is_not_kept(
    plane: ControlPlane, helm: Helm, home: str, team: str
) -> None:
    before = everything(plane)
    helm.install(home, "--set", "crds.keep=false")
    with InstalledOperator(plane, home) as operator:
        eventually(lambda: operator.get("readyz") == "ok\n")
        # Kubernetes' garbage collector looks for new kinds each 30 s, and never misses owners of a kind that came and
        # went in between: it collects the children of one first.
        applied(plane, manifest("first"), team)
        eventually(lambda: len(plane.list("pods", team)) == 2)
        plane.kubectl("-n", team, "delete", "ws/first", WAIT)
        eventually(lambda: plane.list("pods,statefulsets", team) == [])
        applied(plane, manifest(), team)
        eventually(lambda: len(plane.list("pods", team)) == 2)
        helm.uninstall(home)
        operator.process.terminate()
        assert operator.ended() in (0, 1)
    eventually(lambda: everything(plane) - before == set())


def test_a_definition_that_no_longer_is_the_releases_stays(plane: ControlPlane, helm: Helm, home: str) -> None:
    helm.install(home)
    helm.upgrade(home, "--set", "crds.enabled=false")
    assert plane.get("crd", CRD, home) is not None
    helm.upgrade(home, "--set", "crds.enabled=true")
    assert plane.get("crd", CRD, home) is not None


def test_the_notes_say_what_to_do_next(helm: Helm, home: str) -> None:
    notes = helm.install(home)
    assert f"kubectl -n {home} rollout status deployment/weightsync" in notes
    assert f"helm -n {home} test weightsync" in notes
    assert "acts in all namespaces" in notes


class Verification:
    """The program of the test's pod, as its own ServiceAccount, with what the chart's ConfigMap holds."""

    def __init__(self, plane: ControlPlane, helm: Helm, where: str, folder: Path, *arguments: str) -> None:
        trees = rendered_test(helm, where)
        (pod,) = (tree for tree in trees if tree["kind"] == "Pod")
        (config,) = (tree for tree in trees if tree["kind"] == "ConfigMap")
        self.name = pod["metadata"]["name"]
        file = folder / "weightsync.yaml"
        file.write_text(config["data"]["weightsync.yaml"])
        rights = [tree for tree in trees if tree["kind"] in ("ServiceAccount", "Role", "RoleBinding")]
        plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(rights))
        account = plane.kubeconfig_of(where, pod["spec"]["serviceAccountName"])
        command = pod["spec"]["containers"][0]["command"]
        assert command[0] == "python"
        self.process = subprocess.Popen(
            [sys.executable, *command[1:], *arguments, str(file)],
            env={"PATH": "/usr/bin:/bin", "KUBECONFIG": str(account)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ended(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=250)
        return self.process.returncode, output


def test_the_test_waits_for_a_verified_step_and_leaves_nothing(
    plane: ControlPlane, helm: Helm, home: str, tmp_path: Path
) -> None:
    helm.install(home)
    with InstalledOperator(plane, home):
        verification = Verification(plane, helm, home, tmp_path)
        with closing(Sender(home, verification.name)) as sender:
            eventually(lambda: len(plane.list("pods", home)) == 2)
            run_pods(plane, home, sender)
            sender.step()
            code, output = verification.ended()
            assert code == 0, output
            assert "step 1 is verified" in output
        eventually(lambda: plane.list("pods,weightsyncs,statefulsets", home) == [])


def test_the_test_says_why_no_step_was_verified(plane: ControlPlane, helm: Helm, home: str, tmp_path: Path) -> None:
    helm.install(home)
    with InstalledOperator(plane, home) as operator:
        eventually(lambda: operator.get("readyz") == "ok\n")
        # Long enough for a busy machine's operator to say why.
        code, output = Verification(plane, helm, home, tmp_path, "--timeout", "15").ended()
        assert code == 1
        assert "no step was verified within 15 s" in output
        assert "Ready False" in output
        assert plane.list("weightsyncs", home) == []
