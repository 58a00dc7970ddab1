"""THE digest of a tensor: 64 bits, the same whichever processor computes it and however the bytes were split.

Definition. Let w_0 ... w_(n-1) be the tensor's contiguous bytes as 32-bit little-endian words, signed, the last one
padded with zero bytes. All arithmetic is modulo 2^64, and each w_i is sign-extended to 64 bits:

    D = sum over i of  w_i * A[i mod 4096] * B[i div 4096]

    A[o] = splitmix64(o) | 1                 0 <= o < 4096
    B[b] = splitmix64(b + 2^32) | 1          0 <= b < 2^32

    splitmix64(x):  z = x + 0x9E3779B97F4A7C15
                    z = (z xor (z >> 30)) * 0xBF58476D1CE4E5B9
                    z = (z xor (z >> 27)) * 0x94D049BB133111EB
                    z xor (z >> 31)

splitmix64 is the output function of Sebastiano Vigna's generator of that name (https://prng.di.unimi.it/splitmix64.c,
public domain), taken at the counter x. A tensor of no bytes has the digest 0.

Why so. The sum is linear in the words: any split of the bytes at word borders, in any order, adds up to the same D,
which is what a GPU's blocks need. A and B are odd, so a single changed word always changes D (an odd factor is
invertible, and a word's difference is not 0 mod 2^64). The factors are 64 bits wide against 32-bit words, so that a
swap of words that differ in their highest bit alone still shows: 2^31 * (k1 - k2) keeps the low 33 bits of the keys'
difference. It finds faults of transfers, not forgeries: a sum with public factors is no cryptographic hash.

A step's digests are 8 bytes little-endian a tensor, in manifest order; an alias has its own, over its own bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from .manifest import identity_of

DIGEST_BYTES = 8
BLOCK_WORDS = 4096
WORD_BYTES = 4
B_COUNTER = 1 << 32
MASK = (1 << 64) - 1

_CHUNK_BLOCKS = 32
"""Blocks (16 KiB of words, 32 KiB once widened) that are widened at a time: 1 MiB, which stays in a core's cache."""


def splitmix64(x: int) -> int:
    """As defined above; `x` is taken modulo 2^64."""
    z = (x + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def _splitmix64_array(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def word_keys() -> npt.NDArray[np.int64]:
    """A, int64 [BLOCK_WORDS] (the 64 bits, whatever their sign)."""
    return (_splitmix64_array(np.arange(BLOCK_WORDS, dtype=np.uint64)) | np.uint64(1)).view(np.int64)


def block_keys(start: int, count: int) -> npt.NDArray[np.int64]:
    """B[start] ... B[start + count - 1], int64 [count]."""
    counter = np.arange(B_COUNTER + start, B_COUNTER + start + count, dtype=np.uint64)
    return (_splitmix64_array(counter) | np.uint64(1)).view(np.int64)


_A = word_keys()
_B_FIRST = block_keys(0, 1024).tolist()
"""B of the first 16 MiB of a tensor: small tensors would pay more for their one key than for their words."""
_local = threading.local()


def _scratch() -> npt.NDArray[np.int64]:
    """int64 [_CHUNK_BLOCKS, BLOCK_WORDS] of this thread, kept for the next tensor."""
    found: npt.NDArray[np.int64] | None = getattr(_local, "scratch", None)
    if found is None:
        found = _local.scratch = np.empty((_CHUNK_BLOCKS, BLOCK_WORDS), np.int64)
    return found


def bytes_digest(data: npt.NDArray[np.uint8], first_word: int = 0) -> int:
    """D of bytes that start at word `first_word` of their tensor: digests of consecutive parts add up (mod 2^64).

    `data`: uint8 [n], contiguous; n a multiple of 4 except in a tensor's last part.
    """
    total = 0
    whole = data.size // WORD_BYTES * WORD_BYTES
    # A view of words wherever the memory lies at a multiple of 4; numpy reads it wherever it lies.
    words = data[:whole].view("<i4")
    block, offset = divmod(first_word, BLOCK_WORDS)
    done = 0
    if offset:
        done = min(BLOCK_WORDS - offset, words.size)
        total += _sum(words[:done], _A[offset : offset + done]) * _block_key(block)
        block += 1
    full = (words.size - done) // BLOCK_WORDS
    if full:
        matrix = words[done : done + full * BLOCK_WORDS].reshape(full, BLOCK_WORDS)
        keys = block_keys(block, full)
        scratch = _scratch()
        for start in range(0, full, _CHUNK_BLOCKS):
            part = matrix[start : start + _CHUNK_BLOCKS]
            wide = scratch[: len(part)]
            np.copyto(wide, part)
            sums = np.einsum("bo,o->b", wide, _A)
            total += int((sums * keys[start : start + len(part)]).sum())
        done += full * BLOCK_WORDS
        block += full
    if done < words.size:
        rest = words.size - done
        first = (first_word + done) % BLOCK_WORDS
        total += _sum(words[done:], _A[first : first + rest]) * _block_key(block)
    if whole < data.size:
        tail = int.from_bytes(data[whole:].tobytes().ljust(WORD_BYTES, b"\0"), "little", signed=True)
        at = first_word + words.size
        total += tail * int(_A[at % BLOCK_WORDS]) * _block_key(at // BLOCK_WORDS)
    return total & MASK


def _block_key(block: int) -> int:
    return int(_B_FIRST[block] if block < len(_B_FIRST) else block_keys(block, 1)[0])


def _sum(words: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]) -> int:
    return int(np.dot(words.astype(np.int64), keys))


def tensor_digest(tensor: torch.Tensor) -> int:
    """D of one tensor in host memory, any dtype; a non-contiguous one counts in its contiguous form."""
    if tensor.device.type != "cpu":
        raise ValueError(f"tensor_digest takes tensors in host memory, and this one is on {tensor.device}")
    if not tensor.numel():
        return 0
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes_digest(plain.reshape(-1).view(torch.uint8).numpy())


def tensor_digests(tensors: Iterable[torch.Tensor]) -> bytes:
    """8 bytes little-endian a tensor, in order. Tensors that are the very same memory are read once."""
    known: dict[tuple[object, ...], bytes] = {}
    found: list[bytes] = []
    for tensor in tensors:
        identity = identity_of(tensor) if tensor.numel() else ()
        digest = known.get(identity)
        if digest is None:
            digest = known[identity] = tensor_digest(tensor).to_bytes(DIGEST_BYTES, "little")
        found.append(digest)
    return b"".join(found)


def combine(digests: bytes) -> int:
    """One value for a step, which depends on the order: sum over t of splitmix64(D_t + splitmix64(t)) mod 2^64."""
    values = np.frombuffer(digests, "<u8")
    salts = _splitmix64_array(np.arange(values.size, dtype=np.uint64))
    return int(_splitmix64_array(values + salts).sum(dtype=np.uint64))


def first_differences(mine: bytes, theirs: bytes, names: Sequence[str], limit: int = 20) -> list[str]:
    """Names of the first `limit` tensors whose digests differ, in order; then `and N more` where there are more.

    Raises ValueError where either side has not exactly one digest a name (a malformed peer).
    """
    for side, digests in (("own", mine), ("the peer's", theirs)):
        if len(digests) != DIGEST_BYTES * len(names):
            raise ValueError(f"{side} digests are {len(digests)} bytes, and {len(names)} tensors have 8 each")
    differ = np.flatnonzero(np.frombuffer(mine, "<u8") != np.frombuffer(theirs, "<u8"))
    found = [names[int(index)] for index in differ[:limit]]
    if len(differ) > limit:
        found.append(f"and {len(differ) - limit} more")
    return found
