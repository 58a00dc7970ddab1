"""Pure: the judgement behind each condition of a WeightSync. `status.py` puts them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from weightsync_api.quantity import format_delta, parse_bytes
from weightsync_api.reports import AgentState, Report, StepReport
from weightsync_api.v1alpha1 import AgentStatus, Device, Placement, Transport, WeightSync

from .plan import Plan
from .platform import Observed
from .reserved import ReservedHistory
from .text import latency, listed, who

NOT_ACKNOWLEDGED = "not acknowledged within"
"""What the sender writes of a receiver whose ACK did not come by ackTimeoutSeconds."""


@dataclass(frozen=True)
class Verdict:
    """A condition without its times."""

    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str


@dataclass(frozen=True)
class Facts:
    """All that the conditions are judged by."""

    ws: WeightSync
    plan: Plan
    observed: Observed
    report: Report | None
    agents: Sequence[AgentStatus]
    last: StepReport | None
    """The newest step of the report, where it brought one."""
    step: int
    """Last complete step, ever."""
    broken_step: int
    """The newest step, where it did not reach every receiver; 0 otherwise."""
    reserved: ReservedHistory
    finished: bool
    refused: str = ""
    """Why the sender's last answer is no report of this WeightSync."""


def true(reason: str, message: str) -> Verdict:
    return Verdict("True", reason, message)


def false(reason: str, message: str) -> Verdict:
    return Verdict("False", reason, message)


def unknown(reason: str, message: str) -> Verdict:
    return Verdict("Unknown", reason, message)


def suspended(facts: Facts) -> Verdict:
    if facts.ws.spec.suspend:
        return true("Suspended", "spec.suspend is true: no pods run and no GPU is held; the last status is kept")
    return false("NotSuspended", "spec.suspend is false")


def ready(facts: Facts) -> Verdict:
    """True: a step was complete, and every wanted receiver holds a whole one."""
    if facts.ws.spec.suspend:
        return false("Suspended", "spec.suspend is true: set it to false to bring the pods back")
    if facts.observed.problems:
        return _problem(facts)
    sender, receivers = _split(facts)
    if not facts.finished:
        stopped = _not_running(facts, 0) or (None if facts.report else _started_again(facts, 0))
        if (stopped is None and facts.report is None) or (stopped is not None and stopped.reason == "Starting"):
            # What can't get better by waiting is told before what can.
            stopped = _fault_of_receivers(facts) or stopped
        if stopped is not None:
            return stopped
        if facts.refused:
            return false(
                "ReportRefused",
                f"what {who(0, sender.pod if sender else '')} answers is not believed: {facts.refused}: its container "
                "must run the agent, or a program with the library, of the operator's version",
            )
        if sender is None or facts.report is None:
            pod = sender.pod if sender else ""
            return false("WaitingForSender", f"{who(0, pod)} runs but has not reported yet")
    if not receivers:
        return false("NoReceivers", "receivers.replicas is 0: there is nothing to send to; raise it")
    behind = [agent for agent in receivers if agent.state != AgentState.SYNCED]
    worst = min(behind, key=lambda agent: _SEVERITY.index(AgentState(agent.state)), default=None)
    if worst is not None:
        if worst.state == AgentState.JOINED and not facts.step:
            return false("WaitingForFirstStep", "the receivers have joined; no step is complete yet")
        # The platform's word on a process that does not run is nearer to the cause than the sender's.
        if (stopped := _not_running(facts, worst.rank)) is not None:
            return stopped
        if (again := _started_again(facts, worst.rank)) is not None:
            return again
        causes = listed([f"{who(a.rank, a.pod)} is {a.state}{f': {a.message}' if a.message else ''}" for a in behind])
        return false(
            f"Receiver{worst.state}", f"{len(behind)} of {len(receivers)} receivers hold no whole step: {causes}"
        )
    if not facts.step:
        return false("WaitingForFirstStep", "no step is complete yet")
    return true("Synced", f"all {len(receivers)} receivers hold step {facts.step}")


def progressing(facts: Facts) -> Verdict:
    """True: on its way, to the first step or from step to step. False: nothing will move without a hand, or no more."""
    if facts.ws.spec.suspend:
        return false("Suspended", "spec.suspend is true")
    if facts.observed.problems:
        return _problem(facts)
    if facts.finished:
        return false("Complete", f"the sender has finished after step {facts.step}")
    sender, _ = _split(facts)
    if sender is not None and sender.state == AgentState.LOST:
        return false("SenderLost", f"{who(0, sender.pod)} is gone: {sender.message}")
    if facts.broken_step:
        causes = listed([f"{who(a.rank, a.pod)}: {a.message}" for a in facts.agents if a.rank and a.message])
        return true(
            "Retrying",
            f"step {facts.broken_step} did not reach every receiver{f' ({causes})' if causes else ''}; "
            "the next step sends everything again",
        )
    if facts.step:
        return true("Stepping", f"step {facts.step} is complete")
    return true("Starting", "the agents start and join; the first step follows")


def memory_stable(facts: Facts) -> Verdict:
    """False: an agent's reserved memory grew by more than memory.maxReservedGrowth over memory.window steps."""
    limits = facts.ws.spec.memory
    growths = facts.reserved.growth()
    if not growths:
        return unknown("WarmingUp", "reserved memory is compared from the third step after an agent joined")
    worst = max(growths, key=lambda growth: growth.nbytes)
    pods = {agent.rank: agent.pod for agent in facts.agents}
    grew = (
        f"reserved memory of {who(worst.rank, pods.get(worst.rank, ''))} changed by {format_delta(worst.nbytes)} "
        f"from step {worst.first} to step {worst.last}"
    )
    if worst.nbytes <= parse_bytes(limits.max_reserved_growth):
        return true("WithinLimit", f"{grew}, the most of any agent; the limit is {limits.max_reserved_growth}")
    look = (
        "look for tensors that the engine keeps of what load_weights is given, and for caches that grow a step"
        if worst.rank
        else "look for tensors that the trainer keeps over its steps, such as losses with their graphs"
    )
    also = sum(growth.nbytes > parse_bytes(limits.max_reserved_growth) for growth in growths) - 1
    return false(
        "ReservedGrows",
        f"{grew}, more than memory.maxReservedGrowth {limits.max_reserved_growth} within {limits.window} steps"
        f"{f' ({also} more agents too)' if also else ''}: {look}; if it is meant, raise memory.maxReservedGrowth",
    )


def acks_timely(facts: Facts) -> Verdict:
    """False: in the last step an ACK took more than half of what it may take, or never came."""
    limit = facts.ws.spec.transfer.ack_timeout_seconds
    if facts.last is None:
        return unknown("NotMeasured", "no step has been done yet")
    pods = {agent.rank: agent.pod for agent in facts.agents}
    missing = [row for row in facts.last.receivers if NOT_ACKNOWLEDGED in row.error]
    raise_it = "see its log for what it does after the data is there, or raise transfer.ackTimeoutSeconds"
    if missing:
        named = listed([who(row.rank, pods.get(row.rank, "")) for row in missing])
        return false(
            "AckTimeout", f"step {facts.last.step}: no ACK within ackTimeoutSeconds {limit} of {named}: {raise_it}"
        )
    acked = [row for row in facts.last.receivers if row.state == AgentState.SYNCED]
    if not acked:
        return unknown("NotMeasured", f"step {facts.last.step}: no receiver acknowledged it")
    slowest = max(acked, key=lambda row: row.ack_microseconds)
    took = f"the slowest ACK of step {facts.last.step} took {latency(slowest.ack_microseconds)}"
    name = who(slowest.rank, pods.get(slowest.rank, ""))
    if slowest.ack_microseconds > limit * 500_000:
        return false("SlowAck", f"{took}, more than half of ackTimeoutSeconds {limit}, at {name}: {raise_it}")
    return true("Timely", f"{took}, at {name}")


def transport_optimal(facts: Facts) -> Verdict:
    """False: another placement or setting would move the bytes faster; the message says which.

    On CPU it is True whatever the route: the spec asks for CPU, no placement of it changes the order of magnitude, and
    an alarm on False must not ring for a laptop.
    """
    route = facts.report.route if facts.report else ""
    if not route:
        return unknown("NotMeasured", "the route is known once receivers have joined")
    if facts.plan.device == Device.CPU:
        return true("CPUDevice", f"{route}, on CPU: between GPUs (device: CUDA) it would be faster")
    nodes = {agent.node for agent in facts.agents if agent.node}
    one_node = len(nodes) <= 1
    kind, _, detail = route.upper().partition("/")
    nvlink = "placement Node (one pod with all the GPUs, over NVLink) is some 25 times as fast"
    if kind == "NET" and detail.startswith("SOCKET"):
        if one_node and facts.ws.spec.placement == Placement.DEDICATED:
            return false(
                "Sockets",
                f"{route} between pods of one node: {nvlink}; network.sharedMemory: Host some 3 times, pods apart",
            )
        return false(
            "Sockets",
            f"{route}: let the pods have the node's RDMA devices (templates), or set network.interface to a "
            "faster network; on one node use placement Node",
        )
    if kind == "NET" and one_node:
        return false("Network", f"{route} between GPUs of one node: {nvlink.replace('25 times', '10 times')}")
    if kind == "SHM":
        return false("HostMemory", f"{route}, through the host's memory: {nvlink.replace('25 times', '7 times')}")
    return true("Fast", f"{route} is the fastest route of placement {facts.ws.spec.placement}")


def ipc_verified(facts: Facts) -> Verdict | None:
    """Whether what was mapped was proved to be the sender's memory; None where the transport isn't IPC."""
    if facts.plan.transport != Transport.IPC:
        return None
    refused = [agent for agent in facts.agents if agent.state == AgentState.REFUSED]
    if refused:
        return false("SelfTestFailed", listed([f"{who(a.rank, a.pod)}: {a.message}" for a in refused]))
    if facts.report is not None and facts.report.self_tested:
        return true("SelfTested", "every joined receiver read the sender's memory in the self-test and released it")
    return unknown("NotTested", "the self-test runs when a receiver joins")


def pods_restricted(facts: Facts) -> Verdict | None:
    """Whether the pods are such as a namespace of the Pod Security level restricted takes; None where there are none.

    They are by themselves: False is what the spec asked for.
    """
    beyond = facts.observed.beyond_restricted
    if beyond is None:
        return None
    if not beyond:
        return true("Restricted", "the pods satisfy the Pod Security level restricted")
    why = " (network.sharedMemory: Host)" if any(what.endswith("hostIPC is true") for what in beyond) else ""
    return false(
        "AsksForMore",
        f"the spec asks for pods beyond the Pod Security level restricted{why}: {listed(beyond)}: a namespace that "
        "enforces it refuses them; leave that out of the spec, or ask for a namespace that allows it",
    )


_SEVERITY = [
    AgentState.REFUSED,
    AgentState.LOST,
    AgentState.TAINTED,
    AgentState.STARTING,
    AgentState.JOINED,
    AgentState.SYNCED,
]


def _split(facts: Facts) -> tuple[AgentStatus | None, list[AgentStatus]]:
    sender = next((agent for agent in facts.agents if agent.rank == 0), None)
    return sender, [agent for agent in facts.agents if agent.rank]


def _problem(facts: Facts) -> Verdict:
    first = facts.observed.problems[0]
    return false(first.reason, listed([problem.message for problem in facts.observed.problems]))


def _not_running(facts: Facts, rank: int) -> Verdict | None:
    """Why this agent does not run, in the platform's words; None where it does."""
    agent = next((a for a in facts.observed.agents if a.rank == rank), None)
    if agent is None:
        return false("Starting", f"{who(rank, '')} is not there yet: it is being made")
    if agent.running or not (agent.reason or agent.message):
        return None
    times = f" (restarted {agent.restarts} times)" if agent.restarts > 1 else ""
    reason = agent.reason or ("Starting" if agent.exit_code is None else "NotRunning")
    return false(reason, f"{who(rank, agent.pod)} does not run{times}: {agent.message}")


def _started_again(facts: Facts, rank: int) -> Verdict | None:
    """Why this agent had ended, where it runs again and has not caught up yet; None otherwise."""
    agent = next((a for a in facts.observed.agents if a.rank == rank), None)
    if agent is None or not agent.running or not agent.reason:
        return None
    times = f" ({agent.restarts} times)" if agent.restarts > 1 else ""
    return false(agent.reason, f"{who(rank, agent.pod)} was started again{times}: {agent.message}")


def _fault_of_receivers(facts: Facts) -> Verdict | None:
    for agent in facts.observed.agents:
        if agent.rank and agent.reason not in ("", "Terminating", "Completed"):
            return _not_running(facts, agent.rank) or _started_again(facts, agent.rank)
    return None


def describe_growth(history: ReservedHistory) -> str:
    """`+0B`, of the agent that grew most since its warm-up; `not measured` before there is anything to compare."""
    growth = history.total_growth()
    return format_delta(growth.nbytes) if growth else "not measured (needs 4 steps)"
