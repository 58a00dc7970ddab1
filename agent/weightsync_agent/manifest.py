"""The manifest: which tensors a step carries, in which order; and the layout derived from it.

Both sides derive the same `Layout` from the same `Manifest`, so that a step's messages name buckets, never tensors.
Every tensor starts at a multiple of 256 bytes. One that fits into a bucket lies whole in one; a larger one is split.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator

ALIGNMENT = 256
"""Bytes. A multiple of every dtype's size and of a GPU's widest access; an odd-size tensor never misaligns the next."""

MAX_TENSORS = 1_000_000
MAX_RANK = 16

DTYPES = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}"
}
"""By torch's name, without `torch.`."""


def align(size: int) -> int:
    """`size` rounded up to a multiple of ALIGNMENT, in bytes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class TensorEntry(BaseModel):
    """One named tensor. A model has tens of thousands, so all that is checked here is checked without Python code."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=1024)
    dtype: str = Field(pattern=f"^({'|'.join(DTYPES)})$", description="torch's name, without `torch.`")
    shape: tuple[NonNegativeInt, ...] = Field(max_length=MAX_RANK)
    alias: int | None = Field(
        default=None, ge=0, description="Index of the earlier entry that is the very same memory (tied weights)."
    )

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @cached_property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


class Manifest(BaseModel):
    """The ordered tensors of a step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensors: tuple[TensorEntry, ...] = Field(max_length=MAX_TENSORS)

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        seen: dict[str, int] = {}
        for index, entry in enumerate(self.tensors):
            if entry.name in seen:
                raise ValueError(f"two tensors are named {entry.name!r}")
            seen[entry.name] = index
            if entry.alias is not None:
                if entry.alias >= index:
                    raise ValueError(f"tensor {entry.name!r} is an alias of a later tensor")
                first = self.tensors[entry.alias]
                if first.alias is not None or (first.dtype, first.shape) != (entry.dtype, entry.shape):
                    raise ValueError(f"tensor {entry.name!r} is an alias of {first.name!r}, which differs from it")
        return self

    @cached_property
    def hash(self) -> str:
        """SHA-256 over names, dtypes, shapes and aliases in order, hexadecimal."""
        digest = hashlib.sha256()
        for entry in self.tensors:
            digest.update(f"{entry.name}\0{entry.dtype}\0{entry.shape}\0{entry.alias}\n".encode())
        return digest.hexdigest()

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all distinct tensors, without padding: what a receiver gets in a step."""
        return sum(entry.nbytes for entry in self.tensors if entry.alias is None)

    @cached_property
    def arena_offsets(self) -> tuple[int, ...]:
        """Offset in bytes of each tensor in one arena that holds them all in order; an alias has its first's."""
        offsets: list[int] = []
        end = 0
        for entry in self.tensors:
            if entry.alias is not None:
                offsets.append(offsets[entry.alias])
            else:
                offsets.append(end)
                end = align(end + entry.nbytes)
        return tuple(offsets)

    @cached_property
    def arena_bytes(self) -> int:
        """Bytes of that arena, at least ALIGNMENT."""
        ends = [o + e.nbytes for o, e in zip(self.arena_offsets, self.tensors, strict=True)]
        return max(align(max(ends, default=0)), ALIGNMENT)


def identity_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """What makes two tensors the same memory: storage, offset, shape, strides and dtype."""
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
        str(tensor.device),
    )


def describe(named: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> Manifest:
    """The manifest of named tensors, in their order. Tied tensors (the same memory) become aliases of the first.

    Zero-size tensors are never aliases: they share no memory. Raises ValueError, naming the tensor, for a name that
    comes twice and for a tensor without bytes of its own (sparse, meta, quantised).
    """
    items = list(named.items() if isinstance(named, Mapping) else named)
    for name, count in Counter(name for name, _ in items).most_common(1):
        if count > 1:
            raise ValueError(f"two tensors are named {name!r}")
    for name, tensor in items:
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            kind = "quantised" if tensor.is_quantized else "meta" if tensor.is_meta else "sparse"
            raise ValueError(f"tensor {name!r} is {kind}: only dense tensors have bytes that can be moved")
    alias_of = ties([tensor for _, tensor in items])
    return Manifest(
        tensors=tuple(
            TensorEntry(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                alias=alias_of.get(index),
            )
            for index, (name, tensor) in enumerate(items)
        )
    )


def ties(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Index of the first tensor that is the very same memory, by that of each later one. Zero-size ones share none."""
    pointers = list(map(torch.Tensor.data_ptr, tensors))
    if len(set(pointers)) == len(pointers):
        return {}  # so it is for most models, and found without Python code for each tensor
    often = Counter(pointers)
    first: dict[tuple[object, ...], int] = {}
    found: dict[int, int] = {}
    for index, (pointer, tensor) in enumerate(zip(pointers, tensors, strict=True)):
        if often[pointer] > 1 and tensor.numel():
            earlier = first.setdefault(identity_of(tensor), index)
            if earlier != index:
                found[index] = earlier
    return found


def arena_views(manifest: Manifest, arena: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a manifest as views of one arena, at `manifest.arena_offsets`; an alias is its first's view.

    `arena`: uint8 [>= manifest.arena_bytes]; its memory at a multiple of ALIGNMENT. Raises ValueError where it is not.
    """
    if arena.dtype != torch.uint8 or arena.dim() != 1 or arena.numel() < manifest.arena_bytes:
        raise ValueError(
            f"an arena for these tensors is uint8 [{manifest.arena_bytes}] or more, not {arena.dtype} "
            f"{list(arena.shape)}"
        )
    views: list[torch.Tensor] = []
    for entry, offset in zip(manifest.tensors, manifest.arena_offsets, strict=True):
        if entry.alias is not None:
            views.append(views[entry.alias])
        else:
            views.append(arena[offset : offset + entry.nbytes].view(entry.torch_dtype).view(entry.shape))
    return {entry.name: view for entry, view in zip(manifest.tensors, views, strict=True)}


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of one tensor's bytes within one bucket."""

    tensor: int
    """Index in the manifest."""
    tensor_offset: int
    """First byte within the tensor (in its contiguous form)."""
    bucket_offset: int
    """First byte within the bucket."""
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """Where each tensor's bytes lie in the step's buckets."""

    bucket_bytes: int
    buckets: tuple[tuple[Piece, ...], ...]
    """Pieces by bucket, by ascending offset. Aliases and zero-size tensors have none."""

    def used_bytes(self, bucket: int) -> int:
        """Bytes from the start of a bucket to the end of its last piece."""
        last = self.buckets[bucket][-1]
        return last.bucket_offset + last.nbytes


def layout(manifest: Manifest, bucket_bytes: int, skip: frozenset[int] = frozenset()) -> Layout:
    """Derives the layout. `skip`: tensors that go without packing (indices). Raises ValueError below ALIGNMENT."""
    if bucket_bytes < ALIGNMENT or bucket_bytes % ALIGNMENT:
        raise ValueError(f"a bucket of {bucket_bytes} bytes is not a positive multiple of {ALIGNMENT}")
    buckets: list[tuple[Piece, ...]] = []
    current: list[Piece] = []
    end = 0
    for index, entry in enumerate(manifest.tensors):
        if entry.alias is not None or index in skip:
            continue
        done, start = 0, align(end)
        if current and start + entry.nbytes > bucket_bytes >= entry.nbytes:
            buckets.append(tuple(current))
            current, start = [], 0
        while done < entry.nbytes:
            if start >= bucket_bytes:
                buckets.append(tuple(current))
                current, start = [], 0
            size = min(entry.nbytes - done, bucket_bytes - start)
            current.append(Piece(index, done, start, size))
            done += size
            end = start = start + size
    if current:
        buckets.append(tuple(current))
    return Layout(bucket_bytes, tuple(buckets))


MAX_LISTED = 20
_CAUSE = "likely cause"
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
"""What a sender converts."""


def differences(sent: Manifest, expected: Manifest) -> list[str]:
    """Every way in which what is sent does not fit what the receiver has, a sentence each; empty: it fits.

    The last sentence gives the likely cause where one can be told (a prefix that differs, a tied head that is missing,
    float32 masters of a bfloat16 engine).
    """
    have = {entry.name: entry for entry in expected.tensors}
    sent_names = {entry.name for entry in sent.tensors}
    found: list[str] = []
    unexpected = [e.name for e in sent.tensors if e.name not in have]
    missing = [e for e in expected.tensors if e.name not in sent_names]
    for entry in sent.tensors:
        mine = have.get(entry.name)
        if mine is not None and mine.shape != entry.shape:
            found.append(f"{entry.name}: the sender's shape is {list(entry.shape)}, the receiver's {list(mine.shape)}")
        elif mine is not None and mine.dtype != entry.dtype:
            found.append(f"{entry.name}: the sender's dtype is {entry.dtype}, the receiver's {mine.dtype}")
    # An alias at the receiver whose first is sent needs no bytes of its own.
    covered = {e.name for e in missing if e.alias is not None and expected.tensors[e.alias].name in sent_names}
    covered |= {
        expected.tensors[e.alias].name
        for e in expected.tensors
        if e.alias is not None and e.name in sent_names and expected.tensors[e.alias].name not in sent_names
    }
    lost = [e.name for e in missing if e.name not in covered]
    found += [f"{name}: sent, but the receiver has no such tensor" for name in unexpected]
    found += [f"{name}: the receiver has it, but it is not sent" for name in lost]
    cause = _likely_cause(unexpected, lost) or _masters(sent, have, len(found))
    return found + ([cause] if found and cause else [])


def _likely_cause(unexpected: list[str], lost: list[str]) -> str:
    if unexpected and lost:
        for ours, theirs in ((unexpected, lost), (lost, unexpected)):
            target = set(theirs)
            for name in ours:
                for part in range(1, name.count(".") + 1):
                    prefix, rest = ".".join(name.split(".")[:part]) + ".", ".".join(name.split(".")[part:])
                    if rest in target:
                        side = "the sender's" if ours is unexpected else "the receiver's"
                        return f"{_CAUSE}: {side} names have the prefix {prefix!r}"
    heads = [n for n in lost if n.endswith(("lm_head.weight", "embed_out.weight", "output.weight"))]
    if heads and len(heads) == len(lost) and not unexpected:
        return f"{_CAUSE}: {heads[0]} is tied at the sender and not at the receiver: send it too"
    return ""


def _masters(sent: Manifest, have: Mapping[str, TensorEntry], count: int) -> str:
    """Where all `count` differences are gone once the sender converts what it sends."""
    pairs = [(entry, have[entry.name]) for entry in sent.tensors if entry.name in have]
    wanted = {mine.dtype for _, mine in pairs if mine.dtype in _FLOATS}
    convertible = [a for a, b in pairs if a.shape == b.shape and a.dtype != b.dtype and {a.dtype, b.dtype} <= _FLOATS]
    if len(wanted) != 1 or len(convertible) != count:
        return ""
    dtype = wanted.pop()
    return (
        f"{_CAUSE}: the trainer's weights are kept in another dtype than the engine's: Sender(dtype=torch.{dtype}), or "
        f"WeightSyncCallback(dtype=torch.{dtype}), sends them as {dtype}"
    )


def summarize(found: list[str]) -> str:
    """The first MAX_LISTED differences, and how many more there are; then the likely cause, where there is one."""
    causes = [sentence for sentence in found[-1:] if sentence.startswith(_CAUSE)]
    listed = found[: len(found) - len(causes)]
    more = [f"and {len(listed) - MAX_LISTED} more"] if len(listed) > MAX_LISTED else []
    return "; ".join(listed[:MAX_LISTED] + more + causes)
