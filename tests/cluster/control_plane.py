"""A real control plane for tests: etcd, kube-apiserver, kube-controller-manager and kube-scheduler on loopback.

Without nodes: pods are made and stay unscheduled. Each server is a process of this test run; nothing is left of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import yaml
from kubectl import Kubectl, Tree
from loopback import addresses

HERE = Path(__file__).parent
READY_SECONDS = 200.0
ADMIN, OPERATOR = "admin", "operator"
TOKENS = {ADMIN: "token-of-the-admin", OPERATOR: "token-of-the-operator"}
CONTROLLERS = (
    "garbage-collector-controller",
    "statefulset-controller",
    "namespace-controller",
    "serviceaccount-controller",
    "disruption-controller",
    "resourcequota-controller",
    "clusterrole-aggregation-controller",
)


def programs() -> Path | None:
    """The folder of the built programs; None where build.sh has not been run."""
    found = subprocess.run([HERE / "build.sh", "--where"], capture_output=True, text=True, check=True, timeout=60)
    folder = Path(found.stdout.strip())
    return folder if (folder / "kube").exists() else None


class ControlPlane(Kubectl):
    """Servers in a folder of their own. Use as a context manager. `scheduler`: whether one says why pods wait."""

    def __init__(self, bin_dir: Path, scheduler: bool = True) -> None:
        self.bin = bin_dir
        self.dir = Path(tempfile.mkdtemp(prefix="ws-cluster-"))
        super().__init__(bin_dir / "kubectl", self.dir / f"{ADMIN}.kubeconfig", self.dir)
        self.operator_kubeconfig = self.dir / f"{OPERATOR}.kubeconfig"
        self.audit_log = self.dir / "audit.log"
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        self._address = next(addresses)
        self._commands = self._configure()
        if not scheduler:
            del self._commands["kube-scheduler"]

    def __enter__(self) -> ControlPlane:
        try:
            for name in self._commands:
                if name == "kube-controller-manager":
                    self.until_ready()
                self.start(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, name: str) -> None:
        with (self.dir / f"{name}.log").open("ab") as log:
            self._servers[name] = subprocess.Popen(
                [str(self.bin / name), *self._commands[name]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.dir,
                start_new_session=True,
                preexec_fn=end_with_parent,
                env={**os.environ, "GOMAXPROCS": "2"},
            )

    def kill(self, name: str) -> None:
        """SIGKILL, and gone."""
        server = self._servers.pop(name)
        server.kill()
        server.wait(30)

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for server in reversed(list(self._servers.values())):
                with contextlib.suppress(ProcessLookupError):
                    server.send_signal(number)
            for server in self._servers.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.wait(5)
        shutil.rmtree(self.dir, ignore_errors=True)

    # --- the audit log ------------------------------------------------------------------------------------------------

    def audit(self, user: str = OPERATOR, since: float = 0) -> Iterator[Tree]:
        """The requests of the operator, or of a ServiceAccount, that the API server has answered.

        Args:
            since: seconds since the epoch: those that came later. Who sees what a request did may be faster than the
                log, so that a count of lines is no moment.
        """
        *lines, _ = self.audit_log.read_bytes().split(b"\n")  # what has no end yet is being written
        for line in lines:
            event: Tree = json.loads(line)
            received = datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp()
            if event["user"]["username"] == user and received > since:
                yield event

    def writes(self, since: float = 0) -> list[str]:
        """The operator's writes: verb, resource, name."""
        return [
            f"{event['verb']} {_resource(event['objectRef'])} {event['objectRef'].get('name', '')}"
            for event in self.audit(since=since)
            if event["verb"] not in ("get", "list", "watch")
        ]

    def kubeconfig_of(self, namespace: str, account: str) -> Path:
        """For a ServiceAccount, with a token of it as a pod gets one."""
        token = self.kubectl("-n", namespace, "create", "token", account, "--duration=1h").strip()
        path = self.dir / f"{namespace}-{account}.kubeconfig"
        path.write_text(_kubeconfig(token, self._server, self.dir / "tls" / "apiserver.crt"))
        path.chmod(0o600)
        return path

    @property
    def _server(self) -> str:
        return f"https://{self._address}:6443"

    # --- configuration ----------------------------------------------------------------------------------------------

    def _configure(self) -> dict[str, Sequence[str]]:
        key = self.dir / "sa.key"
        subprocess.run(
            ["openssl", "ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", str(key)],
            check=True,
            capture_output=True,
            timeout=60,
        )
        public = self.dir / "sa.pub"
        subprocess.run(
            ["openssl", "ec", "-in", str(key), "-pubout", "-out", str(public)],
            check=True,
            capture_output=True,
            timeout=60,
        )
        tokens = self.dir / "tokens.csv"
        tokens.write_text("".join(f'{token},{user},{user},"system:masters"\n' for user, token in TOKENS.items()))
        certificate = self.dir / "tls" / "apiserver.crt"
        for user, path in ((ADMIN, self.kubeconfig), (OPERATOR, self.operator_kubeconfig)):
            path.write_text(_kubeconfig(TOKENS[user], self._server, certificate))
            path.chmod(0o600)
        policy = self.dir / "audit.yaml"
        policy.write_text(
            "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\n"
            f"rules: [{{level: Metadata, users: [{OPERATOR}]}}, "
            "{level: Metadata, userGroups: ['system:serviceaccounts']}, {level: None}]\n"
        )
        etcd = f"http://{self._address}:2379"
        client = ["--kubeconfig", str(self.kubeconfig), "--leader-elect=false", "--secure-port=0"]
        client += ["--kube-api-qps=1000", "--kube-api-burst=1000"]
        return {
            "etcd": [
                *("--data-dir", str(self.dir / "etcd"), "--unsafe-no-fsync", "--log-level", "warn"),
                *("--listen-client-urls", etcd, "--advertise-client-urls", etcd),
                *("--listen-peer-urls", f"http://{self._address}:2380"),
            ],
            "kube-apiserver": [
                *("--etcd-servers", etcd, "--bind-address", self._address, "--secure-port", "6443"),
                # The address of a loopback server can't be an endpoint of a Service: there is none.
                *("--advertise-address", self._address, "--endpoint-reconciler-type", "none"),
                *("--cert-dir", str(self.dir / "tls"), "--token-auth-file", str(tokens)),
                *("--authorization-mode", "RBAC", "--service-cluster-ip-range", "10.96.0.0/16"),
                *("--service-account-issuer", "https://kubernetes.default.svc.cluster.local"),
                *("--service-account-key-file", str(public), "--service-account-signing-key-file", str(key)),
                *("--audit-policy-file", str(policy), "--audit-log-path", str(self.audit_log)),
                *("--audit-log-mode", "blocking"),
                # Who makes a child that blocks its owner's deletion needs the right to; some distributions ask for it.
                *("--enable-admission-plugins", "OwnerReferencesPermissionEnforcement"),
                # For claims of devices. Served only where they are asked for before 1.34.
                *("--runtime-config", "resource.k8s.io/v1=true"),
            ],
            "kube-controller-manager": [
                *client,
                *("--controllers", ",".join(CONTROLLERS), "--service-account-private-key-file", str(key)),
                *("--flex-volume-plugin-dir", str(self.dir / "volume-plugins")),  # it is made, in /usr otherwise
            ],
            "kube-scheduler": client,
        }

    def until_ready(self) -> None:
        """Returns once the API server answers."""
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if self.run("get", "--raw", "/readyz", check=False).returncode == 0:
                return
            for name, server in self._servers.items():
                assert server.poll() is None, f"{name} ended: {self._log(name)}"
            time.sleep(0.2)
        raise AssertionError(f"kube-apiserver is not ready after {READY_SECONDS:g} s: {self._log('kube-apiserver')}")

    def _log(self, name: str) -> str:
        return (self.dir / f"{name}.log").read_text(errors="replace")[-2000:]


def end_with_parent() -> None:
    """A killed test run leaves no servers (prctl(2): PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _resource(reference: Mapping[str, str]) -> str:
    return reference["resource"] + (f"/{reference['subresource']}" if reference.get("subresource") else "")


def _kubeconfig(token: str, server: str, certificate: Path) -> str:
    # The server's certificate is made by itself as it starts.
    cluster = {"server": server, "certificate-authority": str(certificate)}
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
        }
    )
