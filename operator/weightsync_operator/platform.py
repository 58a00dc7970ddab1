"""What a platform is: the local machine (`local.py`) and a Kubernetes cluster are the two that carry out a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from weightsync_api.reports import Report
from weightsync_api.v1alpha1 import WeightSync, WeightSyncStatus

from .plan import Key, Plan, PlanDefaults


@dataclass(frozen=True)
class ObservedAgent:
    """One agent as the platform sees it, from outside: its process or its pod."""

    rank: int
    pod: str
    node: str = ""
    exists: bool = True
    """False: its pod could not even be made; `reason` and `message` say why."""
    running: bool = False
    exit_code: int | None = None
    """Of the process that ran last, where none runs now; None: none has ended, it is still on its way."""
    restarts: int = 0
    reason: str = ""
    """One CamelCase word where it does not run: ImagePullBackOff, Unschedulable, OOMKilled, Crashed. Where it runs
    again and is not ready yet: why it had ended."""
    message: str = ""
    """The cause in the platform's own words, for people."""


@dataclass(frozen=True)
class Problem:
    """Why a plan can't be carried out: a clash in a template, an object that is not ours, a quota."""

    reason: str
    message: str


@dataclass(frozen=True)
class Observed:
    """What there is of one WeightSync."""

    resource: WeightSync | None
    """None: it was deleted."""
    agents: tuple[ObservedAgent, ...] = ()
    problems: tuple[Problem, ...] = ()
    beyond_restricted: tuple[str, ...] | None = None
    """Fields of the pods that the Pod Security level restricted refuses; None: the platform has no pods."""
    unreadable: WeightSyncStatus | None = None
    """The status of a WeightSync that is there and can't be read, and which says so; `resource` is None then too."""


class ReportRefusedError(Exception):
    """What a sender's pod answered is no report of its WeightSync; the text says what it is, and from where."""


class Platform(Protocol):
    """Carries out plans. Every method is safe to repeat; none keeps the caller waiting beyond its own deadline."""

    def defaults(self, ws: WeightSync) -> PlanDefaults:
        """What the platform adds to the spec."""
        ...

    async def resource(self, key: Key) -> WeightSync | None:
        """The resource as it is now; None: it was deleted."""
        ...

    async def observe(self, key: Key) -> Observed:
        """The resource and its agents, as they are now."""
        ...

    async def apply(self, plan: Plan) -> None:
        """Makes what is missing, ends what is not in the plan, changes what differs. Returns without waiting for it."""
        ...

    async def report(self, key: Key, after: int, wait: float) -> Report | None:
        """The sender's report of steps above `after`; waits up to `wait` seconds for one. None: no answer.

        Raises ReportRefusedError.
        """
        ...

    async def write_status(self, ws: WeightSync, status: WeightSyncStatus) -> None:
        """Stores the status with the resource."""
        ...

    async def delete(self, key: Key) -> None:
        """Ends everything that belongs to a WeightSync which is gone."""
        ...
