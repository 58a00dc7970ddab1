"""Pods without Kubernetes: processes in Linux namespaces of their own, as a container runtime makes them. Needs root.

A pod has its own mount, PID and UTS namespaces, its own IPC namespace and /dev/shm unless it has the host's, its own
network with an address on a veth pair, and the device nodes of its own GPUs only (/dev/null lies over the others).

    python benchmarks/pod_namespaces.py POD   inside of it: PID 1 until it becomes the pod's command
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import BaseModel, ConfigDict

READY_SECONDS = 30.0
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 1 << 18
"""linux/mount.h"""


class NamespaceError(Exception):
    """A pod can't be made on this machine."""


class Pod(BaseModel):
    """What a container runtime would be told."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    command: tuple[str, ...]
    env: dict[str, str]
    host_ipc: bool = False
    """The host's IPC namespace and /dev/shm."""
    shm_bytes: int = 1 << 30
    gpus: tuple[int, ...] = ()
    """N of the /dev/nvidiaN that it sees; the others are hidden."""
    scratch: str = ""
    """A directory that is empty in every pod."""
    hosts: str = ""
    """A file that lies over /etc/hosts."""
    address: str = ""
    """IPv4 address of its eth0, in a network of 256; empty: the machine's network."""


def why_not() -> str:
    """Why this process can't make pods; empty where it can."""
    if os.geteuid() != 0:
        return "needs root: pods are made by unshare"
    if shutil.which("unshare") is None:
        return "needs unshare (util-linux)"
    tried = subprocess.run(
        ["unshare", "--mount", "--uts", "--ipc", "--pid", "--net", "--fork", "--mount-proc", "true"],
        capture_output=True,
        text=True,
        timeout=READY_SECONDS,
    )
    return "" if tried.returncode == 0 else f"unshare does not work here: {tried.stderr.strip()}"


class Running:
    """A pod's process. Waits inside until `go`; killed with all that it started when the context ends."""

    def __init__(self, pod: Pod, directory: Path) -> None:
        """`directory`: for its output. Raises NamespaceError where it does not come up."""
        self.pod = pod
        self._ready = directory / f"{pod.name}.ready"
        self.out, self.log = directory / f"{pod.name}.out", directory / f"{pod.name}.log"
        flags = ["--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        flags += ["--ipc"] if not pod.host_ipc else []
        flags += ["--net"] if pod.address else []
        with self.out.open("wb") as out, self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["unshare", *flags, "--", sys.executable, __file__, pod.model_dump_json(), str(self._ready)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=log,
                start_new_session=True,
            )
        try:
            deadline = time.monotonic() + READY_SECONDS
            while not self._ready.exists():
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise NamespaceError(f"pod {pod.name} did not come up: {self.tail()}")
                time.sleep(0.01)
        except BaseException:
            self.end()
            raise

    def go(self) -> None:
        """The network is there: the pod's command starts."""
        assert self.process.stdin is not None
        # Its end stays open: agents end when it closes.
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

    def tail(self, lines: int = 25) -> str:
        """The end of what it wrote to stderr."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def end(self) -> None:
        """The pod's PID 1 dies with unshare, and everything in its namespace with that."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.end()


# --- the network ----------------------------------------------------------------------------------------------------


def connect(one: Running, other: Running) -> None:
    """A veth pair, one end the eth0 of each. Raises OSError where the kernel has none.

    By rtnetlink (man 7 rtnetlink, linux/veth.h), as `ip` is missing on many machines.
    """
    info, nested = struct.pack("=BxHiII", 0, 0, 0, 0, 0), 0x8000
    name, in_pid, link_info, kind, data, peer = 3, 19, 18, 1, 2, 1

    def end(running: Running) -> bytes:
        return _attribute(name, b"eth0\0") + _attribute(in_pid, struct.pack("=I", running.process.pid))

    veth = _attribute(kind, b"veth\0") + _attribute(data | nested, _attribute(peer, info + end(other)))
    body = info + end(one) + _attribute(link_info | nested, veth)
    new_link, request_ack_create_exclusive = 16, 0x1 | 0x4 | 0x400 | 0x200
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as wire:
        wire.settimeout(5)
        wire.send(struct.pack("=IHHII", 16 + len(body), new_link, request_ack_create_exclusive, 1, 0) + body)
        answer = wire.recv(4096)
    error = -struct.unpack_from("=i", answer, 16)[0]
    if error:
        raise OSError(error, f"no veth pair: {os.strerror(error)}")


def _attribute(kind: int, data: bytes) -> bytes:
    padding = -len(data) % 4
    return struct.pack("=HH", 4 + len(data), kind) + data + bytes(padding)


def _bring_up(name: str, address: str = "") -> None:
    """An interface of this network namespace, with an address in a network of 256 (man 7 netdevice)."""
    set_address, set_mask, get_flags, set_flags, up = 0x8916, 0x891C, 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:

        def ask(request: int, data: bytes) -> bytes:
            return fcntl.ioctl(any_socket, request, struct.pack("16s24s", name.encode(), data))

        if address:
            for request, value in ((set_address, address), (set_mask, "255.255.255.0")):
                ask(request, struct.pack("=HH4s", socket.AF_INET, 0, socket.inet_aton(value)))
        flags = struct.unpack_from("=H", ask(get_flags, b""), 16)[0]
        ask(set_flags, struct.pack("=H", flags | up))


# --- inside ---------------------------------------------------------------------------------------------------------


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"mount {source} on {target}: {os.strerror(error)}")


def inside(pod: Pod, ready: Path) -> None:
    """Makes the pod around this process, its PID 1, which becomes the command."""
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    socket.sethostname(pod.name)
    if not pod.host_ipc:
        _mount("tmpfs", "/dev/shm", "tmpfs", 0, f"size={pod.shm_bytes}")
    if pod.scratch:
        _mount("tmpfs", pod.scratch, "tmpfs", 0, "size=67108864")
    if pod.hosts:
        _mount(pod.hosts, "/etc/hosts", "", MS_BIND)
    for node in Path("/dev").iterdir():
        found = re.fullmatch(r"nvidia(\d+)", node.name)
        if found and int(found[1]) not in pod.gpus:
            _mount("/dev/null", str(node), "", MS_BIND)
    ready.touch()
    # Byte by byte: what buffers stdin would take what is the command's.
    while os.read(0, 1) not in (b"\n", b""):
        pass
    if pod.address:
        _bring_up("lo")
        _bring_up("eth0", pod.address)
    os.execvpe(pod.command[0], pod.command, pod.env)


def main(arguments: Sequence[str]) -> None:
    inside(Pod.model_validate_json(arguments[0]), Path(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
