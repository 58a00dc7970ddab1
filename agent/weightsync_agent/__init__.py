"""Trainer weights to inference engines after every step: `Sender` in the trainer, `Receiver` in the engine.

Imported when they are first used: the launcher and the bench's command line need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .errors import (
        Closed,
        ConfigError,
        GatherFailed,
        JoinTimeout,
        ManifestMismatch,
        Refused,
        SelfTestFailed,
        SourceError,
        StepFailed,
        StepTimeout,
        TransportError,
        VerifyFailed,
        ViewsRetained,
        WeightSyncError,
    )
    from .receiver import Receiver
    from .sender import Sender

__all__ = [
    "Closed",
    "ConfigError",
    "GatherFailed",
    "JoinTimeout",
    "ManifestMismatch",
    "Receiver",
    "Refused",
    "SelfTestFailed",
    "Sender",
    "SourceError",
    "StepFailed",
    "StepTimeout",
    "TransportError",
    "VerifyFailed",
    "ViewsRetained",
    "WeightSyncError",
]

_MODULES = {"Sender": ".sender", "Receiver": ".receiver"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, ".errors"), __name__), name)
