"""What a user passes to `Sender` becomes a Gatherer: an nn.Module, a dict, or an iterator of (name, tensor).

A module with LoRA adapters (peft) is sent as the model that it stands for, merged on the way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import ConfigError
from ..manifest import Manifest, TensorEntry, describe
from ..names import NameRules, renamed
from ..targets import named_tensors
from . import lora
from .computed import Computed
from .gatherer import ConvertingGatherer, Gatherer
from .lookup import Found, Lookup
from .sharded import EachRankGatherer, ShardedGatherer

Weights = torch.nn.Module | Mapping[str, torch.Tensor | Computed] | Iterable[tuple[str, torch.Tensor | Computed]]

CONVERTED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""What `dtype=` converts. Integers are no weights of that kind, and float8 has scales that belong to its bits."""

log = logging.getLogger("weightsync.sender")


def gatherer_for(
    source: Weights, dtype: torch.dtype | None = None, names: NameRules = (), *, each_rank: bool = False
) -> Gatherer:
    """The Gatherer of a trainer's weights.

    `dtype`: floating-point tensors (float16 to float64) are sent converted to it. `names`: rules that rename what
    wrappers left. `each_rank`: every rank that shares the weights sends. Raises ConfigError, naming the tensor, for
    anything that can't be sent: no tensor, no memory (meta), sparse, quantised, a name twice.
    """
    held = _named(source)
    how = renamed(held.names, names)
    kept = [index for index, name in enumerate(how.names) if name is not None]
    sent = replace(held.only(kept), names=[name for name in how.names if name is not None])
    sharded = any(isinstance(tensor, DTensor) for tensor in sent.tensors)
    converted = any(dtype not in (None, tensor.dtype) and tensor.dtype in CONVERTED for tensor in sent.tensors)
    try:
        manifest = _describe(sent.names, sent.tensors, dtype)
    except ValueError as error:
        raise ConfigError(f"the weights can't be sent: {error}") from None
    kind: type[Gatherer] = ConvertingGatherer if converted or sent.values else Gatherer
    if sharded:
        kind = EachRankGatherer if each_rank else ShardedGatherer
    gatherer = kind(sent, manifest)
    gatherer.lookup = Lookup(source, _named, held, kept)
    gatherer.renaming, gatherer.dropped = how.said, len(held.names) - len(kept)
    if how.said and gatherer.leads:
        log.info("names: %s", how.said)
    return gatherer


def _named(source: Weights) -> Found:
    items: Iterable[tuple[str, torch.Tensor | Computed]]
    if isinstance(source, torch.nn.Module):
        # `extra_state` of some modules is no tensor; it is no weight either.
        whole = lora.merged(source) if lora.has_adapters(source) else named_tensors(source)
        items = [(k, v) for k, v in whole.items() if isinstance(v, torch.Tensor | Computed)]
    else:
        items = source.items() if isinstance(source, Mapping) else source
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    values: dict[int, Callable[[], torch.Tensor]] = {}
    for name, given in items:
        tensor = given.base if isinstance(given, Computed) else given
        if isinstance(given, Computed):
            values[len(names)] = given.value
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ConfigError(
                f"the weights are (name, tensor) pairs, and {name!r} comes with a {type(tensor).__name__}"
            )
        if not isinstance(tensor, DTensor) and is_traceable_wrapper_subclass(tensor):
            raise ConfigError(
                f"{name} is a {type(tensor).__name__}, which has no bytes of its own: send the tensors it is made of"
            )
        names.append(name)
        tensors.append(tensor)
        if hasattr(tensor, "ds_id") and tensor.numel() == 0:
            raise ConfigError(
                f"{name} is partitioned by DeepSpeed's ZeRO-3, so no rank has it: use ZeRO-2, or FSDP2, whose shards "
                "are gathered bucket by bucket"
            )
    return Found(names, tensors, values)


def _describe(names: list[str], tensors: list[torch.Tensor], dtype: torch.dtype | None) -> Manifest:
    """The manifest of what is sent: global shapes, converted dtypes; ties by memory, or by object where sharded."""
    locals_ = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    # Ties and what can't be sent are judged on local memory; an empty shard is no tie, hence the objects' identity.
    ties = describe(zip(names, locals_, strict=True))
    if dtype is None and not any(isinstance(tensor, DTensor) for tensor in tensors):
        return ties
    first: dict[int, int] = {}
    entries: list[TensorEntry] = []
    for index, (entry, tensor) in enumerate(zip(ties.tensors, tensors, strict=True)):
        alias = entry.alias
        if isinstance(tensor, DTensor):
            earlier = first.setdefault(id(tensor), index)
            alias = earlier if earlier != index else None
        sent = dtype if dtype is not None and tensor.dtype in CONVERTED else tensor.dtype
        entries.append(
            TensorEntry(name=entry.name, dtype=str(sent).removeprefix("torch."), shape=tuple(tensor.shape), alias=alias)
        )
    return Manifest(tensors=tuple(entries))
