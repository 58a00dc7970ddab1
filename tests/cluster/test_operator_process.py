"""The operator's own process on a real control plane: it hears of changes, loses no step, ends and begins cleanly."""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from control_plane import ControlPlane, Tree
from helm import applied
from kubectl import WAIT
from operator_process import OperatorProcess, Sender, eventually, manifest, run_pods, until_refused


@pytest.fixture
def sender(namespace: str) -> Iterator[Sender]:
    made = Sender(namespace)
    yield made
    made.close()


def status(cluster: ControlPlane, namespace: str, name: str = "demo") -> Tree:
    tree = cluster.get("weightsync", name, namespace)
    found: Tree = (tree or {}).get("status", {})
    return found


def ready(cluster: ControlPlane, namespace: str, name: str = "demo") -> str:
    conditions = status(cluster, namespace, name).get("conditions", [])
    return next((c["status"] for c in conditions if c["type"] == "Ready"), "")


def pods(cluster: ControlPlane, namespace: str) -> int:
    return len(cluster.list("pods", namespace))


def settled(cluster: ControlPlane, namespace: str) -> bool:
    """Whether a first step is in the status and was told in an event, after which nothing is due."""
    reasons = [event["reason"] for event in cluster.list("events", namespace)]
    return ready(cluster, namespace) == "True" and "Synced" in reasons


def scheduler_is_quoted(cluster: ControlPlane, namespace: str, name: str) -> bool:
    """Of every pod: nothing is to come then, as no pod ever gets a node."""
    agents = status(cluster, namespace, name).get("agents", [])
    return bool(agents) and all("no nodes available" in agent["message"] for agent in agents)


def test_from_apply_to_ready_and_every_step_is_in_the_status(
    cluster: ControlPlane, namespace: str, sender: Sender
) -> None:
    with OperatorProcess(cluster, "-n", namespace) as operator:
        assert cluster.apply(manifest(), namespace).returncode == 0
        eventually(lambda: pods(cluster, namespace) == 2)
        run_pods(cluster, namespace, sender)
        sender.step()
        cluster.kubectl("-n", namespace, "wait", "--for=condition=Ready", "ws/demo", WAIT)
        for number in range(2, 5):
            ended = sender.step()
            eventually(lambda n=number: status(cluster, namespace).get("step") == n)  # type: ignore[misc]
            print(f"step {number} was seen {time.monotonic() - ended:.2f} s after it ended")
        tree = cluster.get("weightsync", "demo", namespace)
        assert tree is not None
        assert [step["step"] for step in tree["status"]["history"]] == [1, 2, 3, 4]
        assert tree["status"]["summary"]["rate"] == "348GB/s"
        assert not tree["metadata"].get("finalizers")
        assert set(tree["metadata"]["annotations"]) == {"kubectl.kubernetes.io/last-applied-configuration"}
        row = cluster.kubectl("-n", namespace, "get", "ws").splitlines()[1].split()
        assert row[:7] == ["demo", "True", "Syncing", "NCCL", "1/1", "4", "1GiB"]
        assert operator.metric(rf'weightsync_step\{{name="demo",namespace="{namespace}"\}}') == 4
        cluster.kubectl("-n", namespace, "delete", "ws/demo")
        eventually(lambda: "weightsync_step{" not in (operator.get("metrics") or ""))


def test_events_tell_transitions_and_nothing_else(cluster: ControlPlane, namespace: str, sender: Sender) -> None:
    with OperatorProcess(cluster, "-n", namespace, "--status-interval", "0"):
        assert cluster.apply(manifest(), namespace).returncode == 0
        eventually(lambda: pods(cluster, namespace) == 2)
        run_pods(cluster, namespace, sender)
        for number in range(1, 9):
            sender.step()
            eventually(lambda n=number: status(cluster, namespace).get("step") == n)  # type: ignore[misc]
        ours = [e for e in cluster.list("events", namespace) if e["source"].get("component") == "weightsync-operator"]
        assert [e["reason"] for e in ours].count("Synced") == 1
        assert len(ours) <= 4, [(e["reason"], e["message"]) for e in ours]
        assert "Synced" in cluster.kubectl("-n", namespace, "describe", "ws/demo")


def test_steps_done_while_the_operator_was_killed_are_in_the_history(
    cluster: ControlPlane, namespace: str, sender: Sender
) -> None:
    with OperatorProcess(cluster, "-n", namespace) as first:
        assert cluster.apply(manifest(), namespace).returncode == 0
        eventually(lambda: pods(cluster, namespace) == 2)
        run_pods(cluster, namespace, sender)
        sender.step()
        eventually(lambda: status(cluster, namespace).get("step") == 1)
        first.process.kill()
        first.process.wait(30)
    for _ in range(5):
        sender.step()
    with OperatorProcess(cluster, "-n", namespace):
        eventually(lambda: status(cluster, namespace).get("step") == 6)
        history = [step["step"] for step in status(cluster, namespace)["history"]]
        assert history == [1, 2, 3, 4, 5, 6]


def test_a_cold_start_writes_nothing_where_nothing_differs(
    cluster: ControlPlane, namespace: str, sender: Sender
) -> None:
    with OperatorProcess(cluster, "-n", namespace, "--status-interval", "0") as first:
        for name in ("demo", "other"):
            assert cluster.apply(manifest(name, receivers={"replicas": 2}), namespace).returncode == 0
        eventually(lambda: pods(cluster, namespace) == 6)
        eventually(lambda: all(scheduler_is_quoted(cluster, namespace, name) for name in ("demo", "other")))
        first.process.send_signal(signal.SIGTERM)
        assert first.ended() == 0
    since = time.time()
    with OperatorProcess(cluster, "-n", namespace) as second:
        eventually(lambda: second.passes("unchanged") >= 2)
        assert cluster.writes(since) == []
        assert second.passes("written|failed") == 0


def test_an_idle_operator_asks_the_api_server_nothing_and_ends_at_once(
    cluster: ControlPlane, namespace: str, sender: Sender
) -> None:
    with OperatorProcess(cluster, "-n", namespace) as operator:
        assert cluster.apply(manifest(), namespace).returncode == 0
        eventually(lambda: pods(cluster, namespace) == 2)
        run_pods(cluster, namespace, sender)
        sender.step()
        eventually(lambda: settled(cluster, namespace))
        since = time.time()
        time.sleep(5)
        # Once a minute, and half a minute after its start, it compares what it knows with all there is: page by page.
        asked = cluster.audit(since=since)
        later = [e for e in asked if e["verb"] != "watch" and "limit=" not in e["requestURI"]]
        assert later == []
        maps = Path(f"/proc/{operator.process.pid}/maps").read_text()
        assert "torch" not in maps, "it has nothing to do with tensors"
        began = time.monotonic()
        operator.process.send_signal(signal.SIGTERM)
        assert operator.ended() == 0
        print(f"it ended {time.monotonic() - began:.2f} s after SIGTERM")


def test_an_operator_that_hears_nothing_says_so_in_healthz(cluster: ControlPlane, namespace: str) -> None:
    # Bookmarks come once a minute: after a second without any this one thinks that its watches are deaf.
    with OperatorProcess(cluster, "-n", namespace, "--max-silence", "1") as operator:

        def unhealthy() -> bool:
            try:
                urllib.request.urlopen(f"http://{operator.http}/healthz", timeout=60).close()
            except urllib.error.HTTPError as error:
                return error.code == 503 and b"no event and no bookmark of /api" in error.read()
            return False

        eventually(unhealthy)
    with OperatorProcess(cluster, "-n", namespace) as operator:
        eventually(lambda: operator.get("readyz") == "ok\n")
        time.sleep(3)
        assert operator.get("healthz") == "ok\n"


def test_a_deleted_child_comes_back_at_once(cluster: ControlPlane, namespace: str) -> None:
    with OperatorProcess(cluster, "-n", namespace):
        assert cluster.apply(manifest(), namespace).returncode == 0
        eventually(lambda: pods(cluster, namespace) == 2)
        service = cluster.get("service", "demo-agents", namespace)
        assert service is not None
        cluster.kubectl("-n", namespace, "delete", "service/demo-agents", "--wait=false")

        def anew() -> bool:
            found = cluster.get("service", "demo-agents", namespace)
            return found is not None and found["metadata"]["uid"] != service["metadata"]["uid"]

        eventually(anew)


def test_a_restarted_api_server_is_survived(cluster: ControlPlane, namespace: str) -> None:
    with OperatorProcess(cluster, "-n", namespace) as operator:
        assert cluster.apply(manifest("before"), namespace).returncode == 0
        eventually(lambda: pods(cluster, namespace) == 2)
        cluster.kill("kube-apiserver")
        cluster.start("kube-apiserver")
        cluster.until_ready()
        applied(cluster, manifest("after"), namespace)  # the definition is served some moments later
        eventually(lambda: pods(cluster, namespace) == 4)
        assert operator.process.poll() is None


def test_an_operator_of_some_namespaces_leaves_the_others_alone(cluster: ControlPlane, namespace: str) -> None:
    other = f"test-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", other)
    with OperatorProcess(cluster, "-n", namespace) as operator:
        assert cluster.apply(manifest(), other).returncode == 0
        assert cluster.apply(manifest(), namespace).returncode == 0
        eventually(lambda: pods(cluster, namespace) == 2)
        assert status(cluster, other) == {}
        assert operator.metric("weightsync_step") == 0
    cluster.kubectl("delete", "namespace", other, "--wait=false")


def test_of_two_operators_one_acts_and_the_other_takes_over(cluster: ControlPlane, namespace: str) -> None:
    lease = ["--lease", f"{namespace}/operator"]
    with OperatorProcess(cluster, "-n", namespace, *lease) as first:
        eventually(lambda: first.get("readyz") == "ok\n")
        with OperatorProcess(cluster, "-n", namespace, *lease) as second:
            assert cluster.apply(manifest("one"), namespace).returncode == 0
            eventually(lambda: pods(cluster, namespace) == 2)
            eventually(lambda: first.passes() > 0)
            assert second.passes() == 0
            assert second.get("readyz") == "waits for the Lease\n"
            first.process.send_signal(signal.SIGTERM)
            assert first.ended() == 0
            print(f"taken over in {eventually(lambda: second.get('readyz') == 'ok' + chr(10)):.1f} s after SIGTERM")
            assert cluster.apply(manifest("two"), namespace).returncode == 0
            eventually(lambda: pods(cluster, namespace) == 4)
            with OperatorProcess(cluster, "-n", namespace, *lease) as third:
                second.process.kill()
                print(f"taken over in {eventually(lambda: third.get('readyz') == 'ok' + chr(10)):.1f} s after SIGKILL")


def test_an_operator_whose_lease_is_taken_ends_with_1(cluster: ControlPlane, namespace: str) -> None:
    with OperatorProcess(cluster, "-n", namespace, "--lease", f"{namespace}/operator") as operator:
        eventually(lambda: operator.get("readyz") == "ok\n")
        patch = json.dumps({"spec": {"holderIdentity": "somebody", "leaseDurationSeconds": 3600}})
        cluster.kubectl("-n", namespace, "patch", "lease/operator", "--type=merge", "-p", patch)
        assert operator.ended() == 1


def test_what_only_events_tell_is_in_the_condition_soon(cluster: ControlPlane, namespace: str) -> None:
    cluster.kubectl("-n", namespace, "create", "quota", "none", "--hard=pods=0")
    until_refused(cluster, namespace, "exceeded quota: none", "run", "probe", "--image=probe:1")
    with OperatorProcess(cluster, "-n", namespace):
        assert cluster.apply(manifest(), namespace).returncode == 0
        began = time.monotonic()

        def told() -> bool:
            conditions = status(cluster, namespace).get("conditions", [])
            return any(c["reason"] == "FailedCreate" and "exceeded quota: none" in c["message"] for c in conditions)

        eventually(told)
        print(f"the quota was named {time.monotonic() - began:.1f} s after apply")
        # Once the quota is gone the pods come, when the StatefulSet's controller tries again, and the condition goes.
        cluster.kubectl("-n", namespace, "delete", "quota/none")


def test_a_restart_takes_nothing_back_and_repeats_nothing(
    cluster: ControlPlane, namespace: str, sender: Sender
) -> None:
    with OperatorProcess(cluster, "-n", namespace):
        assert cluster.apply(manifest(), namespace).returncode == 0
        eventually(lambda: pods(cluster, namespace) == 2)
        run_pods(cluster, namespace, sender)
        sender.step()
        eventually(lambda: settled(cluster, namespace))
    since = time.time()
    with OperatorProcess(cluster, "-n", namespace) as second:
        eventually(lambda: second.passes("unchanged") >= 1)
        assert cluster.writes(since) == []
        sender.step()
        eventually(lambda: status(cluster, namespace)["step"] == 2)
        eventually(lambda: cluster.writes(since) != [])  # the API server notes it once it has answered
        assert cluster.writes(since) == ["patch weightsyncs/status demo"]
