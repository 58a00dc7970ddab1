"""A callback that brings a Trainer's weights to the engines: before the first step, after each, and at the end."""

from __future__ import annotations

import logging
import time
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from weightsync_api.agent_config import AgentConfig
from weightsync_api.reports import StepReport

from ..errors import ConfigError, StepFailed
from ..names import NameRules
from ..sender import Sender
from ..sources import lora
from ..sources.module import Weights

log = logging.getLogger("weightsync.trainer")

RETRY_SECONDS = 1.0


class WeightSyncCallback(TrainerCallback):
    """For `Trainer(callbacks=[...])` of transformers and every trainer of TRL.

    When training begins, all engines get the weights that it begins with; then, after each optimizer step whose number
    is a multiple of `every_steps`, the new ones; and at the end those of the last step. The trainer waits meanwhile, so
    what it generates afterwards, it generates with them.

    Works with one process, with DDP (rank 0 sends, the others wait) and with FSDP2 (all gather, rank 0 sends).

    Args:
        every_steps: e.g. the optimizer steps between two generations.
        dtype: send floating-point weights converted (float32 masters as bfloat16).
        lora: what is sent of a peft model: Merged: the model that it stands for; Adapters: `adapter` alone.
        adopt: moves the weights into shared memory (see Sender); not with FSDP2, dtype or LoRA.
        names: rules that rename the weights; None: the configuration's.
        each_rank: with FSDP2, every rank sends, to engines of its own (see Sender).
        attempts: times that a step is tried before `StepFailed` ends the training. An engine that a failed step left
            tainted answers nothing until a whole one, so going on without would wait for it.
        config: the AgentConfig; None: this process', as `weightsync run` or the operator set it up.

    Raises, from the trainer's `train`: ConfigError, JoinTimeout, StepFailed.
    """

    def __init__(
        self,
        *,
        every_steps: int = 1,
        dtype: torch.dtype | None = None,
        lora: Literal["Merged", "Adapters"] = "Merged",
        adapter: str = "default",
        adopt: bool = False,
        names: NameRules | None = None,
        each_rank: bool = False,
        attempts: int = 3,
        config: AgentConfig | None = None,
    ) -> None:
        if every_steps < 1 or attempts < 1:
            raise ConfigError("every_steps and attempts are at least 1")
        self.every_steps = every_steps
        self.attempts = attempts
        self.last: StepReport | None = None
        """The last step's report, at the rank that sends."""
        self._dtype = dtype
        self._lora = lora
        self._adapter = adapter
        self._adopt = adopt
        self._names = names
        self._each_rank = each_rank
        self._config = config
        self._sender: Sender | None = None
        self._device = torch.device("cpu")
        self._sent_at = -1

    @property
    def sender(self) -> Sender | None:
        """There from the begin of the training to its end, at the ranks that take part in sending."""
        return self._sender

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model: torch.nn.Module = kwargs["model"]
        parameters = list(model.parameters())
        self._device = parameters[0].device
        if state.is_world_process_zero or any(isinstance(p, DTensor) for p in parameters):
            self._sender = self._make_sender(self._source(model))
        self._send(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self.every_steps == 0:
            self._send(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step != self._sent_at:
            self._send(state.global_step)
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _source(self, model: torch.nn.Module) -> Weights:
        if self._lora == "Adapters":
            if not lora.has_adapters(model):
                raise ConfigError("lora is Adapters, and the trainer's model has none: pass it a peft_config")
            return lora.adapters(model, self._adapter)
        return model

    def _make_sender(self, source: Weights) -> Sender:
        options: dict[str, Any] = {
            "adopt": self._adopt,
            "dtype": self._dtype,
            "names": self._names,
            "each_rank": self._each_rank,
        }
        if self._config is not None:
            return Sender(source, config=self._config, **options)
        return Sender.from_env(source, **options)

    def _send(self, global_step: int) -> None:
        """One step, in place at every engine when it returns, on every rank."""
        for attempt in range(1, self.attempts + 1):
            failure: StepFailed | None = None
            error: BaseException | None = None
            try:
                if self._sender is not None:
                    self.last = self._sender.step()
            except StepFailed as failed:
                failure = failed
                self.last = failed.report
            except BaseException as raised:
                error = raised
            if self._all(failure is None and error is None):
                self._sent_at = global_step
                return
            if error is not None:
                raise error
            if failure is not None:
                log.warning("attempt %d of %d: %s", attempt, self.attempts, failure)
                if attempt == self.attempts:
                    raise failure
            time.sleep(RETRY_SECONDS)
        raise ConfigError("the rank that sends gave up; its own error says why")

    def _all(self, ok: bool) -> bool:
        """Whether all ranks say so: none goes on before the engines have what it generates with."""
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return ok
        told = torch.tensor([int(ok)], device=self._device)
        dist.all_reduce(told, dist.ReduceOp.MIN)
        return bool(told.item())
