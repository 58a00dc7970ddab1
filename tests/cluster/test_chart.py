"""The chart on a real API server: what it takes, what it refuses, what it leaves, and whether its rights suffice."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import yaml
from control_plane import ControlPlane, programs
from helm import CHART, CRD, Helm, InstalledOperator, everything
from kubectl import Kubectl, Tree
from operator_process import Sender, eventually, manifest, run_pods
from pod_cluster import must_not_skip
from weightsync_api.crd import render
from weightsync_api.validation import read_weightsyncs
from weightsync_operator.cluster import DEFAULTS
from weightsync_operator.objects import Options
from weightsync_operator.objects import render as render_objects
from weightsync_operator.plan import plan

VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
EXAMPLES = sorted((CHART.parents[1] / "examples").glob("*.yaml"))
MONITORING = Path(__file__).with_name("monitoring_crds.yaml")


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
    with namespace(plane, "system") as name:
        yield name
        Helm(plane).run("uninstall", "weightsync", "-n", name, "--ignore-not-found", "--wait")
        plane.kubectl("delete", "crd", CRD, "--ignore-not-found", "--timeout=30s")


@pytest.fixture
def team(plane: ControlPlane) -> Iterator[str]:
    with namespace(plane, "team") as name:
        yield name


@contextmanager
def namespace(plane: ControlPlane, prefix: str, **labels: str) -> Iterator[str]:
    name = f"{prefix}-{uuid.uuid4().hex[:8]}"
    tree = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    plane.kubectl("create", "-f", "-", stdin=json.dumps(tree))
    yield name
    plane.kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=false")


def established(cluster: Kubectl, *names: str) -> None:
    """`kubectl wait` fails where there are no conditions yet."""
    words = ["wait", "--for=condition=Established", "--timeout=30s", *(f"crd/{name}" for name in names)]
    eventually(lambda: cluster.run(*words, check=False).returncode == 0)


def applied(cluster: Kubectl, tree: Tree, where: str) -> None:
    """The API server serves a definition some moments after Helm has made it."""
    eventually(lambda: cluster.apply(tree, where).returncode == 0)


def pod_uids(cluster: Kubectl, where: str) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in cluster.list("pods", where)}


def is_ready(cluster: Kubectl, where: str, name: str = "demo") -> bool:
    tree = cluster.get("weightsync", name, where) or {}
    conditions = tree.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


# --- what is rendered -----------------------------------------------------------------------------------------------


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


def rendered_test(helm: Helm, where: str, *arguments: str) -> list[Tree]:
    shown = ["--show-only", "templates/tests/step.yaml", *arguments]
    return list(yaml.safe_load_all(helm.run("template", "weightsync", str(CHART), "-n", where, *shown).stdout))


def test_all_pods_satisfy_the_restricted_level(plane: ControlPlane, helm: Helm) -> None:
    with namespace(plane, "strict", **{"pod-security.kubernetes.io/enforce": "restricted"}) as where:
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


# --- install, upgrade, rollback, uninstall --------------------------------------------------------------------------


def test_the_installed_operator_may_do_all_it_does_and_nothing_else(
    plane: ControlPlane, helm: Helm, home: str, team: str
) -> None:
    helm.install(home)
    with InstalledOperator(plane, home) as operator, closing(Sender(team, receivers=2)) as sender:
        eventually(lambda: operator.get("readyz") == "ok\n")
        work_through(plane, team, sender)
        # Pods that are not ready roll together, the operator sees to it.
        before = set(pod_uids(plane, team).values())
        plane.kubectl("-n", team, "patch", "ws/demo", "--type=merge", "-p", '{"spec": {"agent": {"image": "agent:2"}}}')
        eventually(lambda: len(after := pod_uids(plane, team)) == 3 and not before & set(after.values()))
        assert operator.forbidden() == []
        used = {granted(event) for event in operator.requests()}
    allowed = rights(plane, "clusterrole/weightsync") | rights(plane, "role/weightsync-lease", home)
    assert {right for right in used if not right[1].startswith("/")} <= allowed
    assert allowed - used == {
        # Server-side apply is authorized as a creation where there is nothing yet, and logged as a patch.
        *(("create", kind) for kind in ("configmaps", "secrets", "services", "statefulsets")),
        *(("create", kind) for kind in ("networkpolicies", "poddisruptionbudgets")),
        ("update", "weightsyncs/finalizers"),  # what admission asks, where owner references block a deletion
        ("create", "leases"),  # the chart makes it; the operator where somebody deleted it
    }


def granted(event: Tree) -> tuple[str, str]:
    reference = event["objectRef"] if "objectRef" in event else {"resource": event["requestURI"]}
    return event["verb"], reference["resource"] + (f"/{reference['subresource']}" if "subresource" in reference else "")


def rights(cluster: Kubectl, role: str, where: str = "default") -> set[tuple[str, str]]:
    tree = json.loads(cluster.kubectl("-n", where, "get", role, "-o", "json"))
    return {(verb, what) for rule in tree["rules"] for what in rule["resources"] for verb in rule["verbs"]}


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
    cluster.kubectl("-n", where, "scale", "ws/demo", "--replicas=2")
    eventually(lambda: len(cluster.list("pods", where)) == 3)
    run_pods(cluster, where, sender)
    eventually(lambda: is_ready(cluster, where))


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
                assert operator.process.wait(15) == 0
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
        applied(plane, manifest(), team)
        eventually(lambda: len(plane.list("pods", team)) == 2)
        helm.uninstall(home)
        operator.process.terminate()
        assert operator.process.wait(15) in (0, 1)
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


# --- namespaces and rights ------------------------------------------------------------------------------------------


def test_an_operator_of_some_namespaces_has_rights_in_no_other(
    plane: ControlPlane, helm: Helm, home: str, team: str
) -> None:
    with namespace(plane, "other") as other, closing(Sender(team, receivers=2)) as sender:
        helm.install(home, "--set", f"watchNamespaces={{{team}}}")
        with InstalledOperator(plane, home) as operator:
            eventually(lambda: operator.get("readyz") == "ok\n")
            applied(plane, manifest(), other)
            work_through(plane, team, sender)
            assert operator.forbidden() == []
            assert plane.list("pods", other) == []
            assert not may(plane, operator.user, "list", "secrets", other)
            assert not may(plane, operator.user, "create", "statefulsets", other)
            assert not may(plane, operator.user, "list", "secrets", home)
            assert may(plane, operator.user, "list", "secrets", team)


def test_one_of_its_namespaces_that_goes_does_not_stop_the_operator_of_several(
    plane: ControlPlane, helm: Helm, home: str, team: str
) -> None:
    with namespace(plane, "gone") as gone:
        helm.install(home, "--set", f"watchNamespaces={{{team},{gone}}}")
        with InstalledOperator(plane, home) as operator:
            eventually(lambda: operator.get("readyz") == "ok\n")
            plane.kubectl("delete", "namespace", gone, "--timeout=50s")
            applied(plane, manifest("before"), team)
            eventually(lambda: len(plane.list("pods", team)) == 2)
            operator.process.terminate()
            assert operator.process.wait(15) == 0
        with InstalledOperator(plane, home):
            applied(plane, manifest("after"), team)
            eventually(lambda: len(plane.list("pods", team)) == 4)


def may(cluster: Kubectl, user: str, verb: str, what: str, where: str) -> bool:
    resource, _, part = what.partition("/")
    asked = ["auth", "can-i", verb, resource, *([f"--subresource={part}"] if part else []), "--as", user]
    return cluster.run("-n", where, *asked, check=False).stdout.strip() == "yes"


def test_the_clusters_roles_reach_weightsyncs(plane: ControlPlane, helm: Helm, home: str, team: str) -> None:
    for role in ("view", "edit", "admin"):
        plane.kubectl("-n", team, "create", "rolebinding", role, f"--clusterrole={role}", f"--user={role}er")
    assert not may(plane, "viewer", "get", "weightsyncs.weightsync.dev", team)
    helm.install(home)
    eventually(lambda: may(plane, "viewer", "get", "weightsyncs.weightsync.dev", team))
    eventually(lambda: may(plane, "editer", "create", "weightsyncs.weightsync.dev", team))
    eventually(lambda: may(plane, "adminer", "delete", "weightsyncs.weightsync.dev", team))
    assert may(plane, "editer", "patch", "weightsyncs.weightsync.dev/scale", team)
    assert not may(plane, "viewer", "create", "weightsyncs.weightsync.dev", team)
    # What the operator alone writes.
    assert not may(plane, "editer", "patch", "weightsyncs.weightsync.dev/status", team)


# --- the test -------------------------------------------------------------------------------------------------------


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
        output, _ = self.process.communicate(timeout=90)
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
    with InstalledOperator(plane, home):
        code, output = Verification(plane, helm, home, tmp_path, "--timeout", "6").ended()
        assert code == 1
        assert "no step was verified within 6 s" in output
        assert "Ready False" in output
        assert plane.list("weightsyncs", home) == []
