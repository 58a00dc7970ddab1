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

from ..deadline import Deadline
from ..errors import ConfigError, JoinTimeout, StepFailed
from ..names import NameRules
from ..sender import Sender
from ..sources import lora
from ..sources.module import Weights
from ..sources.sharded import broken_group
from ..step_log import lacks_a_step

log = logging.getLogger("weightsync.trainer")

RETRY_SECONDS = 1.0
DONE, AGAIN, OVER = range(3)
"""What a rank says of its try; the worst word of all ranks holds for each."""


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
            tainted answers nothing until a whole one, so going on without would wait for it. Where no engine is left,
            the training waits for one that comes back, for `transfer.joinTimeoutSeconds`.
        config: the AgentConfig; None: this process', as `weightsync run` or the operator set it up.

    Raises, from the trainer's `train`: ConfigError, JoinTimeout, StepFailed, GatherFailed.
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
        self._sharded = False
        self._model: torch.nn.Module | None = None
        self._adapters: dict[str, torch.Tensor] = {}
        """What is sent of `_model`, where adapters are sent alone."""
        self._sent_at = -1

    @property
    def sender(self) -> Sender | None:
        """There from the begin of the training to its end, at the ranks that take part in sending."""
        return self._sender

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._close()  # that of a training that an error or Ctrl-C ended in this process
        model: torch.nn.Module = kwargs["model"]
        parameters = list(model.parameters())
        self._device = parameters[0].device
        self._sharded = any(isinstance(p, DTensor) for p in parameters)
        self.last = None
        error: BaseException | None = None
        if state.is_world_process_zero or self._sharded:
            try:
                self._sender = self._make_sender(self._source(model))
            except BaseException as raised:
                error = raised
        self._agree(DONE if error is None else OVER, error)
        self._send(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self.every_steps == 0:
            self._send(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step != self._sent_at or args.load_best_model_at_end:  # the best is loaded before this
            self._send(state.global_step)
        self._close()

    def catch_up(self) -> None:
        """Brings an engine that came back, and waits for weights, what the last step brought. Does nothing where there
        is none. For who waits for engines between two steps; at the rank that sends, in the thread that trains.

        Shards are gathered by all ranks, and so by steps alone: with FSDP2 it does nothing.
        """
        if self._sender is None or self._sharded or not lacks_a_step(self._sender.report()):
            return
        try:
            self.last = self._step(self._sender)
        except (StepFailed, JoinTimeout) as failure:
            log.warning("an engine that came back was not brought along: %s", failure)

    def _close(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        self._model, self._adapters = None, {}

    def _source(self, model: torch.nn.Module) -> Weights:
        if self._lora == "Adapters":
            if not lora.has_adapters(model):
                raise ConfigError("lora is Adapters, and the trainer's model has none: pass it a peft_config")
            self._model, self._adapters = model, lora.adapters(model, self._adapter)
            return self._adapters
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

    def _step(self, sender: Sender) -> StepReport:
        if self._model is not None:
            # An adapter that was deleted and added anew has other tensors under the same names.
            now = lora.adapters(self._model, self._adapter)
            if now.keys() != self._adapters.keys():
                raise ConfigError(f"adapter {self._adapter!r} has other layers than when the training began")
            self._adapters.update(now)
        return sender.step()

    def _send(self, global_step: int) -> None:
        """One step, in place at every engine when it returns, on every rank."""
        attempt = 0
        patience: Deadline | None = None
        while True:
            word = DONE
            error: BaseException | None = None
            try:
                if self._sender is not None:
                    self.last = self._step(self._sender)
            except StepFailed as failure:
                attempt += 1
                error, self.last = failure, failure.report
                word = AGAIN if attempt < self.attempts else OVER
                log.warning("attempt %d of %d: %s", attempt, self.attempts, failure)
            except JoinTimeout as nobody:
                error, word = nobody, OVER
                if self._sender is not None and self.last is not None:  # engines were there
                    if patience is None:
                        patience = Deadline(self._sender.config.join_timeout_seconds)
                        log.warning("waiting up to %g s for an engine to come back: %s", patience.seconds, nobody)
                    word = OVER if patience.passed else AGAIN
            except BaseException as raised:
                error, word = raised, OVER
            if self._agree(word, error) == DONE:
                self._sent_at = global_step
                return
            time.sleep(RETRY_SECONDS)

    def _agree(self, word: int, error: BaseException | None) -> int:
        """The worst word of all ranks, for none goes on before the engines have what it generates with.

        Raises `error` where that is OVER, and at the other ranks ConfigError.
        """
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            told = torch.tensor([word], device=self._device)
            try:
                dist.all_reduce(told, dist.ReduceOp.MAX)
            except RuntimeError as broken:
                raise error or broken_group(broken) from broken
            word = int(told.item())
        if word == OVER:
            raise error or ConfigError("the rank that sends gave up; its own error says why")
        return word
