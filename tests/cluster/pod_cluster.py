"""A cluster with a kubelet, the operator on it as the chart installs it, and real pods of the real agent image."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Self

import pytest
from control_plane import HERE, programs
from helm import CHART, CRD, Helm, established
from kubectl import WAIT, Kubectl, Tree
from operator_process import eventually

SYSTEM = "weightsync-system"
RELEASE = "weightsync"
FAILED = pytest.StashKey[bool]()
"""Of a test that failed."""
STARTED_SECONDS = 400.0
"""For an agent's start: torch is imported from a cold disk by several processes at a time."""
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
}
"""0.3 million parameters."""


def must_not_skip() -> bool:
    """Whether a test that can't run is a failure."""
    return bool(os.environ.get("WEIGHTSYNC_NO_SKIP"))


def kubeconfig() -> Path:
    """Of WEIGHTSYNC_KUBECONFIG; else that of `make cluster`."""
    if given := os.environ.get("WEIGHTSYNC_KUBECONFIG"):
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("WEIGHTSYNC_CLUSTER_STATE") or cache / "weightsync" / "state") / "admin.kubeconfig"


def why_no_pods() -> str:
    """Why no pods can run; empty where they can."""
    path = kubeconfig()
    if path.exists():
        missing = [name for name in ("kubectl", "helm") if _program(name) is None]
        return f"{' and '.join(missing)} missing: put it on PATH, or run make cluster" if missing else ""
    if "WEIGHTSYNC_KUBECONFIG" in os.environ:
        return f"WEIGHTSYNC_KUBECONFIG: there is no {path}"
    asked = subprocess.run([HERE / "cluster.sh", "why-not"], capture_output=True, text=True, check=True, timeout=60)
    return asked.stdout.strip() or "there is no cluster with nodes: make cluster brings one up"


@contextmanager
def alone() -> Iterator[None]:
    """One test run at a time installs and removes the release on a cluster; another waits for it."""
    place = hashlib.sha256(str(kubeconfig().resolve()).encode()).hexdigest()[:8]
    with (Path(tempfile.gettempdir()) / f"weightsync-tests-{os.getuid()}-{place}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _program(name: str) -> Path | None:
    built = programs()
    if built is not None and (built / name).exists():
        return built / name
    found = shutil.which(name)
    return Path(found) if found else None


class PodCluster(Kubectl):
    """The cluster, and the release of the chart on it."""

    def __init__(self, home: Path) -> None:
        kubectl, helm = _program("kubectl"), _program("helm")
        assert kubectl is not None
        assert helm is not None
        super().__init__(kubectl, kubeconfig(), home)
        self.helm = Helm(self)
        self.helm.program = helm

    # --- the operator -----------------------------------------------------------------------------------------------

    def install(self, *arguments: str) -> None:
        """With the images of this tree; WEIGHTSYNC_HELM_ARGS says where another cluster finds its own."""
        images = {"image": "operator", "agent.image": "agent"}
        ours = [f"--set={at}.repository=weightsync/{name},{at}.tag=dev" for at, name in images.items()]
        chosen = shlex.split(os.environ.get("WEIGHTSYNC_HELM_ARGS", "")) or ours
        words = ("upgrade", "--install", RELEASE, str(CHART), "-n", SYSTEM, "--create-namespace", "--wait")
        done = self.helm.run(*words, *chosen, *arguments, check=False, timeout=330)
        assert done.returncode == 0, f"{done.stderr}\n{self.told(SYSTEM)}"
        established(self, CRD)

    def uninstall(self) -> None:
        self.helm.run("uninstall", RELEASE, "-n", SYSTEM, "--wait", "--ignore-not-found", timeout=330)
        self.run("delete", "crd", CRD, "--ignore-not-found")
        self.run("delete", "namespace", SYSTEM, "--ignore-not-found")

    def scale_operator(self, replicas: int) -> None:
        """Returns once so many run."""
        self.kubectl("-n", SYSTEM, "scale", f"deployment/{RELEASE}", f"--replicas={replicas}")
        if replicas:
            self.kubectl("-n", SYSTEM, "rollout", "status", f"deployment/{RELEASE}", WAIT)
        else:
            eventually(lambda: not self.list("pods", SYSTEM))

    def operator_log(self) -> str:
        return self.run("-n", SYSTEM, "logs", f"deployment/{RELEASE}", "--tail=60", check=False).stdout

    # --- namespaces -------------------------------------------------------------------------------------------------

    @contextmanager
    def namespace(self) -> Iterator[str]:
        """Takes restricted pods only. Gone with all that is in it at the end of the block."""
        name = f"pods-{uuid.uuid4().hex[:8]}"
        self.kubectl("create", "namespace", name)
        self.kubectl("label", "namespace", name, RESTRICTED)
        self.kubectl("-n", name, "create", "configmap", "model", f"--from-literal=config.json={json.dumps(MODEL)}")
        try:
            yield name
        finally:
            self.run("delete", "namespace", name)

    def told(self, namespace: str) -> str:
        """What a person would look at first."""
        asked = (("get", "ws,pods", "-o", "wide"), ("describe", "ws"), ("get", "events", "--sort-by=.lastTimestamp"))
        found = [self.run("-n", namespace, *words, check=False).stdout[-6000:] for words in asked]
        for pod in self.list("pods", namespace):
            name = pod["metadata"]["name"]
            logs = self.run("-n", namespace, "logs", name, "--all-containers", "--tail=40", check=False)
            found.append(f"--- {name}\n{logs.stdout}{logs.stderr}")
        return "\n".join([*found, "--- operator", self.operator_log()])

    # --- WeightSyncs ------------------------------------------------------------------------------------------------

    def make(self, namespace: str, tree: Tree) -> WeightSyncOnCluster:
        done = self.apply(tree, namespace)
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr
        return WeightSyncOnCluster(self, namespace, tree["metadata"]["name"])


def manifest(name: str = "demo", **spec: Any) -> Tree:
    """A WeightSync on the CPU whose pods ask for a GPU each, with a small model and a step each second."""
    pod = {
        "spec": {
            "terminationGracePeriodSeconds": 5,
            "containers": [{"name": "agent", "volumeMounts": [{"name": "model", "mountPath": "/model"}]}],
            "volumes": [{"name": "model", "configMap": {"name": "model"}}],
        }
    }
    whole: Tree = {
        "device": "CPU",
        "placement": "Dedicated",
        "sender": {"source": {"synthetic": {"model": "/model/config.json", "dtype": "float32"}}, "template": pod},
        "receivers": {"replicas": 1, "template": pod},
        "steps": {"intervalSeconds": 1},
        "agent": {
            "resources": {"requests": {"cpu": "50m"}, "limits": {"memory": "3Gi", "nvidia.com/gpu": "1"}},
            "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        },
    }
    return {
        "apiVersion": "weightsync.dev/v1alpha1",
        "kind": "WeightSync",
        "metadata": {"name": name},
        "spec": merged(whole, spec),
    }


def merged(base: Any, over: Any) -> Any:
    """Objects are merged, all else is replaced."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return {**base, **{key: merged(base.get(key), value) for key, value in over.items()}}


class WeightSyncOnCluster:
    """One WeightSync and its pods."""

    def __init__(self, cluster: PodCluster, namespace: str, name: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.name = name

    def kubectl(self, *arguments: str) -> str:
        return self.cluster.kubectl("-n", self.namespace, *arguments)

    def status(self) -> Tree:
        found: Tree = (self.cluster.get("weightsync", self.name, self.namespace) or {}).get("status", {})
        return found

    def step(self) -> int:
        return int(self.status().get("step", 0))

    def condition(self, kind: str = "Ready") -> Tree:
        """Empty where there is none."""
        conditions: list[Tree] = self.status().get("conditions", [])
        return next((c for c in conditions if c["type"] == kind), {})

    def wait_ready(self, seconds: float = STARTED_SECONDS) -> None:
        """`kubectl wait`."""
        words = ("wait", "--for=condition=Ready", f"ws/{self.name}", f"--timeout={seconds:.0f}s")
        self.cluster.run("-n", self.namespace, *words, timeout=seconds + 30)

    def wait_step(self, number: int, seconds: float = STARTED_SECONDS) -> Tree:
        """The status, once this step is in it."""
        eventually(lambda: self.step() >= number, seconds)
        return self.status()

    def pods(self) -> dict[str, Tree]:
        found = self.cluster.list("pods", self.namespace, "-l", f"weightsync.dev/name={self.name}")
        return {pod["metadata"]["name"]: pod for pod in found}

    def patch(self, **spec: Any) -> None:
        self.kubectl("patch", f"ws/{self.name}", "--type=merge", "-p", json.dumps({"spec": spec}))

    def kill_agent(self, pod: str, role: str) -> None:
        """SIGKILL to the processes of this role in a pod; the container's first process sees it."""
        self.kubectl("exec", pod, "--", "python3", "-c", KILL, role)


KILL = """
import os, signal, sys
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open(f"/proc/{pid}/environ") as file:
            words = file.read().split("\\0")
    except OSError:
        continue
    if int(pid) > 1 and f"WEIGHTSYNC_ROLE={sys.argv[1]}" in words:
        os.kill(int(pid), signal.SIGKILL)
"""


def restarts(pod: Tree) -> int:
    return sum(status["restartCount"] for status in pod["status"].get("containerStatuses", []))


def uids(pods: dict[str, Tree]) -> dict[str, tuple[str, int]]:
    """Name -> (UID, restarts): what changes when a pod is another one, or started anew."""
    return {name: (pod["metadata"]["uid"], restarts(pod)) for name, pod in pods.items()}


class Lines:
    """The lines of a command that goes on, each with the second at which it came. Use as a context manager."""

    def __init__(self, cluster: Kubectl, *arguments: str) -> None:
        self._process = subprocess.Popen(
            cluster.command(*arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=cluster.environment,
        )
        self.seen: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.seen.append((time.time(), line.rstrip("\n")))

    @property
    def texts(self) -> list[str]:
        return [line for _, line in self.seen]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._reader.join(30)


def ended_at(step: Tree) -> float:
    """When a step of a status ended, in seconds since the epoch."""
    started = datetime.fromisoformat(step["startedAt"])
    return (started + timedelta(microseconds=step["durationMicroseconds"])).timestamp()


def cause_then_condition(
    ws: WeightSyncOnCluster, cause: Callable[[], bool], reasons: Sequence[str], words: Sequence[str]
) -> Tree:
    """Waits until the cluster itself knows a cause, and then for the condition: by one of `reasons`."""
    told: Tree = {}

    def is_told() -> bool:
        nonlocal told
        told = ws.condition()
        return told.get("reason") in reasons

    eventually(cause, STARTED_SECONDS)
    took = eventually(is_told)
    print(f"{told['reason']} was told {took:.1f} s after the cluster knew: {told['message']}")
    assert told["status"] == "False"
    for word in words:
        assert word in told["message"], told["message"]
    return told
