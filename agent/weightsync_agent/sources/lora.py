"""LoRA adapters of peft: merged on the way, with the base untouched; or the adapters alone.

https://arxiv.org/abs/2106.09685: the model that is trained is W + s B A. Engines want that sum under the base's names;
it is made a tensor at a time when it is sent, as peft's own `merge` computes it, and never in the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError
from ..targets import named_tensors
from .computed import Computed

if TYPE_CHECKING:
    from peft.tuners.lora.layer import LoraLayer

MERGED = "modules_to_save"
"""peft's name for modules that are trained whole beside the adapters."""


def has_adapters(model: torch.nn.Module) -> bool:
    """Whether peft has put adapters into the model. Does not import peft."""
    if "peft" not in sys.modules:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


def merged(model: torch.nn.Module) -> dict[str, torch.Tensor | Computed]:
    """The model that a peft model stands for, under the base's names: for `Sender(source=...)`.

    Which adapters are active, and whether they are merged or disabled, is looked at in each step. Values are those of
    peft's `merge_and_unload(safe_merge=True)`, DoRA and other variants included. Raises ConfigError, naming the layer,
    where peft has adapted it otherwise than by LoRA, or where the base is quantised.
    """
    made = _merges(model)
    adapted = _adapter_prefixes(model)
    found: dict[str, torch.Tensor | Computed] = {}
    for name, tensor in named_tensors(model).items():
        if not isinstance(tensor, torch.Tensor) or name.startswith(adapted):
            continue
        kept = _trained_whole(model, name)
        if kept is not None:
            value = made.get(id(tensor))
            found[kept] = tensor if value is None else Computed(tensor, value)
    return found


def adapters(model: torch.nn.Module, adapter: str = "default") -> dict[str, torch.Tensor]:
    """The tensors of one adapter, live, named as in peft's adapter_model.safetensors.

    For `Sender(source=...)` in the trainer and `Receiver(target=...)` in an engine that holds the same base with an
    adapter of the same shape. Raises ConfigError where the model has no such adapter.
    """
    prefixes = _adapter_prefixes(model)
    found = {}
    for name, tensor in named_tensors(model).items():
        parts = name.split(".")
        if adapter in parts and (name.startswith(prefixes) or f".{MERGED}.{adapter}." in name):
            parts.remove(adapter)
            found[".".join(part for part in parts if part != MERGED)] = tensor
    if not found:
        raise ConfigError(f"the model has no LoRA adapter called {adapter!r}: get_peft_model(model, LoraConfig(...))")
    return found


def _merges(model: torch.nn.Module) -> dict[int, Callable[[], torch.Tensor]]:
    """By the identity of a base parameter: makes its merged value."""
    from peft.tuners.lora.layer import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    made: dict[int, Callable[[], torch.Tensor]] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        if not isinstance(layer, LoraLayer):
            raise ConfigError(
                f"{name} is adapted by peft's {type(layer).__name__}: only LoRA can be merged on the way; merge it "
                "yourself (merge_adapter) before each step, or send the adapter's own tensors"
            )
        base = layer.get_base_layer()
        weight = getattr(base, getattr(layer, "parameter_name", "weight"))
        if not weight.is_floating_point():
            raise ConfigError(
                f"{name}'s base is quantised ({type(weight).__name__}, {weight.dtype}), so LoRA can't be merged into "
                "what is sent: send the adapters alone (weightsync_agent.sources.lora.adapters), or load the base "
                "unquantised"
            )
        made[id(weight)] = partial(_merged_weight, layer, weight)
        if any(getattr(layer, "lora_bias", {}).values()) and getattr(base, "bias", None) is not None:
            made[id(base.bias)] = partial(_merged_bias, layer, base.bias)
    return made


def _merged_weight(layer: LoraLayer, weight: torch.Tensor) -> torch.Tensor:
    """What `LoraLayer.merge(safe_merge=True)` would write into the base, in a tensor of its own."""
    active = _active(layer)
    if not active:
        return weight
    result = weight.detach().clone()
    for adapter in active:
        variant = layer.lora_variant.get(adapter)
        if variant is None:
            result += layer.get_delta_weight(adapter).to(weight.dtype)
        else:
            result = variant.merge_safe(layer, adapter, result)
    return result


def _merged_bias(layer: LoraLayer, bias: torch.Tensor) -> torch.Tensor:
    result = bias.detach().clone()
    for adapter in _active(layer):
        if layer.lora_bias[adapter]:
            result += (layer.lora_B[adapter].bias * layer.scaling[adapter]).to(bias.dtype)
    return result


def _active(layer: Any) -> list[str]:
    """Adapters that the base does not hold yet."""
    if layer.merged or layer.disable_adapters:
        return []
    return [a for a in layer.active_adapters if a in layer.lora_A or a in layer.lora_embedding_A]


def _adapter_prefixes(model: torch.nn.Module) -> tuple[str, ...]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return tuple(
        f"{path}.{kind}." if path else f"{kind}."
        for path, layer in model.named_modules()
        if isinstance(layer, BaseTunerLayer)
        for kind in _kinds(layer)
    )


def _kinds(layer: Any) -> Iterable[str]:
    names: tuple[str, ...] = layer.adapter_layer_names
    return names


def _trained_whole(model: torch.nn.Module, name: str) -> str | None:
    """The base's name for a tensor of a module that is trained whole; None for what stays behind; else the name."""
    from peft.utils.other import ModulesToSaveWrapper

    parts = name.split(".")
    module: torch.nn.Module = model
    for place, part in enumerate(parts[:-1]):
        if isinstance(module, ModulesToSaveWrapper):
            active = None if module.disable_adapters else next(iter(module.active_adapters), None)
            if part == "original_module" and active is None:
                return ".".join(parts[:place] + parts[place + 1 :])
            if part == MERGED and parts[place + 1] == active:
                return ".".join(parts[:place] + parts[place + 2 :])
            return None
        module = module.get_submodule(part)
    return name
