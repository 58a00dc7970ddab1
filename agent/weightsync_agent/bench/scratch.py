"""Directories for a bench's sockets. What a bench that was killed left is taken away by the next one."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_PREFIX = "weightsync-bench-"
_NAME = re.compile(_PREFIX + r"(?P<namespace>[0-9]{1,20})-(?P<pid>[0-9]{1,10})-.*")


@contextmanager
def scratch() -> Iterator[Path]:
    """A new directory, gone at the end. Its name says whose it is: PID namespace and process."""
    remove_stale()
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{_pid_namespace()}-{os.getpid()}-") as directory:
        yield Path(directory)


def remove_stale() -> None:
    """Takes away this user's directories of benches that run no more. Those of other PID namespaces can't be judged."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        match = _NAME.fullmatch(path.name)
        if match is None or int(match["namespace"]) != _pid_namespace() or psutil.pid_exists(int(match["pid"])):
            continue
        try:
            found = path.lstat()
        except OSError:
            continue  # somebody else was faster
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            shutil.rmtree(path, ignore_errors=True)


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
