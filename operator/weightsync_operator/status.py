"""Pure: what was observed and what the sender reports -> the status of a WeightSync."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from weightsync_api.quantity import format_bytes, format_delta
from weightsync_api.reports import AgentReport, AgentState, Report, StepReport
from weightsync_api.v1alpha1 import (
    AgentStatus,
    Condition,
    ConditionType,
    StepStatus,
    Summary,
    WeightSync,
    WeightSyncStatus,
)
from weightsync_api.v1alpha1.status import MAX_HISTORY, MAX_NAMES, AckMicroseconds, ReservedBytes

from . import conditions
from .conditions import Facts, Verdict
from .plan import Plan, PlannedAgent, Role
from .platform import Observed, ObservedAgent
from .reserved import ReservedHistory
from .text import latency, percentile, rate

SHORT = 256
"""Characters of a name that an agent reports."""


def next_status(
    ws: WeightSync,
    plan: Plan,
    observed: Observed,
    report: Report | None,
    now: datetime,
    previous: WeightSyncStatus,
    reserved: ReservedHistory | None = None,
    refused: str = "",
) -> WeightSyncStatus:
    """The status as it should be now.

    `report` brings steps that `previous` lacks, and may bring ones that it has; None: the sender did not answer (yet).
    `reserved` has the memory of all steps so far; without it, that of the report's steps is judged.
    A report for another WeightSync is passed over. `refused`: why the sender's last answer was none for this one.
    """
    if report is not None and not is_about(report, ws):
        report = None
    if reserved is None:
        reserved = _reserved_of(report, ws)
    if ws.spec.suspend:
        report = None
    finished = (report.finished if report else False) or _was_complete(previous, observed)
    history = _merge(previous.history, report.steps if report else [])
    last = history[-1] if history else previous.last_step
    complete = [step.step for step in history if step.complete]
    agents = _agents(plan, observed, report, previous.agents, finished)
    facts = Facts(
        ws=ws,
        plan=plan,
        observed=observed,
        report=report,
        agents=agents,
        last=report.steps[-1] if report and report.steps else None,
        step=complete[-1] if complete else previous.step,
        broken_step=last.step if last and not last.complete else 0,
        reserved=reserved,
        finished=finished,
        refused=refused,
    )
    return _status(facts, history, last, now, previous)


def _status(
    facts: Facts, history: list[StepStatus], last: StepStatus | None, now: datetime, previous: WeightSyncStatus
) -> WeightSyncStatus:
    ws, plan, report, agents = facts.ws, facts.plan, facts.report, list(facts.agents)
    replicas = plan.receiver_replicas()
    holding = {agent.rank for agent in agents if agent.state == AgentState.SYNCED}
    there = {agent.rank for agent in facts.observed.agents if agent.exists}
    synced = sum(all(a.rank in holding for a in replica) for replica in replicas)
    wanted = len(replicas) if not ws.spec.suspend else ws.spec.receivers.replicas
    verdicts = _judge(facts, previous)
    return WeightSyncStatus(
        observed_generation=ws.metadata.generation,
        conditions=_conditions(verdicts, ws.metadata.generation, now, previous.conditions),
        transport=(report.transport[:SHORT] if report else "") or plan.transport.value,
        mode=(report.mode[:SHORT] if report else "") or previous.mode,
        route=(report.route[:SHORT] if report else "") or previous.route,
        names=(report.names[:MAX_NAMES] if report else "") or previous.names,
        replicas=sum(any(a.rank in there for a in replica) for replica in replicas),
        ready_replicas=synced,
        selector=plan.selector,
        step=facts.step,
        last_step=last,
        history=history,
        agents=agents,
        summary=_summary(
            _word(facts, verdicts),
            f"{synced}/{wanted}",
            _nodes(agents),
            next((str(s.step) for s in reversed(history) if s.verified), previous.summary.verified),
            last,
        ),
    )


def _reserved_of(report: Report | None, ws: WeightSync) -> ReservedHistory:
    reserved = ReservedHistory(ws.spec.memory.window)
    if report is not None:
        reserved.record(report)
    return reserved


def is_about(report: Report, ws: WeightSync) -> bool:
    """Whether the report is this WeightSync's: an agent that reports for another one is not believed."""
    meta = ws.metadata
    same_uid = not (report.uid and meta.uid) or report.uid == meta.uid
    return same_uid and (report.namespace, report.name) == (meta.namespace, meta.name)


def step_status(step: StepReport) -> StepStatus:
    """A step's figures, aggregated over its receivers."""
    acked = [row for row in step.receivers if row.state == AgentState.SYNCED]
    acks = [row.ack_microseconds for row in acked]
    return StepStatus(
        step=step.step,
        started_at=step.started_at,
        duration_microseconds=step.duration_microseconds,
        bytes=step.bytes,
        receivers=len(acked),
        reserved_bytes=ReservedBytes(
            sender=step.memory.reserved_after,
            receiver_max=max((row.memory.reserved_after for row in acked), default=0),
            delta=max(-(2**63), min(step.delta, 2**63 - 1)),
            peak=max([step.memory.peak, *(row.memory.peak for row in acked)]),
        ),
        ack_microseconds=AckMicroseconds(p50=percentile(acks, 50), p99=percentile(acks, 99), max=max(acks, default=0)),
        verified=step.verified,
        complete=step.complete,
    )


def condition(status: WeightSyncStatus, kind: ConditionType) -> Condition | None:
    """The condition of this type, where the status has it."""
    return next((c for c in status.conditions if c.type == kind), None)


def _summary(status: str, receivers: str, nodes: str, verified: str, last: StepStatus | None) -> Summary:
    """The printer columns: these four as they are, and the last step's figures."""
    if last is None:
        return Summary(status=status, receivers=receivers, nodes=nodes, verified=verified)
    return Summary(
        status=status,
        receivers=receivers,
        reserved=format_bytes(max(last.reserved_bytes.sender, last.reserved_bytes.receiver_max)),
        reserved_delta=format_delta(last.reserved_bytes.delta),
        ack=latency(last.ack_microseconds.max) if last.receivers else "",
        rate=rate(last.bytes, last.duration_microseconds) if last.complete else "",
        nodes=nodes,
        ack_p99=latency(last.ack_microseconds.p99) if last.receivers else "",
        peak=format_bytes(last.reserved_bytes.peak),
        verified=verified,
    )


def _nodes(agents: Sequence[AgentStatus]) -> str:
    """`node-a`, `node-a,node-b`, `node-a,node-b,+2`."""
    names = list(dict.fromkeys(agent.node for agent in agents if agent.node))
    return ",".join(names[:2] + ([f"+{len(names) - 2}"] if len(names) > 2 else []))


def _was_complete(previous: WeightSyncStatus, observed: Observed) -> bool:
    """A sender that finished stays finished when its process is gone, until another one runs."""
    runs = any(agent.rank == 0 and agent.running for agent in observed.agents)
    return previous.summary.status == "Complete" and not runs


def _merge(history: Sequence[StepStatus], steps: Sequence[StepReport]) -> list[StepStatus]:
    """The last steps by their beginning, each once. Numbers may come again after all agents were lost; times don't."""
    known = {(step.step, step.started_at): step for step in history}
    known |= {(step.step, step.started_at): step_status(step) for step in steps[-MAX_HISTORY:]}
    return sorted(known.values(), key=lambda step: (step.started_at, step.step))[-MAX_HISTORY:]


def _agents(
    plan: Plan, observed: Observed, report: Report | None, previous: Sequence[AgentStatus], finished: bool
) -> list[AgentStatus]:
    told = {agent.rank: agent for agent in report.agents} if report else {}
    before = {agent.rank: agent for agent in previous}
    seen = {agent.rank: agent for agent in observed.agents}
    return [_agent(a, seen.get(a.rank), told.get(a.rank), before.get(a.rank), finished) for a in plan.agents()]


def _agent(
    planned: PlannedAgent,
    seen: ObservedAgent | None,
    told: AgentReport | None,
    before: AgentStatus | None,
    finished: bool,
) -> AgentStatus:
    agent = AgentStatus(
        rank=planned.rank, role="Sender" if planned.role == Role.SENDER else "Receiver", pod=planned.pod
    )
    if told is not None:
        agent = agent.model_copy(
            update={
                "node": told.node[:SHORT],
                "gpu": told.gpu[:SHORT],
                "state": told.state.value,
                "message": told.message,
                "step": told.step,
                "reserved_bytes": told.memory.reserved_after,
                "allocated_bytes": told.memory.allocated_after,
                "ack_microseconds": told.ack_microseconds,
            }
        )
    elif before is not None and before.pod == planned.pod:
        agent = before.model_copy()
    if seen is None:
        return agent.model_copy(update={"state": AgentState.STARTING.value, "message": "not created yet"})
    agent.node = seen.node or agent.node
    if seen.running:
        if told is None and agent.state in (AgentState.LOST, AgentState.STARTING):
            agent = agent.model_copy(update={"state": AgentState.STARTING.value, "message": ""})
        elif not finished and _is_of_the_one_before(seen, told, before):
            update = {"state": AgentState.STARTING.value, "message": "it was started again and has not joined yet"}
            agent = agent.model_copy(update=update)
    elif seen.exit_code is None and not agent.step:
        agent = agent.model_copy(update={"state": AgentState.STARTING.value, "message": seen.message})
    elif not (finished and seen.exit_code == 0):
        agent = agent.model_copy(update={"state": AgentState.LOST.value, "message": seen.message})
    return agent


def _is_of_the_one_before(seen: ObservedAgent, told: AgentReport | None, before: AgentStatus | None) -> bool:
    """Whether what the sender says of a receiver is about its process that ended: the sender hears of that one's end
    in its next step, or from the new one's Hello, which an engine says only when it has loaded."""
    if told is None or before is None or not seen.rank or not seen.restarts:
        return False
    was_down = before.state in (AgentState.LOST, AgentState.STARTING) and before.pod == seen.pod
    return was_down and told.state == AgentState.SYNCED and told.step == before.step


def _judge(facts: Facts, previous: WeightSyncStatus) -> dict[ConditionType, Verdict]:
    verdicts = {
        ConditionType.READY: conditions.ready(facts),
        ConditionType.PROGRESSING: conditions.progressing(facts),
        ConditionType.MEMORY_STABLE: conditions.memory_stable(facts),
        ConditionType.ACKS_TIMELY: conditions.acks_timely(facts),
        ConditionType.TRANSPORT_OPTIMAL: conditions.transport_optimal(facts),
        ConditionType.SUSPENDED: conditions.suspended(facts),
    }
    if (verified := conditions.ipc_verified(facts)) is not None:
        verdicts[ConditionType.IPC_VERIFIED] = verified
    if (restricted := conditions.pods_restricted(facts)) is not None:
        verdicts[ConditionType.PODS_RESTRICTED] = restricted
    # What is measured in steps stands until a new step says otherwise: a quiet sender is no evidence.
    for kind in (
        ConditionType.MEMORY_STABLE,
        ConditionType.ACKS_TIMELY,
        ConditionType.TRANSPORT_OPTIMAL,
        ConditionType.IPC_VERIFIED,
    ):
        old = condition(previous, kind)
        if kind in verdicts and verdicts[kind].status == "Unknown" and old is not None:
            verdicts[kind] = Verdict(old.status, old.reason, old.message)
    return verdicts


def _conditions(
    verdicts: dict[ConditionType, Verdict], generation: int, now: datetime, previous: Sequence[Condition]
) -> list[Condition]:
    before = {c.type: c for c in previous}
    found = []
    for kind in ConditionType:
        if (verdict := verdicts.get(kind)) is None:
            continue
        old = before.get(kind)
        since = old.last_transition_time if old and old.status == verdict.status else now.replace(microsecond=0)
        found.append(
            Condition(
                type=kind,
                status=verdict.status,
                reason=verdict.reason,
                message=verdict.message,
                last_transition_time=since,
                observed_generation=generation,
            )
        )
    return found


def _word(facts: Facts, verdicts: dict[ConditionType, Verdict]) -> str:
    """The column STATUS, one word."""
    if facts.ws.spec.suspend:
        return "Suspended"
    if facts.finished:
        return "Complete"
    if verdicts[ConditionType.READY].status == "True":
        return "Syncing"
    broken = {AgentState.LOST, AgentState.TAINTED, AgentState.REFUSED}
    if facts.observed.problems or facts.step or any(agent.state in broken for agent in facts.agents):
        return "Degraded"
    return "Starting"
