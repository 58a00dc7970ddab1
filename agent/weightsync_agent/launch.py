"""Several agents in one container: a process each, with its GPU, started, watched and ended by the container's PID 1.

WEIGHTSYNC_AGENTS lists them as ROLE:RANK, with @GPU where each has its own: `sender:0@0,receiver:1@1,receiver:2@2`.
In a StatefulSet every pod has the same list; with WEIGHTSYNC_RANK_STRIDE=N a pod's ranks are higher by N times its
ordinal, the number at the end of its name (WEIGHTSYNC_POD, or the host name).

WEIGHTSYNC_COMMANDS gives agents of a role another program than the agent itself, as JSON: {"sender": ["python",
"trainer.py"]}. `$(NAME)` in it is a variable of the agent's environment and `$$` is `$`, as in a container's command.

Torch's CUDA handles need exporter and importer to have different PIDs: as children of one PID 1 they always have.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from weightsync_api.agent_config import (
    ENV_AGENTS,
    ENV_COMMANDS,
    ENV_HTTP_OFFSET,
    ENV_POD,
    ENV_RANK,
    ENV_RANK_STRIDE,
    ENV_ROLE,
)

from .errors import ConfigError

log = logging.getLogger("weightsync.launch")

TERM_SECONDS = 5.0
"""From SIGTERM to SIGKILL."""
LOOK_SECONDS = 0.5
"""How often it looks without being signalled: for the end of TERM_SECONDS."""
AGENT_COMMAND = (sys.executable, "-m", "weightsync_agent.main")
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")
_ENTRY = re.compile(r"(sender|receiver):([0-9]{1,5})(?:@([0-9]{1,2}))?")


@dataclass(frozen=True)
class Placed:
    """One agent of this container."""

    role: str
    rank: int
    gpu: int | None

    def environment(self, offset: int, visible: str) -> dict[str, str]:
        """Its own variables. `visible`: the container's CUDA_VISIBLE_DEVICES, of which its GPU is one; or empty."""
        env = {ENV_ROLE: self.role, ENV_RANK: str(self.rank), ENV_HTTP_OFFSET: str(offset)}
        if self.gpu is not None:
            devices = [name.strip() for name in visible.split(",")] if visible.strip() else []
            if devices and self.gpu >= len(devices):
                raise ConfigError(
                    f"{ENV_AGENTS}: {self.role}:{self.rank} wants GPU {self.gpu}, "
                    f"but the container sees {len(devices)} (CUDA_VISIBLE_DEVICES={visible})"
                )
            env["CUDA_VISIBLE_DEVICES"] = devices[self.gpu] if devices else str(self.gpu)
        return env


def agents_from_env(env: Mapping[str, str]) -> list[Placed]:
    """The agents that this container runs. Raises ConfigError."""
    text = env.get(ENV_AGENTS, "")
    found: list[Placed] = []
    shift = _stride(env) * ordinal(env) if env.get(ENV_RANK_STRIDE, "0") != "0" else 0
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None:
            raise ConfigError(
                f"{ENV_AGENTS} is {text[:200]!r}: write ROLE:RANK or ROLE:RANK@GPU, such as sender:0@0,receiver:1@0"
            )
        role, rank, gpu = match[1], int(match[2]), match[3]
        if (role == "sender") != (rank == 0):
            raise ConfigError(f"{ENV_AGENTS}: {entry.strip()}: the sender's rank is 0, receivers' are 1 and up")
        found.append(Placed(role, rank + (shift if rank else 0), int(gpu) if gpu is not None else None))
    if len({agent.rank for agent in found}) != len(found):
        raise ConfigError(f"{ENV_AGENTS} is {text[:200]!r}: a rank comes twice")
    return found


def ordinal(env: Mapping[str, str]) -> int:
    """The pod's number in its StatefulSet: what its name ends with. Raises ConfigError where it has none."""
    name = env.get(ENV_POD) or socket.gethostname()
    match = re.search(r"-([0-9]{1,5})$", name)
    if match is None:
        raise ConfigError(f"the pod's name {name!r} ends in no number, which {ENV_RANK_STRIDE} needs: set {ENV_POD}")
    return int(match[1])


def commands_from_env(env: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Role -> its program, where that is not the agent itself. Raises ConfigError."""
    text = env.get(ENV_COMMANDS, "")
    if not text:
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    ok = isinstance(found, dict) and all(
        role in ("sender", "receiver") and isinstance(argv, list) and argv and all(isinstance(w, str) for w in argv)
        for role, argv in found.items()
    )
    if not ok:
        raise ConfigError(
            f'{ENV_COMMANDS} is {text[:200]!r}: write JSON such as {{"sender": ["python", "trainer.py"]}}'
        )
    return {role: tuple(argv) for role, argv in found.items()}


def expand(word: str, env: Mapping[str, str]) -> str:
    """`$(NAME)` -> its value, `$$` -> `$`, an unknown name as it is: the rules of a container's command."""
    return _REFERENCE.sub(lambda m: "$" if m[1] is None else env.get(m[1], m[0]), word)


def _stride(env: Mapping[str, str]) -> int:
    text = env.get(ENV_RANK_STRIDE, "0")
    if not re.fullmatch(r"[0-9]{1,3}", text):
        raise ConfigError(f"{ENV_RANK_STRIDE} is {text!r}: write the number of receivers in each pod")
    return int(text)


def launch(
    agents: Sequence[Placed],
    command: Sequence[str] = AGENT_COMMAND,
    commands: Mapping[str, Sequence[str]] | None = None,
) -> int:
    """Runs the agents until all have ended; one that fails ends the others. Gives the container's exit code.

    SIGTERM and SIGINT go on to every agent; what they leave running is killed after TERM_SECONDS. As PID 1 it also
    reaps the processes that their parents left behind. `commands`: by role, instead of `command`.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    first = os.environ.get(ENV_HTTP_OFFSET, "0")
    if not re.fullmatch(r"[0-9]{1,4}", first):
        raise ConfigError(f"{ENV_HTTP_OFFSET} is {first!r}: write the place of the container's first agent, from 0")
    environments = [agent.environment(offset, visible) for offset, agent in enumerate(agents, int(first))]
    # Signals are taken one at a time, where this says so, instead of interrupting whatever runs.
    signals = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    running: dict[int, Placed] = {}
    try:
        for agent, env in zip(agents, environments, strict=True):
            words = (commands or {}).get(agent.role)
            argv = [expand(word, {**os.environ, **env}) for word in words] if words else command
            running[_start(argv, env, before)] = agent
        return _watch(running, signals)
    finally:
        _send(running, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(command: Sequence[str], env: Mapping[str, str], mask: Iterable[int]) -> int:
    process = subprocess.Popen(
        command,
        env={**os.environ, **env},
        start_new_session=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
    )
    process.returncode = 0  # it is reaped in _watch: Popen must not wait for it
    return process.pid


def _watch(running: dict[int, Placed], signals: Iterable[int]) -> int:
    code, ending, late = 0, False, float("inf")
    while running:
        got = signal.sigtimedwait(signals, LOOK_SECONDS)
        stop = got is not None and got.si_signo in (signal.SIGTERM, signal.SIGINT)
        for pid, ended in _reap():
            agent = running.pop(pid, None)
            if agent is not None and ended != 0 and not ending:
                if running:
                    log.error("%s (rank %d) ended with %s: the others end too", agent.role, agent.rank, _how(ended))
                code, stop = ended if ended > 0 else 128 - ended, True
        if stop and not ending:
            ending, late = True, time.monotonic() + TERM_SECONDS
            _send(running, signal.SIGTERM)
        elif time.monotonic() > late:
            _send(running, signal.SIGKILL)
    return code


def _reap() -> Iterator[tuple[int, int]]:
    """Every child that has ended, orphans that PID 1 inherited included, with its exit code (-N: signal N)."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def _send(running: Mapping[int, Placed], number: int) -> None:
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
