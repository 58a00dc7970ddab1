"""`weightsync.dev/v1alpha1`: the resource that users write and watch."""

from .resource import API_VERSION, GROUP, KIND, PLURAL, VERSION, Metadata, WeightSync
from .spec import (
    Device,
    Placement,
    SharedMemory,
    Source,
    TransferMode,
    Transport,
    VerifyMode,
    WeightSyncSpec,
)
from .status import AgentStatus, Condition, ConditionType, StepStatus, Summary, WeightSyncStatus

__all__ = [
    "API_VERSION",
    "GROUP",
    "KIND",
    "PLURAL",
    "VERSION",
    "AgentStatus",
    "Condition",
    "ConditionType",
    "Device",
    "Metadata",
    "Placement",
    "SharedMemory",
    "Source",
    "StepStatus",
    "Summary",
    "TransferMode",
    "Transport",
    "VerifyMode",
    "WeightSync",
    "WeightSyncSpec",
    "WeightSyncStatus",
]
