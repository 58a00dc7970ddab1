"""Where a local run keeps its resource, its sockets and its logs, and how two runs of one name are kept apart.

`${XDG_RUNTIME_DIR:-/tmp}/weightsync-UID/NAMESPACE/NAME/`, for its owner's eyes only:
  runner.pid      held with flock by the runner for its whole life; its process id and start time
  resource.json   the WeightSync, spec and status, replaced atomically
  config.json     the AgentConfig
  processes.json  process group of each agent: what to end when the runner was killed
  run/            the agents' sockets; elsewhere (run.path) where the path would be too long for a socket
  logs/           one an agent
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from weightsync_api.v1alpha1 import WeightSync

from .plan import Key

MAX_SOCKET_PATH = 107
"""Bytes of a Unix socket's path: sun_path is 108 with the final zero (unix(7))."""
LONGEST_SOCKET_NAME = 32
"""Room for the agents' own names below run/: control, descriptors.sock, rank-65536.http."""


class StateError(Exception):
    """The state directory can't be used; the text says why and what to do."""


class AlreadyRunningError(StateError):
    """Another runner holds this name."""


def base_dir() -> Path:
    """The directory of all local runs of this user."""
    parent = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"
    return Path(parent) / f"weightsync-{os.getuid()}"


def _secure(path: Path) -> None:
    """Makes a directory for this user alone. In /tmp another user may have made it first: then it is not used."""
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise StateError(
            f"{path} is not a directory of this user: remove it, or set XDG_RUNTIME_DIR to a place of yours"
        )
    if found.st_mode & 0o077:
        path.chmod(0o700)


@dataclass(frozen=True)
class ProcessId:
    """A process that can be told from a later one of the same number."""

    pid: int
    start: str
    """Start time in clock ticks since boot, of /proc/PID/stat; empty where there is no /proc."""

    @staticmethod
    def of(pid: int) -> ProcessId:
        return ProcessId(pid, _start_time(pid))

    def alive(self) -> bool:
        """Whether this very process still runs (a zombie does not)."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return False  # ours are never another user's
        return not self.start or _start_time(self.pid) == self.start


def _start_time(pid: int) -> str:
    try:
        # The name in parentheses may itself hold spaces and parentheses. Fields after it: state, ..., starttime (22nd).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


class StateDir:
    """The state of one local run. Made by `acquire`, which holds the name until `release`."""

    def __init__(self, key: Key, path: Path, lock: int | None) -> None:
        self.key = key
        self.path = path
        self._lock = lock
        self.runtime_dir = path / "run"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @classmethod
    def acquire(cls, key: Key) -> StateDir:
        """Takes the name and sweeps what a dead runner left. Raises AlreadyRunningError, StateError."""
        base = base_dir()
        try:
            for path in (base, base / key.namespace, base / key.namespace / key.name):
                _secure(path)
        except OSError as error:
            raise StateError(f"{error.filename} can't be made: {error.strerror}; set XDG_RUNTIME_DIR") from None
        path = base / key.namespace / key.name
        state = cls(key, path, _lock(key, path / "runner.pid"))
        state._sweep()
        state.logs.mkdir(mode=0o700)
        state._make_runtime_dir()
        return state

    def write_resource(self, ws: WeightSync) -> None:
        _replace(self.path / "resource.json", ws.model_dump_json(by_alias=True, exclude_none=True))

    def write_processes(self, processes: list[ProcessId]) -> None:
        _replace(self.path / "processes.json", json.dumps([[p.pid, p.start] for p in processes]))

    def release(self, *, keep_logs: bool = False) -> None:
        """Removes everything, or everything but the logs, and gives the name back. Idempotent."""
        if self._lock is None:
            return
        if self.runtime_dir.parent != self.path:
            shutil.rmtree(self.runtime_dir, ignore_errors=True)
        for entry in self.path.iterdir():
            if entry.name == "runner.pid" or (keep_logs and entry == self.logs):
                continue
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)
        # The lock's file goes last: who waits for it finds another one in its place, and takes that.
        (self.path / "runner.pid").unlink(missing_ok=True)
        for empty in (self.path, self.path.parent, self.path.parent.parent):
            with contextlib.suppress(OSError):
                empty.rmdir()
        os.close(self._lock)
        self._lock = None

    def _sweep(self) -> None:
        """Ends processes that outlived a killed runner, and removes its files. The lock says that it is dead."""
        for process in _read_processes(self.path / "processes.json"):
            if process.start and process.alive():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        elsewhere = self.path / "run.path"
        if elsewhere.is_file():
            left = Path(elsewhere.read_text())
            if (
                left.name.startswith("ws-")
                and left.is_dir()
                and not left.is_symlink()
                and left.stat().st_uid == os.getuid()
            ):
                shutil.rmtree(left, ignore_errors=True)
        for entry in self.path.iterdir():
            if entry.name != "runner.pid":
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def _make_runtime_dir(self) -> None:
        if _fits(self.runtime_dir):
            self.runtime_dir.mkdir(mode=0o700)
            return
        for parent in (tempfile.gettempdir(), "/tmp"):
            short = Path(parent) / "ws-xxxxxxxx"
            if _fits(short):
                self.runtime_dir = Path(tempfile.mkdtemp(prefix="ws-", dir=parent))
                _replace(self.path / "run.path", str(self.runtime_dir))
                return
        raise StateError(
            f"{self.runtime_dir} is too long for a Unix socket, which may have {MAX_SOCKET_PATH} bytes: "
            "set XDG_RUNTIME_DIR to a shorter path"
        )


def _fits(directory: Path) -> bool:
    return len(os.fsencode(directory)) + 1 + LONGEST_SOCKET_NAME <= MAX_SOCKET_PATH


def _lock(key: Key, path: Path) -> int:
    while True:
        # O_CLOEXEC (Python's default): no agent inherits the lock, so it ends with the runner, however that ends.
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with open(lock, "rb") as held:
                pid = held.read(64).decode(errors="replace").partition(" ")[0] or "?"
            raise AlreadyRunningError(
                f"{key} already runs on this machine (process {pid}): see `weightsync get`, end it with Ctrl-C there, "
                "or give this one another metadata.name"
            ) from None
        try:
            same = os.stat(path).st_ino == os.fstat(lock).st_ino
        except FileNotFoundError:
            same = False
        if same:
            me = ProcessId.of(os.getpid())
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{me.pid} {me.start}\n".encode(), 0)
            return lock
        os.close(lock)  # its holder removed it in the meantime
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text)
    fresh.replace(path)


def _read_processes(path: Path) -> list[ProcessId]:
    try:
        return [ProcessId(int(pid), str(start)) for pid, start in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError):
        return []


def _runner_lives(path: Path) -> bool:
    try:
        pid, start = path.read_text().split()
        return ProcessId(int(pid), start).alive()
    except (OSError, ValueError):
        return False


def running() -> Iterator[WeightSync]:
    """The resources of this user's local runs that are alive, by namespace and name."""
    for path in sorted(base_dir().glob("*/*/resource.json")):
        if not _runner_lives(path.with_name("runner.pid")):
            continue
        try:
            yield WeightSync.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            continue  # it ended, or an older version wrote it
