"""An operator older than its CustomResourceDefinition says so in the status, keeps the rest of it, and goes on."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import yaml
from control_plane import ControlPlane, Tree
from kubectl import WAIT
from operator_process import OperatorProcess, Sender, eventually, manifest, run_pods
from reconciling import Operator, applied, condition
from weightsync_api.crd import render
from weightsync_operator.objects import MANAGER

LATER = {"type": "string", "description": "A field of a later version."}


@contextmanager
def later_definition(cluster: ControlPlane, namespace: str) -> Iterator[None]:
    """The definition as a later version could have it: a field more in the spec, and a value and a condition more."""
    later = yaml.safe_load(render())
    properties = later["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    properties["spec"]["properties"]["transfer"]["properties"]["later"] = LATER
    properties["spec"]["properties"]["transfer"]["properties"]["mode"]["enum"].append("Later")
    properties["status"]["properties"]["laterFigure"] = LATER
    kind = properties["status"]["properties"]["conditions"]["items"]["properties"]["type"]
    kind.get("enum", []).append("LaterCondition")

    def install(definition: Tree) -> None:
        cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(definition))

    def serves_it() -> bool:
        probe = json.dumps(manifest("probe", transfer={"later": "x"}))
        command = ["create", "--dry-run=server", "--validate=strict", "-n", namespace, "-f", "-"]
        return cluster.run(*command, stdin=probe, check=False).returncode == 0

    install(later)
    try:
        eventually(serves_it)
        yield
    finally:
        cluster.kubectl("-n", namespace, "delete", "weightsyncs", "--all", WAIT)
        install(yaml.safe_load(render()))
        eventually(lambda: not serves_it())


@pytest.fixture
def later(cluster: ControlPlane, namespace: str) -> Iterator[None]:
    with later_definition(cluster, namespace):
        yield


def status(cluster: ControlPlane, namespace: str) -> dict[str, Any]:
    tree = cluster.get("weightsync", "demo", namespace)
    assert tree is not None
    return dict(tree.get("status") or {})


def change(cluster: ControlPlane, namespace: str, transfer: Tree) -> None:
    patch = json.dumps({"spec": {"transfer": transfer}})
    cluster.kubectl("-n", namespace, "patch", "weightsync/demo", "--type=merge", "-p", patch)


def uids(cluster: ControlPlane, namespace: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in cluster.list("pods", namespace)}


def without_verdict(status: Tree) -> Tree:
    """What must stay: all but the two conditions and the word in the column STATUS."""
    kept = copy.deepcopy(status)
    kept["conditions"] = {c["type"]: c for c in kept["conditions"] if c["type"] not in ("Ready", "Progressing")}
    kept["summary"].pop("status")
    return kept


def test_a_running_operator_tells_it_keeps_the_last_status_and_recovers(
    cluster: ControlPlane, namespace: str, later: None
) -> None:
    def ready() -> tuple[str, str, str]:
        found = {c["type"]: c for c in status(cluster, namespace).get("conditions", [])}.get("Ready", {})
        return found.get("status", ""), found.get("reason", ""), found.get("message", "")

    sender = Sender(namespace)
    try:
        with OperatorProcess(cluster, "-n", namespace, "--status-interval", "0") as operator:
            assert cluster.apply(manifest(), namespace).returncode == 0
            eventually(lambda: len(cluster.list("pods", namespace)) == 2)
            run_pods(cluster, namespace, sender)
            sender.step()
            eventually(lambda: ready()[1] == "Synced" and status(cluster, namespace)["step"] == 1)
            eventually(lambda: operator.metric("weightsync_operator_queue_depth") == 0)
            before, pods = status(cluster, namespace), uids(cluster, namespace)
            change(cluster, namespace, {"later": "x"})
            eventually(lambda: ready()[:2] == ("False", "UnreadableSpec"))
            assert "spec.transfer.later: weightsync-operator" in ready()[2]
            assert "does not know this field; it is older than the CustomResourceDefinition: upgrade" in ready()[2]
            assert without_verdict(status(cluster, namespace)) == without_verdict(before)
            assert "Degraded" in cluster.kubectl("-n", namespace, "get", "ws", "demo")
            eventually(
                lambda: operator.metric('weightsync_operator_weightsyncs{condition="Ready",status="False"}') == 1
            )
            writes = cluster.writes().count("patch weightsyncs/status demo")
            sender.step()
            # Others are served meanwhile, and this one is not written again and again.
            assert cluster.apply(manifest("other"), namespace).returncode == 0
            eventually(lambda: len(cluster.list("pods", namespace)) == 4)
            assert cluster.writes().count("patch weightsyncs/status demo") == writes
            assert pods < uids(cluster, namespace)
            assert operator.process.poll() is None
            change(cluster, namespace, {"later": None})
            eventually(lambda: ready()[1] == "Synced" and status(cluster, namespace)["step"] == 2)
            assert [step["step"] for step in status(cluster, namespace)["history"]] == [1, 2]
            assert uids(cluster, namespace) >= pods
    finally:
        sender.close()


def test_what_a_later_operator_wrote_stays_and_is_written_once(
    cluster: ControlPlane, namespace: str, operator: Operator, later: None
) -> None:
    applied(operator, manifest(transfer={"mode": "Later"}))
    stamp = "2026-01-02T03:04:05Z"
    step = {"step": 7, "startedAt": stamp, "durationMicroseconds": 9, "bytes": 5, "receivers": 1}
    wrote = {
        "conditions": [
            {"type": kind, "status": "True", "reason": "Well", "lastTransitionTime": stamp}
            for kind in ("LaterCondition", "Ready")
        ],
        "laterFigure": "x",
        "step": 7,
        "lastStep": step,
        "history": [step],
        "summary": {"status": "Syncing", "verified": "7"},
    }
    tree = {k: v for k, v in manifest().items() if k != "spec"} | {"status": wrote}
    cluster.kubectl(
        *("-n", namespace, "apply", "--server-side", "--subresource=status", f"--field-manager={MANAGER}", "-f", "-"),
        stdin=json.dumps(tree),
    )
    before = status(cluster, namespace)
    writes = len(cluster.writes())
    operator.passes("demo", "demo", "demo")
    assert cluster.writes()[writes:] == ["patch weightsyncs/status demo"]
    said = "spec.transfer.mode: weightsync-operator .* does not know the value 'Later'; it is older than"
    for kind in ("Ready", "Progressing"):
        assert condition(operator, kind)[:2] == ("False", "UnreadableSpec")
        assert re.match(said, condition(operator, kind)[2])
    assert without_verdict(status(cluster, namespace)) == without_verdict(before)
    change(cluster, namespace, {"mode": "Packed"})
    operator.passes("demo")
    assert condition(operator, "Ready")[1] == "Starting"
    assert [s["step"] for s in status(cluster, namespace)["history"]] == [7], "a condition it can't read costs no more"


def test_a_new_object_that_it_can_t_read_gets_a_status_and_no_pods(
    cluster: ControlPlane, namespace: str, operator: Operator, later: None
) -> None:
    applied(operator, manifest(transfer={"later": "x"}))
    operator.passes("demo", "demo")
    assert condition(operator, "Ready")[:2] == ("False", "UnreadableSpec")
    assert "Degraded" in cluster.kubectl("-n", namespace, "get", "ws", "demo")
    assert cluster.list("pods", namespace) == []
