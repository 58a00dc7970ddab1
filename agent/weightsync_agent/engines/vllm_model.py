"""A vLLM model as its weight loaders know it: learns where they put a checkpoint, and reloads it layer by layer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch

from ..manifest import Manifest
from . import vllm_versions as vllm
from .learned_plan import LearnedPlan, Load, learn

log = logging.getLogger("weightsync.vllm")

PLAIN_METHODS = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"})
"""Quantisation methods whose processing after loading keeps the bytes (on a GPU). Others change them, or may."""

PLAIN_EXPERTS = frozenset({"TRITON", "BATCHED_TRITON"})
"""Kernels of unquantised experts that read them as the checkpoint has them."""


class VllmModel:
    """One worker's model.

    Args:
        model: vLLM's module, with `load_weights`.
        vllm_config: the worker's VllmConfig.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        self.model = model
        self._vllm_config = vllm_config
        self._reloading = False

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every parameter and buffer under each of its names, the live tensors."""
        found: dict[str, torch.Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        found.update(self.model.named_buffers(remove_duplicate=False))
        return found

    def parameters(self) -> dict[str, torch.Tensor]:
        """Parameters, tied ones once."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def learn(self, manifest: Manifest) -> LearnedPlan:
        """Where the engine's loaders put each tensor. Nothing in the engine changes."""
        live = self.tensors()
        with vllm.current_config(self._vllm_config), self._as_loaded() as loaded:
            required = dict(self._parameters_now()).keys() - self._optional()
            load = cast(Load, self.model.load_weights)
            plan = learn(manifest, load, loaded, [name for name in loaded if name in required])
        for placement in plan.placements:
            name = placement.destination
            before, now = loaded[name], live.get(name)
            if now is None or (now.shape, now.dtype, now.stride()) != (before.shape, before.dtype, before.stride()):
                shape = "gone" if now is None else f"{_dtype(now)} {list(now.shape)} strides {list(now.stride())}"
                plan.obstacles[name] = (
                    f"{_dtype(before)} {list(before.shape)} becomes {shape} after loading ({self._method_of(name)})"
                )
        plan.obstacles.update(self._hidden_state())
        return plan

    def _parameters_now(self) -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, layer in self.model.named_modules():
            for name, parameter in layer._parameters.items():
                if parameter is not None:
                    yield f"{prefix}.{name}" if prefix else name, parameter

    def _optional(self) -> set[str]:
        """Parameters that no checkpoint has to hold: what a quantised layer's processing makes, and the key-value
        cache's scales, which have defaults.
        """
        found: set[str] = set()
        for prefix, layer in self.model.named_modules():
            method = type(getattr(layer, "quant_method", None))
            if method.__name__ in ("NoneType", *PLAIN_METHODS):
                continue
            of_cache = any("KVCacheMethod" in kind.__name__ for kind in method.__mro__)
            loaded = {"bias", *vllm.layerwise_info(layer).restore_metadata[0]}  # a bias is not in vLLM's record
            found.update(f"{prefix}.{name}" for name in layer._parameters if of_cache or name not in loaded)
        return found

    @contextlib.contextmanager
    def _as_loaded(self) -> Iterator[dict[str, torch.Tensor]]:
        """The model with its tensors as they were before they were processed after loading, as meta tensors.

        Afterwards a parameter may have lost its weight_loader or have another shape. vLLM keeps them for its own
        layerwise reload.
        """
        kept: list[tuple[torch.nn.Module, dict[str, Any], dict[str, Any]]] = []
        wrapped: list[tuple[Any, Any]] = []
        known: dict[tuple[int, int], torch.Tensor] = {}
        try:
            for _, layer in self.model.named_modules():
                kept.append((layer, dict(layer._parameters), dict(layer._buffers)))
                for group, current in zip(
                    vllm.layerwise_info(layer).restore_metadata, (layer._parameters, layer._buffers), strict=True
                ):
                    for name, meta in group.items():
                        now = current.get(name)
                        tie = (now.data_ptr(), now.numel()) if now is not None and now.numel() else None
                        if tie is not None and tie in known and known[tie].shape == meta.shape:
                            # Tied: one memory under two names stays one memory.
                            current[name] = known[tie]
                            continue
                        restored = vllm.restore_references(meta, layer)
                        loader = getattr(restored, "weight_loader", None)
                        if (plain := vllm.unwrapped(loader)) is not loader:
                            wrapped.append((restored, loader))
                            restored.weight_loader = plain
                        current[name] = restored
                        if tie is not None:
                            known[tie] = restored
            yield self.tensors()
        finally:
            for tensor, loader in wrapped:
                tensor.weight_loader = loader
            for layer, parameters, buffers in kept:
                layer._parameters.clear()
                layer._parameters.update(parameters)
                layer._buffers.clear()
                layer._buffers.update(buffers)

    def _hidden_state(self) -> dict[str, str]:
        """Layers that keep something made of their weights elsewhere, or whose processing may change the bytes."""
        found: dict[str, str] = {}
        for name, layer in self.model.named_modules():
            method = type(getattr(layer, "quant_method", None)).__name__
            if method != "NoneType" and method not in PLAIN_METHODS:
                if next(layer.parameters(recurse=False), None) is not None:
                    found[name] = f"{method} processes its weights after loading"
            elif "MLA" in type(layer).__name__ and hasattr(layer, "process_weights_after_loading"):
                found[name] = f"{type(layer).__name__} keeps matrices made of its weights"
            packed = getattr(layer, "cpu_linear", None)
            if getattr(packed, "__closure__", None):
                found[name] = "its weights are packed for this CPU, beside or instead of the parameter"
            if (layout := vllm.expert_layout(layer)) and layout not in PLAIN_EXPERTS:
                found[name] = f"its experts are kept in the layout of {layout}"
        return found

    def _method_of(self, name: str) -> str:
        layer = self.model.get_submodule(name.rpartition(".")[0])
        method = getattr(layer, "quant_method", None)
        return type(method if method is not None else layer).__name__

    # --- reload, layer by layer ---------------------------------------------------------------------------------

    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """A part of a reload; the first one begins it. vLLM keeps the tensors until their layer is complete: where
        their memory changes before, `copy_kept` has to come first.
        """
        with vllm.current_config(self._vllm_config), torch.no_grad():
            if not self._reloading:
                vllm.forget_packed_experts(self.model)
                vllm.keep_int8_scales(self.model)
                self._reloading = True  # a beginning that fails has to be undone as well
                vllm.initialize_reload(self.model)
            self.model.load_weights(named)  # type: ignore[operator]

    def copy_kept(self) -> None:
        """Copies what vLLM keeps of the tensors that it was given, those of layers that are not complete yet."""
        for layer in self.model.modules():
            vllm.copy_kept(layer)

    def finish(self) -> None:
        """Ends a reload of which every tensor was given."""
        with vllm.current_config(self._vllm_config), torch.no_grad():
            vllm.finalize_reload(self.model, self._vllm_config.model_config)
            self._refresh_tied_copies()
        self._reloading = False

    def abandon(self) -> None:
        """After a broken-off reload: the model can run, though on mixed weights. Nothing where none is under way."""
        if self._reloading:
            self._reloading = False
            placed = vllm.abandon_reload(self.model)
            log.warning("a reload broke off: %d layers have their old weights again, the others the new ones", placed)

    def _refresh_tied_copies(self) -> None:
        """A tied head on the CPU keeps a packed copy of the embedding, which vLLM's reload leaves as it was."""
        heads: Mapping[str, torch.nn.Module] = dict(self.model.named_modules())
        seen: dict[int, torch.nn.Module] = {}
        for layer in heads.values():
            weight = layer._parameters.get("weight")
            if weight is None or not weight.numel():
                continue
            first = seen.setdefault(weight.data_ptr(), layer)
            if first is not layer and getattr(getattr(layer, "cpu_linear", None), "__closure__", None):
                layer.quant_method.process_weights_after_loading(layer)  # type: ignore[union-attr, operator]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
