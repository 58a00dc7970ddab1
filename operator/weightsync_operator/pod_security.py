"""Pure: what of a pod goes beyond the Pod Security level `restricted`.

A namespace that enforces the level refuses such a pod, and one that only warns tells whoever applied it, which is this
operator: so it is said in a condition. https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Tree = Mapping[str, Any]

VOLUMES = frozenset(
    {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
)
SYSCTLS = frozenset(
    {
        "kernel.shm_rmid_forced",
        "net.ipv4.ip_local_port_range",
        "net.ipv4.ip_local_reserved_ports",
        "net.ipv4.ip_unprivileged_port_start",
        "net.ipv4.ping_group_range",
        "net.ipv4.tcp_fin_timeout",
        "net.ipv4.tcp_keepalive_intvl",
        "net.ipv4.tcp_keepalive_probes",
        "net.ipv4.tcp_keepalive_time",
        "net.ipv4.tcp_rmem",
        "net.ipv4.tcp_syncookies",
        "net.ipv4.tcp_wmem",
    }
)
SELINUX_TYPES = frozenset({"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"})
SECCOMP, APPARMOR = frozenset({"RuntimeDefault", "Localhost"}), frozenset({"RuntimeDefault", "Localhost"})


def beyond_restricted(spec: Tree) -> list[str]:
    """The fields of a pod's spec that the level refuses, each with what it is; none where it takes the pod."""
    return list(
        dict.fromkeys([*_pod(spec), *(found for at, one in _containers(spec) for found in _one(at, one, spec))])
    )


def _pod(spec: Tree) -> Iterator[str]:
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield f"{field} is true"
    for volume in _list(spec.get("volumes")):
        kinds = sorted(set(_tree(volume)) - {"name"} - VOLUMES)
        if kinds:
            yield f"volumes[{_tree(volume).get('name')}] is a {kinds[0]}"
    security = _tree(spec.get("securityContext"))
    for sysctl in _list(security.get("sysctls")):
        if _tree(sysctl).get("name") not in SYSCTLS:
            yield f"securityContext.sysctls has {_tree(sysctl).get('name')}"
    yield from _either("securityContext", security)


def _one(at: str, container: Tree, spec: Tree) -> Iterator[str]:
    security, of_pod = _tree(container.get("securityContext")), _tree(spec.get("securityContext"))
    where = f"{at}.securityContext"
    if security.get("privileged"):
        yield f"{where}.privileged is true"
    if security.get("allowPrivilegeEscalation") is not False:
        yield f"{where}.allowPrivilegeEscalation is not false"
    capabilities = _tree(security.get("capabilities"))
    if "ALL" not in _list(capabilities.get("drop")):
        yield f"{where}.capabilities.drop lacks ALL"
    for name in _list(capabilities.get("add")):
        if name != "NET_BIND_SERVICE":
            yield f"{where}.capabilities.add has {name}"
    if security.get("runAsNonRoot", of_pod.get("runAsNonRoot")) is not True:
        yield f"{where}.runAsNonRoot is not true"
    if _tree(security.get("seccompProfile") or of_pod.get("seccompProfile")).get("type") not in SECCOMP:
        yield f"{where}.seccompProfile is not RuntimeDefault"
    if security.get("procMount", "Default") != "Default":
        yield f"{where}.procMount is {security['procMount']}"
    yield from _either(where, security)
    for port in _list(container.get("ports")):
        if _tree(port).get("hostPort"):
            yield f"{at}.ports has the hostPort {_tree(port)['hostPort']}"
    for hook in ("livenessProbe", "readinessProbe", "startupProbe"):
        for action in ("httpGet", "tcpSocket"):
            if _tree(_tree(container.get(hook)).get(action)).get("host"):
                yield f"{at}.{hook}.{action}.host is set"


def _either(where: str, security: Tree) -> Iterator[str]:
    """What a pod and a container can have alike."""
    if security.get("runAsUser") == 0:
        yield f"{where}.runAsUser is 0"
    if security.get("runAsNonRoot") is False:
        yield f"{where}.runAsNonRoot is false"
    seccomp = _tree(security.get("seccompProfile")).get("type")
    if seccomp is not None and seccomp not in SECCOMP:
        yield f"{where}.seccompProfile is {seccomp}"
    apparmor = _tree(security.get("appArmorProfile")).get("type")
    if apparmor is not None and apparmor not in APPARMOR:
        yield f"{where}.appArmorProfile is {apparmor}"
    selinux = _tree(security.get("seLinuxOptions"))
    if selinux.get("type", "") not in SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
        yield f"{where}.seLinuxOptions are of its own"
    if _tree(security.get("windowsOptions")).get("hostProcess"):
        yield f"{where}.windowsOptions.hostProcess is true"


def _containers(spec: Tree) -> Iterator[tuple[str, Tree]]:
    for field in ("initContainers", "containers"):
        for container in _list(spec.get(field)):
            yield f"{field}[{_tree(container).get('name')}]", _tree(container)


def _tree(value: Any) -> Tree:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
