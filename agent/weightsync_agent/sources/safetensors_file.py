"""One safetensors file: its header is judged before anything in it is believed, its tensors are read into memory.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian N, N bytes of JSON, then the tensors'
bytes without holes. The header is parsed here, and not by the safetensors package, because a file that is still being
written must be told from a broken one, with a sentence that says what is wrong. The bytes are read by preadv straight
into their destination: one copy, and a file that is cut short under a reader is an error here, where a mapping would be
a SIGBUS.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ..copy_plan import byte_view, is_plain
from ..errors import SourceError

MAX_HEADER_BYTES = 100_000_000
"""As the safetensors package bounds it."""

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}
"""Safetensors' dtype -> torch's name."""

CLOCK_SECONDS = 0.05
"""File systems stamp by a clock that ticks every 1 to 10 ms (CONFIG_HZ): two writes within a tick look like one."""
COARSE_CLOCK_SECONDS = 2.0
"""Where stamps are whole seconds."""

_READ_BYTES = 1 << 30
_STAGING_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What changes when a file is written anew. mtime alone has a coarse clock; a rename brings another inode."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file."""

    name: str
    dtype: str
    """torch's name."""
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A whole safetensors file, as it was when its header was read."""

    path: Path
    identity: FileIdentity
    tensors: Mapping[str, StoredTensor]
    """By name, in the order of their bytes."""


class IncompleteError(SourceError):
    """Not whole yet: it may be once its writer is done."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    dtype: str
    shape: list[int] = Field(max_length=16)
    data_offsets: tuple[int, int] = Field(strict=False)


_HEADER: TypeAdapter[dict[str, _Entry]] = TypeAdapter(dict[str, _Entry])


def read_shard(path: Path) -> Shard:
    """Opens a file and validates its header against its size. Reads no tensor.

    Raises IncompleteError where the file is shorter than it says (still being written, or cut short), SourceError
    where it is missing, a directory, or no safetensors at all.
    """
    with _open(path) as file:
        status = os.fstat(file.fileno())
        size = status.st_size
        if size < 8:
            raise IncompleteError(f"{path} is truncated: a safetensors file starts with 8 bytes, and it has {size}")
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise SourceError(f"{path} is no safetensors file: its header would have {length} bytes")
        if size < 8 + length:
            raise IncompleteError(f"{path} is truncated: expected {8 + length} bytes for its header alone, has {size}")
        tensors, data = _parse(path, file.read(length), 8 + length)
        if size < 8 + length + data:
            raise IncompleteError(f"{path} is truncated: expected {8 + length + data} bytes, has {size}")
        if size > 8 + length + data:
            raise SourceError(f"{path} is corrupt: expected {8 + length + data} bytes by its header, has {size}")
        return Shard(path, FileIdentity.of(status), tensors)


def read_tensors(shard: Shard, destinations: Mapping[str, torch.Tensor]) -> None:
    """Reads tensors of a shard into `destinations` (equal shape and dtype; any device).

    Raises SourceError where the file is not the one that was validated any more, before or after reading.
    """
    fresh = _fresh_for(shard.identity)
    if fresh > 0:
        time.sleep(fresh)
        _judge_again(shard)
    with _open(shard.path) as file:
        fd = file.fileno()
        _unchanged(shard, fd)
        staging: torch.Tensor | None = None
        for name, stored in shard.tensors.items():
            target = destinations.get(name)
            if target is None or not stored.nbytes:
                continue
            if target.device.type == "cpu" and is_plain(target):
                _read(shard.path, fd, stored.start, byte_view(target))
                continue
            if target.device.type == "cpu":
                whole = torch.empty(target.shape, dtype=target.dtype)
                _read(shard.path, fd, stored.start, byte_view(whole))
                with torch.no_grad():
                    target.copy_(whole)
                continue
            if staging is None:
                staging = torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
            _read_to_device(shard.path, fd, stored.start, byte_view(target), staging)
        _unchanged(shard, fd)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[io.FileIO]:
    """A regular file for reading. Never waits: opening a pipe that nobody writes to would."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise SourceError(f"{path} doesn't exist") from None
    except OSError as error:
        raise SourceError(f"{path} can't be read: {error.strerror}") from None
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise SourceError(f"{path} is a directory, and a safetensors file should be there")
        if not stat.S_ISREG(mode):
            raise SourceError(f"{path} is no regular file")
        with io.FileIO(fd, closefd=False) as file:
            yield file
    finally:
        os.close(fd)


def _judge_again(shard: Shard) -> None:
    try:
        found: Shard | None = read_shard(shard.path)
    except SourceError:
        found = None
    if found != shard:
        raise IncompleteError(f"{shard.path} was changed while it was being read")


def _fresh_for(identity: FileIdentity) -> float:
    """Seconds until a write to the file would show in its stamp; 0 for a stamp of the future, which can't tell."""
    clock = CLOCK_SECONDS if identity.mtime_ns % 1_000_000_000 else COARSE_CLOCK_SECONDS
    age = (time.time_ns() - identity.mtime_ns) / 1e9
    return clock - age if 0 <= age < clock else 0.0


def _unchanged(shard: Shard, fd: int) -> None:
    if FileIdentity.of(os.fstat(fd)) != shard.identity:
        raise IncompleteError(f"{shard.path} was changed while it was being read")


def _read(path: Path, fd: int, start: int, target: torch.Tensor) -> None:
    view = target.numpy().data
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done : done + _READ_BYTES]], start + done)
        except OSError as error:
            raise SourceError(f"{path} can't be read at byte {start + done}: {error.strerror}") from None
        if count == 0:
            raise IncompleteError(f"{path} was cut short while it was being read, at byte {start + done}")
        done += count


def _read_to_device(path: Path, fd: int, start: int, target: torch.Tensor, staging: torch.Tensor) -> None:
    for done in range(0, target.numel(), staging.numel()):
        size = min(staging.numel(), target.numel() - done)
        _read(path, fd, start + done, staging[:size])
        target[done : done + size].copy_(staging[:size])


def _parse(path: Path, text: bytes, origin: int) -> tuple[dict[str, StoredTensor], int]:
    """Tensors by name in the order of their bytes, and the bytes of all of them."""
    try:
        pairs = json.loads(text, object_pairs_hook=_no_duplicates)
        if not isinstance(pairs, dict):
            raise ValueError("it is no JSON object")
        pairs.pop("__metadata__", None)
        entries = _HEADER.validate_python(pairs)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:200]
        raise SourceError(f"{path} is corrupt: its header is wrong at {where}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is corrupt: its header can't be parsed: {str(error)[:200]}") from None
    found: dict[str, StoredTensor] = {}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        first_byte, last_byte = entry.data_offsets
        dtype = DTYPES.get(entry.dtype)
        if dtype is None or not hasattr(torch, dtype):
            raise SourceError(f"{path}: tensor {name[:200]!r} has the dtype {entry.dtype[:40]!r}, which is not known")
        if any(size < 0 for size in entry.shape):
            raise SourceError(f"{path} is corrupt: tensor {name[:200]!r} has a negative size in {entry.shape}")
        count = cast(torch.dtype, getattr(torch, dtype)).itemsize
        for size in entry.shape:
            count *= size
        if first_byte != end or last_byte - first_byte != count:
            raise SourceError(
                f"{path} is corrupt: tensor {name[:200]!r} should take bytes {end} to {end + count} of the data, "
                f"and its header says {first_byte} to {last_byte}"
            )
        end = last_byte
        found[name] = StoredTensor(name, dtype, tuple(entry.shape), origin + first_byte, count)
    return found, end


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found
