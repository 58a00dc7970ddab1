"""WeightSyncs, reports and observations for the tests of the operator's pure half."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from weightsync_api.reports import AgentReport, AgentState, MemorySample, ReceiverStep, Report, StepReport
from weightsync_api.v1alpha1 import WeightSync
from weightsync_operator.plan import ClusterAddresses, Plan, PlanDefaults, plan
from weightsync_operator.platform import Observed, ObservedAgent

GIB = 1 << 30
MIB = 1 << 20
START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
CLUSTER = PlanDefaults(ClusterAddresses())


def weightsync(name: str = "demo", **spec: Any) -> WeightSync:
    """A valid resource; `spec` as in a manifest, over a synthetic source."""
    return WeightSync.model_validate(
        {
            "apiVersion": "weightsync.dev/v1alpha1",
            "kind": "WeightSync",
            "metadata": {"name": name, "uid": "u1", "generation": 3},
            "spec": {"sender": {"source": {"synthetic": {"model": "qwen3-0.6b"}}}, **spec},
        }
    )


def planned(ws: WeightSync) -> Plan:
    return plan(ws, CLUSTER)


def observed(ws: WeightSync, *, nodes: Mapping[int, str] | None = None, **changed: ObservedAgent) -> Observed:
    """Every planned agent, running; `rank_N=` puts another one in its place."""
    agents = []
    for agent in planned(ws).agents():
        running = ObservedAgent(agent.rank, agent.pod, node=(nodes or {}).get(agent.rank, "node-a"), running=True)
        agents.append(changed.get(f"rank_{agent.rank}", running))
    return Observed(ws, tuple(agents))


def row(
    rank: int, *, reserved: int = GIB, ack: int = 800, state: AgentState = AgentState.SYNCED, error: str = ""
) -> Any:
    return ReceiverStep(
        rank=rank,
        state=state,
        ack_microseconds=ack,
        memory=MemorySample(reserved_before=reserved, reserved_after=reserved, peak=reserved + MIB),
        verified=True,
        error=error,
    )


def step(number: int, rows: list[ReceiverStep], *, sender: int = 2 * GIB, complete: bool | None = None) -> StepReport:
    return StepReport(
        step=number,
        started_at=START + timedelta(seconds=number),
        duration_microseconds=23_100,
        bytes=8_044_936_192,
        memory=MemorySample(reserved_before=sender, reserved_after=sender, peak=sender),
        receivers=rows,
        verified=number == 1,
        complete=all(r.state == AgentState.SYNCED for r in rows) if complete is None else complete,
    )


def report(ws: WeightSync, steps: list[StepReport], *, finished: bool = False, **changed: Any) -> Report:
    """All planned agents Synced at the last of `steps`; `states={rank: (state, message)}` and Report's own fields."""
    states: dict[int, tuple[AgentState, str]] = changed.pop("states", {})
    last = steps[-1].step if steps else 0
    agents = []
    for agent in planned(ws).agents():
        state, message = states.get(agent.rank, (AgentState.SYNCED if last else AgentState.JOINED, ""))
        agents.append(
            AgentReport(
                rank=agent.rank,
                pod=agent.pod,
                node="node-a",
                pid=100 + agent.rank,
                state=state,
                message=message,
                step=last,
                memory=MemorySample(reserved_after=GIB, allocated_after=MIB),
                ack_microseconds=800,
            )
        )
    fields: dict[str, Any] = {"uid": "u1", "session": "s1", "transport": "NCCL", "mode": "Packed", "route": "P2P/CUMEM"}
    return Report(
        namespace="default", name=ws.metadata.name, agents=agents, steps=steps, finished=finished, **(fields | changed)
    )
