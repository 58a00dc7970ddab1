"""Goes on where the trainer's tensors moved: `param.data = ...`, `model.to(...)`, `load_state_dict(assign=True)`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from weightsync_api.reports import AgentState

from .addresses import Addresses
from .adopt import bring_back
from .deadline import Deadline
from .lobby import Lobby
from .router import Router
from .transport.base import SenderTransport

log = logging.getLogger("weightsync.sender")

MAX_TOLD = 100
"""Sets of names that are remembered, so that a trainer whose tensors move at each step fills no log."""


class Relocation:
    """Sees to tensors that moved, between two steps."""

    def __init__(
        self,
        addresses: Addresses,
        names: Sequence[str],
        transport: SenderTransport,
        lobby: Lobby,
        router: Router,
        join_timeout: float,
    ) -> None:
        self._addresses = addresses
        self._names = names
        self._transport = transport
        self._lobby = lobby
        self._router = router
        self._join_timeout = join_timeout
        self._told: set[int] = set()

    def follow(self, moved: Sequence[int]) -> None:
        """Brings tensors back into the arena; without one, reads them where they are. `moved`: as Moved has it.

        Where receivers map the trainer's own memory, each maps the new, and who takes too long is out of the step.
        """
        plan = self._transport.plan
        if plan.arena is not None:
            bring_back(plan.tensors, plan.manifest, plan.arena.tensor(), moved)
            became = "brought back into the arena, with the values that they have now, which costs a copy each time"
        elif self._transport.replan():
            self._lobby.offer_anew()
            deadline = Deadline(self._join_timeout)
            while not deadline.passed and any(p.state == AgentState.STARTING for p in self._lobby.peers.values()):
                self._router.poll(min(0.1, deadline.remaining))
            became = "mapped anew where they are now, for which every receiver joined again"
        else:
            became = "read where they are now"
        self._addresses.settle()
        self._tell([self._names[index] for index in moved], became)

    def _tell(self, names: list[str], became: str) -> None:
        """Once for the same names."""
        if (key := hash(tuple(names))) in self._told:
            return
        if len(self._told) < MAX_TOLD:
            self._told.add(key)
        more = f" and {len(names) - 20} more" if len(names) > 20 else ""
        log.warning(
            "moved (`param.data = ...`, `model.to(...)`) and %s: %s%s. Weights that are written in place "
            "(`param.data.copy_(...)`) cost nothing of the kind",
            became,
            ", ".join(names[:20]),
            more,
        )
