"""Trainers that others wrote: transformers' Trainer and TRL's, through a callback and a rollout function."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .callback import WeightSyncCallback
    from .rollout import EngineRollout

__all__ = ["EngineRollout", "WeightSyncCallback"]

_MODULES = {"EngineRollout": ".rollout", "WeightSyncCallback": ".callback"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
