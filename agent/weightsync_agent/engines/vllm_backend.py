"""The weight-transfer backend `weightsync` of vLLM: `weight_transfer_config={"backend": "weightsync"}`.

vLLM's own calls drive it (init, start, update, finish, by its `LLM` methods, its HTTP routes or its trainer clients).
Its own client (vllm.py) needs one call a step instead, and pauses and resets around it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError
from . import vllm_versions as vllm
from .vllm_worker import JoinRequest, StepRequest, WorkerSync, index_of

if TYPE_CHECKING:
    # As far as they are used here: vLLM is in an engine's environment only.
    class WeightTransferInitInfo: ...

    class WeightTransferUpdateInfo: ...

    class WeightTransferEngine:
        def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None: ...
        def parse_update_info(self, update_info: dict[str, Any]) -> Any: ...

else:
    _BASE = "vllm.distributed.weight_transfer.base"
    WeightTransferEngine = vllm.hook(_BASE, "WeightTransferEngine")
    WeightTransferInitInfo = vllm.hook(_BASE, "WeightTransferInitInfo")
    WeightTransferUpdateInfo = vllm.hook(_BASE, "WeightTransferUpdateInfo")


@dataclass
class InitInfo(WeightTransferInitInfo):
    """As JoinRequest."""

    config: dict[str, Any] | None = None
    first_rank: int | None = None
    timeout: float = 0.0
    layerwise: bool = False


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """As StepRequest."""

    timeout: float = field(default=60.0)


class WeightSyncEngine(WeightTransferEngine):
    """One worker's end, as vLLM holds it."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.weightsync = WorkerSync(model, vllm_config, device, index_of(vllm_config, _rank_here()))
        self._taken = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.weightsync.join(
            JoinRequest.model_validate(
                {
                    "config": init_info.config,
                    "first_rank": init_info.first_rank,
                    "timeout": init_info.timeout,
                    "layerwise": init_info.layerwise,
                }
            )
        )

    def start_weight_update(self) -> None:
        self._taken = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # Not the base's, which synchronises an accelerator even where there is none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.weightsync.step(StepRequest(timeout=update_info.timeout))
        self._taken = True

    def finish_weight_update(self) -> None:
        if not self._taken:
            raise ConfigError("finish_weight_update without a step in between: call update_weights first")

    def shutdown(self) -> None:
        self.weightsync.close()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """vLLM 0.26's trainer side. The trainer's side is weightsync_agent.Sender."""
        raise NotImplementedError("the trainer's side is weightsync_agent.Sender: see docs/engines-vllm.md")


def _rank_here() -> int:
    """The worker's rank among its replica's, as vLLM's process groups have it."""
    group = vllm.hook("vllm.distributed.parallel_state", "get_world_group")()
    return int(group.rank_in_group)
