"""Makes a running vLLM server a receiver that takes steps by itself: joins its workers to their sender, learns that a
step has begun, and has the engine take it in one call. Each of its workers is served as an agent of its own.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from weightsync_api.agent_config import AgentConfig
from weightsync_api.reports import AgentReport, AgentState, Report

from .. import parent
from ..errors import ConfigError, Refused, TransportError
from ..identity import local_identity
from .doorbell import Bell
from .vllm import ANSWER_SECONDS, StepOptions, VllmEngine
from .vllm_http import HttpEngine
from .vllm_worker import LookReport

log = logging.getLogger("weightsync.follow")

LOOK_SECONDS = 1.0
"""How often it looks where nobody rang: whether the engine lives, and what became of the sender."""
JOINING_SECONDS = 0.2
AFTER_FAILURE_SECONDS = 0.1
BEGIN_SECONDS = 10.0
"""A step that began at one worker, or whose group was made, begins at all of them within this. The engine waits."""
CLOSE_SECONDS = 0.7


class FollowedWorker:
    """One worker of the engine, as agents are served: its receiver's own report, where that is the whole truth."""

    def __init__(self, config: AgentConfig, rank: int) -> None:
        self.config = config
        self.identity = local_identity(rank, torch.device("cpu"))
        self.errors: Counter[str] = Counter()
        self._report = self._said("the engine does not answer yet")

    def report(self) -> Report:
        """Any thread."""
        return self._report

    def take(self, look: LookReport, mixed: str) -> None:
        """Publishes what the worker said. `mixed`: why the engine may not generate, whatever this worker holds."""
        report = look.report or self._said(look.message)
        if mixed and report.agents[0].state == AgentState.SYNCED:
            agent = report.agents[0].model_copy(update={"state": AgentState.TAINTED, "message": mixed})
            report = report.model_copy(update={"agents": [agent]})
        self.errors = Counter(look.errors)
        self._report = report

    def _said(self, message: str) -> Report:
        me = AgentReport(rank=self.identity.rank, pod=self.identity.pod, node=self.identity.node, message=message)
        config = self.config
        return Report(
            namespace=config.namespace, name=config.name, uid=config.uid, session="", transport=config.transport,
            agents=[me],
        )  # fmt: skip


class Follower:
    """One engine that follows.

    Args:
        url: of its server, which answers.
        config: the AgentConfig of the WeightSync; pause and cache are its `engine`'s.
        workers: what is served of its workers, by rank.
        alive: raises TransportError once the engine is known to have ended.
    """

    def __init__(
        self, url: str, config: AgentConfig, workers: Sequence[FollowedWorker], alive: Callable[[], None]
    ) -> None:
        self._bell = Bell()
        self._workers = workers
        self._alive = alive
        seconds = max(config.step_timeout_seconds, config.join_timeout_seconds) + ANSWER_SECONDS
        self._http = HttpEngine(url, seconds)
        self._engine = VllmEngine(
            self._http,
            config=config,
            first_rank=workers[0].identity.rank,
            options=StepOptions.of(config).model_copy(update={"timeout": BEGIN_SECONDS}),
            doorbell=self._bell.name,
        )

    def run(self) -> None:
        """Follows until the process is asked to end; in a local run, until the sender has left.

        Raises TransportError once the engine is gone or does not answer, Refused where a worker can't join, and
        ConfigError where its workers are not as many as its ranks.
        """
        self._join()  # anew where an earlier follower had joined them: the bell is another
        while True:
            self._alive()
            looks = self._engine.look()
            if any(look.report is None for look in looks):
                self._join()
                continue
            self._publish(looks)
            if any(look.begun for look in looks):
                self._bell.wait(0 if self._step() else AFTER_FAILURE_SECONDS)
                continue
            if parent.bound() and any(look.left for look in looks):
                return
            joining = any(look.state == AgentState.STARTING for look in looks)
            self._bell.wait(JOINING_SECONDS if joining else LOOK_SECONDS)

    def _join(self) -> None:
        reports = self._engine.join()
        ranks = [worker.identity.rank for worker in self._workers]
        found = [report.rank for report in reports]
        if found != ranks:
            raise ConfigError(
                f"the engine has {len(found)} workers and --workers is {len(ranks)}: write --workers {len(found)}, "
                f"and give it as many ranks (receivers.gpusPerPod: {len(found)}, with placement Dedicated)"
            )
        log.info("vLLM %s joins as rank %s", reports[0].version, ", ".join(map(str, ranks)))

    def _publish(self, looks: Sequence[LookReport]) -> None:
        mixed = ""
        if not all(look.whole for look in looks):
            mixed = "its weights are mixed; generation waits for the next whole step"
        elif len({look.step for look in looks}) > 1:
            mixed = "its workers hold different steps; generation waits for the next whole step"
        for worker, look in zip(self._workers, looks, strict=True):
            worker.take(look, mixed)
            if look.state == AgentState.REFUSED:
                raise Refused(f"rank {look.rank}: {look.message}")

    def _step(self) -> bool:
        try:
            reports = self._engine.take()
        except TransportError as error:
            # Whether the weights are mixed or the engine is gone, the next look tells.
            log.warning("a step failed: %s", error)
            return False
        log.info("the engine serves step %d, taken in %.3f s", reports[0].step, max(r.seconds for r in reports))
        return True

    def close(self) -> None:
        """The workers leave their sender, which waits for them no more. Never raises for an engine that is gone."""
        self._bell.close()
        with contextlib.suppress(ConfigError, TransportError):
            self._engine.close(CLOSE_SECONDS)
