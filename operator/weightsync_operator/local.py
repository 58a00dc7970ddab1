"""The platform of `weightsync run`: the plan carried out as processes of this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from weightsync_api.agent_config import ENV_CONFIG, ENV_NODE, ENV_POD, ENV_RANK, ENV_ROLE
from weightsync_api.reports import Report
from weightsync_api.v1alpha1 import Device, WeightSync, WeightSyncStatus

from .local_command import Command, Downward, command_for
from .local_gpus import assign
from .local_log import AgentLog
from .local_process import AgentProcess
from .plan import Endpoints, Key, Plan, PlanDefaults, PlannedAgent, Role, plan
from .platform import Observed
from .pod_templates import template_field
from .reports_client import ReportsClient, ReportUnavailableError
from .state_dir import StateDir

TERM_SECONDS = 3.0
"""From SIGTERM to SIGKILL."""
KILL_SECONDS = 1.5


@dataclass(frozen=True)
class LocalAddresses:
    """Everything on one machine: Unix sockets in one directory, whatever the placement."""

    runtime_dir: Path

    def endpoints(self, key: Key, one_pod: bool, sender_pod: str, service: str) -> Endpoints:
        folder = str(self.runtime_dir)
        control = f"ipc://{folder}/control"
        return Endpoints(bind=control, connect=control, runtime_dir=folder, http=f"unix:{folder}")


@dataclass(frozen=True)
class LocalHooks:
    """Who is told of what happens in a local run."""

    wake: Callable[[], None]
    """A process ended, or may be started again."""
    line: Callable[[AgentProcess, int, str], None]
    """A process wrote a line to its stdout (1) or stderr (2)."""
    crashed: Callable[[AgentProcess], None]
    """A process ended as it should not."""
    status: Callable[[WeightSync], None]
    """A new status was stored."""


class LocalPlatform:
    """Runs the agents of one WeightSync.

    Args:
        ws: the resource.
        folder: the manifest's directory: the processes run in it.
        state: the state directory, held by this process.
        gpus: the GPUs that may be used, as CUDA_VISIBLE_DEVICES names them.
        device: CUDA or CPU: what the machine has.
        hooks: who is told.

    Raises:
        TemplateError: a template needs a cluster, or can't be read.
        NotEnoughGpusError: the placement needs more GPUs.
    """

    def __init__(
        self, ws: WeightSync, folder: Path, state: StateDir, gpus: list[str], device: Device, hooks: LocalHooks
    ) -> None:
        self._ws = ws
        self._folder = folder
        self._state = state
        self._hooks = hooks
        self._defaults = PlanDefaults(LocalAddresses(state.runtime_dir), device)
        self._node = socket.gethostname()
        self._closing = False
        self._client: ReportsClient | None = None
        planned = plan(ws, self._defaults)
        self._visible = assign(planned, gpus, ws.spec.placement)
        self._threads = max(1, (os.cpu_count() or 1) // max(1, len(planned.agents())))
        self._commands = {agent.rank: self._command(agent) for agent in planned.agents()}
        self._written = ""
        self.needs_gpus = sum(pods.replicas * pods.gpus_per_pod for pods in planned.pod_sets)
        self.processes: dict[int, AgentProcess] = {}
        """By rank."""

    @property
    def notices(self) -> list[str]:
        """What of the templates is not carried out on a machine without a cluster."""
        return sorted({command.notice for command in self._commands.values() if command.notice})

    @property
    def status(self) -> WeightSyncStatus | None:
        """The status that was stored last."""
        return self._ws.status

    @property
    def sender(self) -> AgentProcess | None:
        return self.processes.get(0)

    @property
    def receivers(self) -> list[AgentProcess]:
        return [process for rank, process in sorted(self.processes.items()) if rank]

    # --- the platform's interface -------------------------------------------------------------------------------

    def defaults(self, ws: WeightSync) -> PlanDefaults:
        return self._defaults

    async def resource(self, key: Key) -> WeightSync | None:
        return self._ws

    async def observe(self, key: Key) -> Observed:
        agents = tuple(process.observe() for _, process in sorted(self.processes.items()))
        return Observed(resource=self._ws, agents=agents)

    async def apply(self, planned: Plan) -> None:
        """Starts what is missing, and what crashed once its backoff is over. Raises OSError where that can't be."""
        if self._closing:
            return
        config = planned.config.model_dump_json(by_alias=True)
        if config != self._written:
            self._state.config.write_text(config)
            self._written = config
        started = False
        for agent in planned.agents():
            process = self.processes.get(agent.rank)
            if process is None:
                process = self.processes[agent.rank] = self._process(agent)
            elif process.running or process.backoff or process.exit is None or process.exit.code == 0:
                continue  # one that exited with 0 has said that it is done
            await process.start()
            started = True
        if started:
            self._state.write_processes([p.id for p in self.processes.values() if p.id is not None])
            self._hooks.wake()  # this pass observed what was before

    async def report(self, key: Key, after: int, wait: float) -> Report | None:
        if self._client is None:
            self._client = ReportsClient(self._state.runtime_dir / "rank-0.http")
        try:
            return await self._client.fetch(after, wait)
        except ReportUnavailableError:
            return None

    async def write_status(self, ws: WeightSync, status: WeightSyncStatus) -> None:
        self._ws = ws.model_copy(update={"status": status})
        self._state.write_resource(self._ws)
        self._hooks.status(self._ws)

    async def delete(self, key: Key) -> None:
        await self.stop()
        await self.close()

    # --- the end ------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Starts nothing any more."""
        self._closing = True

    async def stop(self) -> None:
        """Ends every process, in less than 5 s: those that don't heed SIGTERM are killed."""
        self.freeze()
        for number, seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
            running = [process for process in self.processes.values() if process.running]
            if not running:
                break
            for process in running:
                process.signal(number)
            await asyncio.wait([asyncio.create_task(process.ended()) for process in running], timeout=seconds)

    async def close(self) -> None:
        """After `stop`, and once nobody asks for reports any more."""
        for process in self.processes.values():
            process.log.close()
        if self._client is not None:
            await self._client.close()

    # --- what runs ----------------------------------------------------------------------------------------------

    def _command(self, agent: PlannedAgent) -> Command:
        spec, key = self._ws.spec, self._state.key
        return command_for(
            spec.sender.template if agent.role == Role.SENDER else spec.receivers.template,
            template_field(agent.role),
            self._folder,
            Downward(agent.pod, key.namespace, self._node),
            self._identity(agent),
            spec.agent.env,
        )

    def _identity(self, agent: PlannedAgent) -> dict[str, str]:
        return {
            ENV_CONFIG: str(self._state.config),
            ENV_ROLE: agent.role.value,
            ENV_RANK: str(agent.rank),
            ENV_POD: agent.pod,
            ENV_NODE: self._node,
            "CUDA_VISIBLE_DEVICES": self._visible.get(agent.rank, ""),
        }

    def _process(self, agent: PlannedAgent) -> AgentProcess:
        command = self._commands[agent.rank]
        if "OMP_NUM_THREADS" not in command.env and "OMP_NUM_THREADS" not in os.environ:
            # Each process would take every core and they would wait for each other.
            command = replace(command, env={**command.env, "OMP_NUM_THREADS": str(self._threads)})
        process: AgentProcess
        name = "sender" if agent.role == Role.SENDER else f"receiver-{agent.rank}"
        log = AgentLog(self._state.logs / f"{name}.log", lambda stream, text: self._hooks.line(process, stream, text))
        process = AgentProcess(agent, command, log, self._node, lambda: self._exited(process))
        return process

    def _exited(self, process: AgentProcess) -> None:
        if not self._closing and process.exit is not None and process.exit.code != 0:
            self._hooks.crashed(process)
            asyncio.get_running_loop().call_later(process.backoff, self._hooks.wake)
        self._hooks.wake()
