"""Pure: pods and their events -> how each agent is from outside, and why it does not run, in Kubernetes' words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weightsync_api.agent_config import ENV_AGENTS

from .plan import Plan, PlannedAgent
from .platform import ObservedAgent

Tree = Mapping[str, Any]

MAX_MESSAGE = 1024
"""Characters of a message that is quoted; its end tells most."""

_IMAGE = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"})
_EARLY = frozenset({"ContainerCreating", "PodInitializing", ""})
"""Waiting for nothing in particular: an event may know more."""
_PROBE, _PROBE_KILLS = "probe failed", "probe, will be restarted"
_MAYBE_PROBE = frozenset({0, 137, 143})
"""Exit codes of a container that the kubelet ended: events know whether it did, and for which probe."""


def observe_agents(
    plan: Plan, pods: Mapping[str, Tree], events: Mapping[str, Sequence[Tree]]
) -> tuple[ObservedAgent, ...]:
    """Every planned agent whose pod exists, or for whose absence there is a reason.

    Args:
        pods: by name.
        events: of pods and StatefulSets, by name, oldest first.
    """
    found = []
    for pods_of in plan.pod_sets:
        for ordinal in range(pods_of.replicas):
            pod = pods.get(pods_of.pod_name(ordinal))
            for agent in pods_of.agents_of(ordinal):
                if pod is not None:
                    found.append(_agent(agent, pod, events.get(agent.pod, ())))
                elif refused := _warning(events.get(pods_of.name, ()), "FailedCreate"):
                    found.append(
                        ObservedAgent(
                            agent.rank,
                            agent.pod,
                            exists=False,
                            reason="FailedCreate",
                            message=_quoted(refused),
                        )
                    )
    return tuple(sorted(found, key=lambda agent: agent.rank))


def wants_events(pod: Tree) -> bool:
    """Whether only the pod's events can tell why it does not run."""
    if _unscheduled(pod) or pod.get("status", {}).get("phase") == "Failed":
        return False
    for status in _statuses(pod):
        state, last = status.get("state") or {}, (status.get("lastState") or {}).get("terminated") or {}
        if "running" in state and (status.get("ready") or not last):
            continue
        waiting = state.get("waiting") or {}
        ended = state.get("terminated") or last
        early = "running" not in state and waiting.get("reason", "") in _EARLY
        if early or ended.get("exitCode") in _MAYBE_PROBE:
            return True
    return False


def _agent(agent: PlannedAgent, pod: Tree, events: Sequence[Tree]) -> ObservedAgent:
    node = str((pod.get("spec") or {}).get("nodeName") or "")
    status = _status_of(pod, agent)
    state = status.get("state") or {}
    ended = state.get("terminated") or (status.get("lastState") or {}).get("terminated")
    running = "running" in state and (pod.get("status") or {}).get("phase") != "Failed"
    reason, message = "", ""
    if not running:
        reason, message = _why(pod, status, events)
    elif ended and not status.get("ready"):
        # Started again: until it has caught up, why it had ended is what matters.
        reason, message = _ended(ended, status, events)
    return ObservedAgent(
        rank=agent.rank,
        pod=agent.pod,
        node=node,
        running=running,
        exit_code=None if running or not ended else int(ended.get("exitCode", 0)),
        restarts=int(status.get("restartCount", 0)),
        reason=reason,
        message=message,
    )


def _why(pod: Tree, status: Tree, events: Sequence[Tree]) -> tuple[str, str]:
    """Reason and message of an agent that does not run."""
    phase = pod.get("status") or {}
    if (pod.get("metadata") or {}).get("deletionTimestamp"):
        return "Terminating", "the pod is being ended"
    if phase.get("phase") == "Failed":
        return str(phase.get("reason") or "PodFailed"), _quoted(phase.get("message") or "the pod failed")
    if unscheduled := _unscheduled(pod):
        return str(unscheduled.get("reason") or "Unschedulable"), _quoted(unscheduled.get("message") or "")
    state = status.get("state") or {}
    waiting = state.get("waiting") or {}
    ended = state.get("terminated") or (status.get("lastState") or {}).get("terminated")
    reason = str(waiting.get("reason") or "")
    if reason in _IMAGE:
        return reason, _quoted(waiting.get("message") or f"the image {status.get('image', '')} can't be pulled")
    if ended:
        return _ended(ended, status, events)
    if reason not in _EARLY:
        return reason, _quoted(waiting.get("message") or reason)
    if warning := _warning(events):
        return str(warning.get("reason") or "Warning"), _quoted(warning.get("message") or "")
    return "", "the pod is being started" if status else "the pod waits for its node"


def _ended(ended: Tree, status: Tree, events: Sequence[Tree]) -> tuple[str, str]:
    code = int(ended.get("exitCode", 0))
    if ended.get("reason") == "OOMKilled":
        return "OOMKilled", (
            f"container {status.get('name', '')} was killed because it used more memory than its limit: raise "
            "agent.resources.limits.memory; /dev/shm counts too"
        )
    if code in _MAYBE_PROBE and (probe := _failed_probe(ended, events)):
        return "ProbeFailed", _quoted(f"container {status.get('name', '')} was restarted: {probe}")
    if code == 0:
        return "Completed", f"container {status.get('name', '')} exited with code 0"
    told = str(ended.get("message") or "").strip()
    return "Crashed", _quoted(
        f"container {status.get('name', '')} exited with code {code}" + (f": {told}" if told else "")
    )


def _failed_probe(ended: Tree, events: Sequence[Tree]) -> str:
    """For which the kubelet ended this container. Probes also fail of one that starts, or was killed by somebody else:
    those end nothing."""
    since = str(ended.get("startedAt") or "")
    found = [e for e in events if str(e.get("lastTimestamp") or since) >= since]
    if not any(_PROBE_KILLS in str(e.get("message", "")) for e in found):
        return ""
    return next((str(e["message"]) for e in reversed(found) if _PROBE in str(e.get("message", "")).lower()), "")


def _statuses(pod: Tree) -> Sequence[Tree]:
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _status_of(pod: Tree, agent: PlannedAgent) -> Tree:
    """Of the agent's container; of an init container that holds it up, where one does."""
    status = pod.get("status") or {}
    for init in status.get("initContainerStatuses") or ():
        state = init.get("state") or {}
        ended = state.get("terminated")
        stuck = "waiting" in state and state["waiting"].get("reason") not in _EARLY
        if stuck or (ended and ended.get("exitCode")):
            return dict(init)
    name = agents_container(pod, agent)
    return next((s for s in status.get("containerStatuses") or () if s.get("name") == name), {})


def agents_container(pod: Tree, agent: PlannedAgent) -> str:
    """Name of the container that runs an agent of this role."""
    for container in (pod.get("spec") or {}).get("containers") or ():
        for entry in container.get("env") or ():
            if entry.get("name") == ENV_AGENTS and f"{agent.role}:" in str(entry.get("value", "")):
                return str(container.get("name", ""))
    return ""


def _unscheduled(pod: Tree) -> Tree | None:
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return dict(condition)
    return None


def _warning(events: Sequence[Tree], reason: str = "") -> Tree | None:
    """The newest warning."""
    for event in reversed(events):
        if event.get("type") == "Warning" and reason in ("", event.get("reason")):
            return event
    return None


def _quoted(text: Any) -> str:
    if isinstance(text, Mapping):
        text = text.get("message") or ""
    words = " ".join(str(text).split())
    return words if len(words) <= MAX_MESSAGE else "…" + words[1 - MAX_MESSAGE :]


def trimmed(pod: Tree) -> dict[str, Any]:
    """What of a pod is read here and kept."""
    meta, spec, status = pod.get("metadata") or {}, pod.get("spec") or {}, pod.get("status") or {}
    containers = [
        {"name": c.get("name"), "env": [e for e in c.get("env") or () if e.get("name") == ENV_AGENTS]}
        for c in spec.get("containers") or ()
    ]
    kept = ("name", "namespace", "uid", "resourceVersion", "labels", "deletionTimestamp", "creationTimestamp")
    told = status.get("conditions") or ()
    conditions = [c for c in told if c.get("type") == "PodScheduled"]
    # Its times change with every probe; whether it is ready is all that is read.
    conditions += [{"type": "Ready", "status": c.get("status")} for c in told if c.get("type") == "Ready"]
    phases = ("phase", "reason", "message", "podIP", "containerStatuses", "initContainerStatuses")
    return {
        "metadata": {key: meta[key] for key in kept if key in meta},
        "spec": {"nodeName": spec.get("nodeName"), "containers": containers},
        "status": {**{key: status[key] for key in phases if key in status}, "conditions": conditions},
    }
