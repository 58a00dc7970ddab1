"""Which vLLM this is, and everything that differs between its versions. Everything else here asks this module.

Read in the sources of 0.26.0 and 0.32.0 and run with both.
"""

from __future__ import annotations

import functools
import logging
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from importlib import import_module
from typing import Any

import torch

from ..errors import ConfigError

log = logging.getLogger("weightsync.vllm")

TESTED = ("0.26.0", "0.32.0")
"""The oldest and the newest version that the tests ran with."""

_RELOAD = "vllm.model_executor.model_loader.reload"
_LAYERWISE = f"{_RELOAD}.layerwise"


def version() -> str:
    """vLLM's version, without what a build appends to it."""
    return str(import_module("vllm").__version__).split("+")[0]


def _numbers(text: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in text.split(".")[:3]:
        digits = "".join(c for c in part if c.isdigit())
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def in_tested_range(text: str) -> bool:
    return _numbers(TESTED[0]) <= _numbers(text) <= _numbers(TESTED[1])


@functools.cache
def warn_once() -> None:
    """Says it where this vLLM is older or newer than the tests' ones."""
    here = version()
    if not in_tested_range(here):
        log.warning(
            "vLLM %s is outside the range that this was tested with (%s to %s): updates are proven by bytes at the "
            "first step as always, but look at vLLM's release notes if one is refused",
            here, *TESTED,
        )  # fmt: skip


def hook(module: str, name: str) -> Any:
    """Something of vLLM's that is needed. Raises ConfigError that names it where this vLLM has none."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"this vLLM ({version()}) has no {module}.{name}, which weight updates need; "
            f"use a version from {TESTED[0]} to {TESTED[1]} ({error})"
        ) from None


def initialize_reload(model: Any) -> None:
    """Replaces every parameter by a meta tensor until its layer is loaded. From here on the model can't run."""
    hook(_RELOAD, "initialize_layerwise_reload")(model)


def finalize_reload(model: Any, model_config: Any) -> None:
    """Processes what is left, and puts the parameters back."""
    hook(_RELOAD, "finalize_layerwise_reload")(model, model_config)


def layerwise_info(layer: Any) -> Any:
    """What vLLM remembers of a layer: `restore_metadata`, `kernel_tensors`, `can_load()`, `reset()`."""
    return hook(_LAYERWISE, "get_layerwise_info")(layer)


def copy_kept(layer: Any) -> None:
    """The tensors that a reload keeps until their layer is complete become copies, each once."""
    for _, call in layerwise_info(layer).loaded_weights:
        for name, value in call.arguments.items():
            call.arguments[name] = _copied(value)


def _copied(value: Any) -> Any:
    """An argument of a weight loader, with a copy of a tensor of the checkpoint's. Its own parameters stay."""
    if isinstance(value, list | tuple):
        return type(value)(_copied(part) for part in value)
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter) or value.is_meta:
        return value
    if not getattr(value, "_weightsync_copy", False):
        value = value.clone()
        value._weightsync_copy = True
    return value


def abandon_reload(model: Any) -> int:
    """Puts the old tensors back into every layer that a broken-off reload left without. Gives how many.

    vLLM has no call for it. The model can run again afterwards, on a mixture of old and new weights.
    """
    place = hook(_LAYERWISE, "_place_kernel_tensors")
    placed = 0
    for layer in model.modules():
        info = layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            place(layer, info)
            placed += 1
        info.reset()
    hook(_LAYERWISE, "LOADING_LAYERS").clear()
    return placed


def restore_references(tensor: Any, layer: Any) -> Any:
    """The loader of a remembered tensor is bound to its layer again."""
    return hook(f"{_RELOAD}.sanitize", "restore_layer_refs")(tensor, layer)


def unwrapped(loader: Any) -> Any:
    """A loader without the wrapper that a layerwise reload leaves on it, which then does nothing, in silence."""
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__
    return loader


def expert_layout(layer: Any) -> str:
    """The kernel whose layout a layer's experts are kept in, such as TRITON; empty: it has no experts."""
    backend = getattr(getattr(layer, "quant_method", None), "unquantized_backend", None)
    return str(getattr(backend, "name", backend or ""))


def forget_packed_experts(model: Any) -> None:
    """Before a reload on the CPU: experts are then packed anew, as at the first load.

    vLLM 0.32 packs them once and leaves later weights unpacked under a kernel that expects packed ones.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and expert_layout(layer) == "CPU" and hasattr(method, "moe_kernel"):
            method.moe_kernel = None


def keep_int8_scales(model: Any) -> None:
    """Before a reload on the CPU: the scales that a kernel of 8-bit layers is made with live as long as it does.

    oneDNN's kernel knows its scales by their address. vLLM 0.32 copies reloaded ones into the layer's parameter and
    lets go of those that the new kernel was made with: its own reload then gives NaN.
    """
    for layer in model.modules():
        kernel: Any = getattr(getattr(layer, "scheme", None), "kernel", None)
        if not hasattr(kernel, "dnnl_handler") or hasattr(kernel, "_weightsync_scales"):
            continue
        process = kernel.process_weights_after_loading

        def kept(layer: Any, kernel: Any = kernel, process: Any = process) -> None:
            process(layer)
            kernel._weightsync_scales = layer.weight_scale.data

        kernel._weightsync_scales = None
        kernel.process_weights_after_loading = kept


def current_config(vllm_config: Any) -> Any:
    """The context in which vLLM's loaders find their configuration."""
    return hook("vllm.config", "set_current_vllm_config")(vllm_config)


def core_class() -> Any:
    """The engine core, on which a step's surroundings hang: pause_scheduler, resume_scheduler, collective_rpc."""
    core = hook("vllm.v1.engine.core", "EngineCore")
    for name in ("collective_rpc", "pause_scheduler", "resume_scheduler", "is_scheduler_paused"):
        if not callable(getattr(core, name, None)):
            raise ConfigError(
                f"this vLLM ({version()}) has no EngineCore.{name}: use a version from {TESTED[0]} to {TESTED[1]}"
            )
    return core


def send_call(llm: Any, method: str, args: tuple[Any, ...]) -> Future[Any] | None:
    """`LLM.collective_rpc` without waiting for its answer, which vLLM's own thread puts into the Future.

    None: this is no `LLM` whose core is another process, or this vLLM sends its calls in another way.
    """
    client = getattr(getattr(llm, "llm_engine", None), "engine_core", None)
    module = sys.modules.get("vllm.v1.engine.core_client")
    kind = getattr(module, "SyncMPClient", None)
    request = getattr(getattr(module, "EngineCoreRequestType", None), "UTILITY", None)
    if kind is None or request is None or type(client) is not kind:
        return None
    results, send = getattr(client, "utility_results", None), getattr(client, "_send_input", None)
    if not isinstance(results, dict) or not callable(send):
        return None
    number = uuid.uuid1().int >> 64
    answer = results[number] = Future()
    try:
        send(request, (0, number, "collective_rpc", (method, None, args, None)))
    except BaseException:
        del results[number]
        raise
    return answer


def one_core(llm: Any) -> bool:
    """Whether a single engine core of this machine answers the calls of an `LLM`."""
    client = getattr(getattr(llm, "llm_engine", None), "engine_core", None)
    cores = getattr(client, "core_engines", None)
    return isinstance(cores, list) and len(cores) == 1 and getattr(client, "is_dp", None) is False


def set_label(core: Any, label: str) -> bool:
    """The weight version that the engine reports. False: this vLLM (before 0.27) has none."""
    setter: Callable[[str], object] | None = getattr(core, "set_weight_version", None)
    if setter is None:
        return False
    setter(label)
    return True


def forget_adapters(worker: Any) -> None:
    """LoRA adapters that were merged or cached over the old weights. Nothing where this vLLM keeps none."""
    reset = getattr(getattr(worker, "model_runner", None), "reset_lora_state", None)
    if callable(reset):
        reset()
