"""Where the sender's weights come from: made up (synthetic), read from files (checkpoint), or a trainer's own."""

from __future__ import annotations

from weightsync_api.v1alpha1.spec import Source as SourceSpec

from ..errors import ConfigError
from .base import Source

__all__ = ["Source", "open_source"]


def open_source(spec: SourceSpec) -> Source:
    """The source that a WeightSync names. Raises SourceError where its weights can't be read, ConfigError for
    `trainer`, whose weights come through `Sender.from_env`.
    """
    from .checkpoint import CheckpointSource
    from .synthetic import SyntheticSource

    if spec.synthetic is not None:
        return SyntheticSource(spec.synthetic.model, dtype=spec.synthetic.dtype.value)
    if spec.checkpoint is not None:
        return CheckpointSource(spec.checkpoint.path, watch=spec.checkpoint.watch)
    raise ConfigError("source.trainer has no weights of its own: the trainer calls Sender.from_env(source=model)")
