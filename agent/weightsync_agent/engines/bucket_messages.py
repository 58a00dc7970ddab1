"""The messages of verl's and checkpoint-engine's wire: what is written, and what is read out of a peer's objects.

verl 0.9.1 (workers/rollout/vllm_rollout/bucketed_weight_transfer.py): `{"name", "size"}` or a handle, then
`{"bucket_meta": {name: {name, shape, dtype, offset, handle}}, "is_last"}`. checkpoint-engine 0.4.2 (worker.py): a
handle, then lists of `{name, dtype, shape, offset}`, then None twice. A handle is `(function, arguments)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from ..manifest import TensorEntry
from ..protocol import TorchHandle
from .object_wire import Marker, PeerError, WireRefused, dumps, loads
from .shared_file import open_shared_file

MAX_BYTES = 1 << 46


class FileHandle(BaseModel):
    """Host memory under a name: verl's first message, and checkpoint-engine's handle on the CPU."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(max_length=200)
    nbytes: int = Field(gt=0, le=MAX_BYTES)


class CudaHandle(BaseModel):
    """CUDA memory: the arguments of torch's `rebuild_cuda_tensor` (torch/multiprocessing/reductions.py)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    shape: tuple[int, ...] = Field(max_length=16)
    stride: tuple[int, ...] = Field(max_length=16)
    offset: int = Field(ge=0, le=MAX_BYTES, description="In elements, from the storage's start.")
    dtype: str
    handle: TorchHandle
    """Its `gpu` is empty: the wire has only the peer's index of it, which means nothing here."""


Handle = FileHandle | CudaHandle


@dataclass(frozen=True, slots=True)
class Placed:
    """One tensor of a bucket."""

    entry: TensorEntry
    offset: int
    """First byte in the buffer."""
    handle: CudaHandle | None = None
    """verl's tensors beyond the bucket lie in memory of their own."""


# --- written ------------------------------------------------------------------------------------------------------


def write_verl_start(handle: FileHandle) -> bytes:
    return dumps({"name": handle.name, "size": handle.nbytes})


def write_handle(handle: Handle) -> bytes:
    """`(function, arguments)`; the peer puts its own device's index in the seventh place of the arguments."""
    if isinstance(handle, FileHandle):
        return dumps((open_shared_file, (handle.name, handle.nbytes, None, None, None, None, None)))
    lent = handle.handle
    arguments = (
        torch.Tensor,
        torch.Size(handle.shape),
        handle.stride,
        handle.offset,
        torch.UntypedStorage,
        getattr(torch, handle.dtype),
        0,
        lent.handle,
        lent.storage_bytes,
        lent.storage_offset_bytes,
        False,
        lent.counter_name.encode(),
        lent.counter_slot,
        lent.event,
        lent.event_sync_required,
    )
    return dumps((rebuild_cuda_tensor, arguments))


def write_verl_bucket(placed: Sequence[Placed], start: int, is_last: bool) -> bytes:
    """`start`: the first byte of the bucket in the buffer; verl, whose buckets all start at 0, does not look at it."""
    metas = {p.entry.name: {**_plain(p), "handle": None} for p in placed}
    return dumps({"bucket_meta": metas, "is_last": is_last, "start": start})


def write_verl_end() -> bytes:
    """No bucket at all: verl's receiver raises KeyError at it, where it would wait for the next bucket without end."""
    return dumps({"weightsync": "the sender broke this step off"})


def write_bucket(placed: Sequence[Placed]) -> bytes:
    return dumps([_plain(p) for p in placed])


def write_none() -> bytes:
    return dumps(None)


def write_error(text: str) -> bytes:
    return dumps(RuntimeError(text))


def _plain(placed: Placed) -> dict[str, object]:
    entry = placed.entry
    return {
        "name": entry.name,
        "shape": torch.Size(entry.shape),
        "dtype": entry.torch_dtype,
        "offset": placed.offset,
    }


# --- read ---------------------------------------------------------------------------------------------------------


def read_verl_start(message: bytes) -> Handle:
    """Raises WireRefused."""
    value = loads(message, "verl's sender")
    if isinstance(value, dict):
        return _file(value.get("name"), value.get("size"), "verl's sender")
    return _handle(value, "verl's sender")


def read_verl_bucket(message: bytes) -> tuple[list[Placed], int, bool]:
    """The bucket's tensors, its first byte in the buffer, and whether it is the last. Raises WireRefused."""
    value = loads(message, "verl's sender")
    if not isinstance(value, dict) or not isinstance(value.get("bucket_meta"), dict):
        raise WireRefused("verl's sender sent no bucket: it is another version than the tested one, or broke off")
    metas = value["bucket_meta"]
    placed = [_placed(meta, "verl's sender") for meta in metas.values()]
    if [p.entry.name for p in placed] != list(metas):
        raise WireRefused("verl's sender calls a tensor by two names in one bucket")
    start = value.get("start", 0)
    if type(start) is not int or not 0 <= start <= MAX_BYTES:
        raise WireRefused(f"verl's sender starts a bucket at byte {start!r}"[:200])
    return placed, start, value.get("is_last") is True


def read_handle(message: bytes, peer: str) -> Handle:
    """Raises WireRefused."""
    return _handle(loads(message, peer), peer)


def read_payload(message: bytes, peer: str) -> list[Placed] | PeerError | None:
    """checkpoint-engine's messages after the handle. Raises WireRefused."""
    value = loads(message, peer)
    if value is None or isinstance(value, PeerError):
        return value
    if not isinstance(value, list):
        raise WireRefused(f"{peer} sent a {type(value).__name__} where a bucket is a list")
    return [_placed(meta, peer) for meta in value]


def _placed(meta: object, peer: str) -> Placed:
    if not isinstance(meta, dict):
        raise WireRefused(f"{peer} sent a {type(meta).__name__} where a tensor's description is a dict")
    dtype, shape, offset = meta.get("dtype"), meta.get("shape"), meta.get("offset")
    if not isinstance(dtype, torch.dtype) or not isinstance(shape, tuple | list) or type(offset) is not int:
        raise WireRefused(
            f"{peer} describes a tensor by {sorted(map(str, meta))[:8]}: dtype, shape and offset are needed"
        )
    if not 0 <= offset <= MAX_BYTES:
        raise WireRefused(f"{peer} places a tensor at byte {offset}")
    try:
        entry = TensorEntry(
            name=cast(str, meta.get("name")),
            dtype=str(dtype).removeprefix("torch."),
            shape=tuple(cast(Iterable[int], shape)),
        )
    except ValidationError as error:
        raise _refused(error, peer) from None
    handle = meta.get("handle")
    if handle is None:
        return Placed(entry, offset)
    lent = _handle(handle, peer)
    if not isinstance(lent, CudaHandle) or (lent.shape, lent.dtype) != (entry.shape, entry.dtype):
        raise WireRefused(f"{peer}'s handle of {entry.name} is not one of a CUDA tensor of that shape and dtype")
    return Placed(entry, offset, lent)


def _handle(value: object, peer: str) -> Handle:
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[1], tuple):
        raise WireRefused(f"{peer} sent a {type(value).__name__} where a handle is (function, arguments)")
    function, arguments = value
    if function is Marker.SHARED_FILE and len(arguments) >= 2:
        return _file(arguments[0], arguments[1], peer)
    if function is not Marker.CUDA_TENSOR or len(arguments) != 15:
        raise WireRefused(
            f"{peer}'s handle calls {function} with {len(arguments)} arguments, and what is known is "
            "rebuild_cuda_tensor with 15"
        )
    return _cuda(arguments, peer)


def _file(name: object, nbytes: object, peer: str) -> FileHandle:
    try:
        return FileHandle.model_validate({"name": name, "nbytes": nbytes})
    except ValidationError as error:
        raise _refused(error, peer) from None


def _cuda(arguments: tuple[object, ...], peer: str) -> CudaHandle:
    shape, stride, offset, dtype = arguments[1], arguments[2], arguments[3], arguments[5]
    counter = arguments[11]
    if not isinstance(dtype, torch.dtype) or not isinstance(shape, tuple) or not isinstance(counter, bytes):
        raise WireRefused(f"{peer}'s CUDA handle has other arguments than torch's rebuild_cuda_tensor takes")
    try:
        return CudaHandle.model_validate(
            {
                "shape": tuple(shape),
                "stride": stride,
                "offset": offset,
                "dtype": str(dtype).removeprefix("torch."),
                "handle": TorchHandle.model_validate(
                    {
                        "gpu": "",
                        "handle": arguments[7],
                        "storage_bytes": arguments[8],
                        "storage_offset_bytes": arguments[9],
                        "counter_name": counter.decode("ascii", "replace"),
                        "counter_slot": arguments[12],
                        "event": arguments[13],
                        "event_sync_required": arguments[14],
                    }
                ),
            }
        )
    except ValidationError as error:
        raise _refused(error, peer) from None


def _refused(error: ValidationError, peer: str) -> WireRefused:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "a tensor"
    return WireRefused(f"{peer} sent what can't be: {where}: {first['msg']}")
