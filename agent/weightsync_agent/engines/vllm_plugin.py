"""vLLM's general plugin: registers the backend `weightsync` and teaches the engine core a step in one call.

vLLM calls `register` in each of its processes, in some of them twice, and only logs what it raises.
"""

from __future__ import annotations

import sys

BACKEND = "weightsync"
_ENGINE = ("weightsync_agent.engines.vllm_backend", "WeightSyncEngine")


def register() -> None:
    """Idempotent. Raises ConfigError where this vLLM has not got what is needed."""
    from . import vllm_versions as vllm

    factory = vllm.hook("vllm.distributed.weight_transfer.factory", "WeightTransferEngineFactory")
    if BACKEND not in factory._registry:  # a second registration of one name raises
        factory.register_engine(BACKEND, *_ENGINE)
    if "vllm.v1.engine.core" in sys.modules:  # not so in workers of their own: they have no core
        from .vllm_core import install

        install()
