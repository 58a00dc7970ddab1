"""Every error that the library raises. Each says what, where (resource, rank, step, bucket) and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync_api.reports import StepReport


class WeightSyncError(Exception):
    """Base of all errors of the library."""


class ConfigError(WeightSyncError):
    """The agent's configuration or environment is wrong."""


class SourceError(WeightSyncError):
    """The weights to send can't be read: a file is missing, truncated or not what it says."""


class ManifestMismatch(WeightSyncError):
    """The receiver's tensors don't fit the sender's. Raised before any byte moved; lists the differences."""


class Refused(WeightSyncError):
    """The peer refused to join; the text is the peer's reason."""


class FallBack(WeightSyncError):
    """This receiver can't take part as it is: all are to go on another way. See SenderTransport.fall_back.

    `apart`: memory of torch's can't be shared with it in either direction, so no way of Direct mode is left to it.
    """

    def __init__(self, reason: str, *, apart: bool = False) -> None:
        super().__init__(reason)
        self.apart = apart


class JoinTimeout(WeightSyncError):
    """A peer did not join within the deadline."""


class SelfTestFailed(WeightSyncError):
    """The transport's 1 MiB test at join did not come through, or its memory did not come back."""


class TransportError(WeightSyncError):
    """Bytes could not be moved."""


class VerifyFailed(WeightSyncError):
    """Digests differ: the receiver does not hold the sender's bytes."""


class StepTimeout(WeightSyncError):
    """A wait within a step reached its deadline."""


class ViewsRetained(WeightSyncError):
    """`load_weights` kept a view of a staging bucket, which would be overwritten under it."""


class StepFailed(WeightSyncError):
    """A step that not every present receiver acknowledged. `report` says which did, and why the others did not.

    The failed receivers are tainted or dropped; the next `step()` sends everything again.
    """

    def __init__(self, message: str, report: StepReport) -> None:
        super().__init__(message)
        self.report = report


class GatherFailed(WeightSyncError):
    """The trainer's ranks can't gather their shards any more: one died, or the process group's timeout was over."""


class Closed(WeightSyncError):
    """The peer said goodbye, or this end was closed."""
