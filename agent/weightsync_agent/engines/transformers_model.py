"""A transformers model as an engine holds it, and its weights under both of its names.

transformers 5 stacks what checkpoints keep apart: the experts of a layer, and their gate and up projections. Every
other engine, and every checkpoint, names each expert's tensors. The stacked parameters hold them as plain pieces, so
both names are views of one memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from ..errors import ConfigError, ManifestMismatch
from ..manifest import Manifest
from ..targets import TensorTarget, named_tensors

log = logging.getLogger("weightsync.engine")


def live_model(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model of a folder's config.json, ready for `generate`, with weights that mean nothing until the first step.

    No weights file is read. Raises ConfigError where the folder holds no config of a causal language model.
    """
    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device(device):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} holds no model that transformers can make: {error}") from None
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.eval().requires_grad_(False)
    assert isinstance(model, PreTrainedModel)
    return model


def checkpoint_views(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's live weights under the names that its checkpoint has: views, so reading and writing are in place.

    Ties come under each of their names. Raises ConfigError where a checkpoint's tensor is no view of a live one (it is
    computed from it), or where the weights are sharded.
    """
    live = {name: tensor for name, tensor in named_tensors(model).items() if isinstance(tensor, torch.Tensor)}
    if any(isinstance(tensor, DTensor) for tensor in live.values()):
        raise ConfigError("sharded weights have no views under their checkpoint's names: send the model's own")
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before 5 a model's names were its checkpoint's
        return live
    with torch.no_grad(), _Views():
        found: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(live))
    memory = {tensor.untyped_storage().data_ptr() for tensor in live.values()}
    copied = [name for name, tensor in found.items() if tensor.untyped_storage().data_ptr() not in memory]
    if copied or sum(t.numel() for t in found.values()) != sum(t.numel() for t in live.values()):
        raise ConfigError(
            f"{type(model).__name__}'s checkpoint holds {', '.join(copied[:5]) or 'tensors'} otherwise than as pieces "
            "of the live parameters: send them under the model's own names"
        )
    return found


class ModelTarget(TensorTarget):
    """A live transformers model, overwritten in place under its own names or its checkpoint's.

    Tied heads are in `state_dict`, not in `named_parameters`: the sender may send either, both, or one of them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if getattr(model, "hf_quantizer", None) is not None:
            raise ConfigError(
                f"{type(model).__name__} is quantised by {type(model.hf_quantizer).__name__}, so its parameters are "
                "not what a trainer has: load it unquantised"
            )
        super().__init__(model)
        away = [name for name, tensor in self.tensors.items() if tensor.is_meta]
        if away:
            raise ConfigError(f"{', '.join(away[:5])} are offloaded to disk (device_map): give the model one device")
        self._model = model

    def bind(self, manifest: Manifest) -> None:
        try:
            super().bind(manifest)
        except ManifestMismatch as mismatch:
            try:
                views = checkpoint_views(self._model)
            except ConfigError:
                raise mismatch from None
            if views.keys() == self.tensors.keys():
                raise
            other = TensorTarget(views)
            try:
                other.bind(manifest)
            except ManifestMismatch as second:
                raise min(mismatch, second, key=lambda error: len(str(error))) from None
            log.info("names: the sender's are the checkpoint's, which are pieces of this model's stacked parameters")
            self._bound = list(other.destinations())


class _Views(TorchFunctionMode):
    """Within it, what would copy gives what it was given: pieces stay views."""

    _COPIES = frozenset({torch.Tensor.contiguous, torch.Tensor.clone})

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in self._COPIES:
            return args[0]
        return func(*args, **(kwargs or {}))
