"""One agent of a local run: a process, its output, and when it is started again after it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from weightsync_api.agent_config import ENV_EXIT_ON_STDIN_EOF

from .local_command import Command, python_first
from .local_log import AgentLog
from .plan import PlannedAgent, Role
from .platform import ObservedAgent
from .state_dir import ProcessId

FIRST_BACKOFF = 1.0
MAX_BACKOFF = 30.0
"""Seconds before a crashed process is started again: doubled each time, as a kubelet does (it begins at 10 s)."""
HEALTHY_SECONDS = 60.0
"""A process that ran this long starts its backoff anew."""
PIPE_SECONDS = 1.0
"""How long output is still read after a process ended: a child of it may hold the pipe open."""


@dataclass(frozen=True)
class Exit:
    """How a process ended."""

    code: int
    """As Python has it: -N for signal N."""

    @property
    def text(self) -> str:
        if self.code >= 0:
            return f"it exited with code {self.code}"
        try:
            why = ", perhaps because memory ran out" if self.code == -signal.SIGKILL else ""
            return f"it was killed by signal {-self.code} ({signal.Signals(-self.code).name}){why}"
        except ValueError:
            return f"it was killed by signal {-self.code}"


class AgentProcess:
    """Runs one agent's command; started again by `start` after it ended.

    Args:
        agent: which one.
        command: what to run.
        log: takes its output.
        node: name of the machine.
        on_exit: called whenever the process has ended.
    """

    def __init__(
        self, agent: PlannedAgent, command: Command, log: AgentLog, node: str, on_exit: Callable[[], None]
    ) -> None:
        self.agent = agent
        self.command = command
        self.log = log
        self.exit: Exit | None = None
        """How it ended; None while it runs or before it ever did."""
        self.restarts = 0
        self.crashes: deque[float] = deque(maxlen=16)
        """When it crashed, on the monotonic clock, since it last was healthy for a while."""
        self.pause = 0.0
        """Seconds from its last crash to its next start."""
        self._node = node
        self._on_exit = on_exit
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._started = 0.0
        self._again_at = 0.0

    @property
    def name(self) -> str:
        return "sender" if self.agent.role == Role.SENDER else f"receiver-{self.agent.rank}"

    @property
    def running(self) -> bool:
        return self._process is not None and self.exit is None

    @property
    def id(self) -> ProcessId | None:
        return ProcessId.of(self._process.pid) if self._process is not None and self.running else None

    @property
    def backoff(self) -> float:
        """Seconds until it may be started again."""
        return max(0.0, self._again_at - time.monotonic())

    def crashes_within(self, seconds: float) -> int:
        return sum(at > time.monotonic() - seconds for at in self.crashes)

    async def start(self) -> None:
        """Starts the command, in a session of its own: Ctrl-C in the terminal reaches the runner alone.

        Raises OSError where it can't be started at all (no such program, not executable).
        """
        if self._process is not None:
            self.restarts += 1
        self.exit = None
        self.log.begin()
        env = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            **self.command.env,
            ENV_EXIT_ON_STDIN_EOF: "1",
        }
        env["PATH"] = python_first(env.get("PATH"))
        self._process = await asyncio.create_subprocess_exec(
            *self.command.argv,
            # Held open by this process and by nobody else: it ends with the runner, even with a killed one.
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self.command.cwd,
            env=env,
            start_new_session=True,
        )
        self._started = time.monotonic()
        self._watch = asyncio.create_task(self._until_exit(self._process), name=f"watch {self.name}")

    def signal(self, number: signal.Signals) -> None:
        """To the process and its children. Does nothing where it has ended."""
        if self._process is not None and self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def ended(self) -> None:
        """Returns once the process has ended and its output is read."""
        if self._watch is not None:
            await asyncio.shield(self._watch)

    def observe(self) -> ObservedAgent:
        reason = message = ""
        if not self.running and self.exit is not None:
            reason = "Completed" if self.exit.code == 0 else "Crashed"
            cause = self.log.cause
            message = self.exit.text + (f": {cause}" if cause and self.exit.code else "")
        return ObservedAgent(
            rank=self.agent.rank,
            pod=self.agent.pod,
            node=self._node,
            running=self.running,
            exit_code=None if self.exit is None else self.exit.code,
            restarts=self.restarts,
            reason=reason,
            message=message,
        )

    async def _until_exit(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        pumps = [
            asyncio.create_task(self._pump(1, process.stdout)),
            asyncio.create_task(self._pump(2, process.stderr)),
        ]
        code = await process.wait()
        # What it started and left behind goes with it; the group's number is not given away while a member lives.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        _, late = await asyncio.wait(pumps, timeout=PIPE_SECONDS)
        for pump in late:
            pump.cancel()
        if process.stdin is not None:
            process.stdin.close()
        now = time.monotonic()
        if now - self._started > HEALTHY_SECONDS:
            self.crashes.clear()
        if code != 0:
            self.crashes.append(now)
            self.pause = min(MAX_BACKOFF, FIRST_BACKOFF * 2.0 ** (len(self.crashes) - 1))
            self._again_at = now + self.pause
        self.exit = Exit(code)
        self._on_exit()

    async def _pump(self, stream: int, source: asyncio.StreamReader) -> None:
        try:
            while data := await source.read(1 << 16):
                self.log.feed(stream, data)
        finally:
            self.log.end(stream)
