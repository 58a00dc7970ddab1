"""The columns of `kubectl get weightsyncs`, which `weightsync run` and `weightsync get` show too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Column:
    """One printer column. `priority` 1: shown with `-o wide` only."""

    name: str
    json_path: str
    description: str
    type: Literal["string", "integer", "boolean", "date"] = "string"
    priority: Literal[0, 1] = 0

    def schema(self) -> dict[str, object]:
        """The entry of `additionalPrinterColumns`."""
        entry: dict[str, object] = {
            "name": self.name,
            "type": self.type,
            "jsonPath": self.json_path,
            "description": self.description,
        }
        return entry | ({"priority": self.priority} if self.priority else {})


COLUMNS: tuple[Column, ...] = (
    Column("Ready", '.status.conditions[?(@.type=="Ready")].status', "Every wanted receiver holds a whole step."),
    Column("Status", ".status.summary.status", "Syncing, Starting, Suspended, Degraded or Complete."),
    Column("Transport", ".status.transport", "Transport in use."),
    Column("Receivers", ".status.summary.receivers", "Ready and wanted receivers."),
    Column("Step", ".status.step", "Last complete step.", type="integer"),
    Column("Reserved", ".status.summary.reserved", "Most reserved memory of any agent."),
    Column("Delta", ".status.summary.reservedDelta", "Largest change of reserved memory over the last step."),
    Column("Ack", ".status.summary.ack", "Slowest ACK of the last step."),
    Column("Rate", ".status.summary.rate", "Weights delivered to each receiver, per second."),
    Column("Age", ".metadata.creationTimestamp", "Time since it was created.", type="date"),
    Column("Reason", '.status.conditions[?(@.type=="Ready")].reason', "Why it is, or is not, ready.", priority=1),
    Column("Mode", ".status.mode", "Transfer mode in use.", priority=1),
    Column("Route", ".status.route", "Route in use.", priority=1),
    Column("Nodes", ".status.summary.nodes", "Nodes that its agents run on.", priority=1),
    Column("Ack-P99", ".status.summary.ackP99", "99th percentile of the last step's ACKs.", priority=1),
    Column("Peak", ".status.summary.peak", "Most reserved memory of any agent within the last step.", priority=1),
    Column("Verified", ".status.summary.verified", "Last step whose digests were compared and equal.", priority=1),
)
