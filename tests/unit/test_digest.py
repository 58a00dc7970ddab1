"""The digest equals its definition, adds up over any split, and sees what a transfer can do wrong."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_tensors import DTYPES, random_tensor
from weightsync_agent.digest import (
    BLOCK_WORDS,
    MASK,
    bytes_digest,
    combine,
    first_differences,
    splitmix64,
    tensor_digest,
    tensor_digests,
)


def reference(data: bytes) -> int:
    """The definition, word by word."""
    total = 0
    for i in range(-(-len(data) // 4)):
        word = int.from_bytes(data[4 * i : 4 * i + 4].ljust(4, b"\0"), "little", signed=True)
        a = splitmix64(i % BLOCK_WORDS) | 1
        b = splitmix64(i // BLOCK_WORDS + 2**32) | 1
        total += word * a * b
    return total % 2**64


def digest_of(data: bytes, first_word: int = 0) -> int:
    return bytes_digest(np.frombuffer(data, np.uint8), first_word)


def test_splitmix64_is_vignas() -> None:
    """The first outputs of the published C program seeded with 1234567 (as cited by its many ports)."""
    state, found = 1234567, []
    for _ in range(3):
        found.append(splitmix64(state))
        state += 0x9E3779B97F4A7C15
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_known_values_never_change() -> None:
    """Both ends may be of different releases: a new definition is a new protocol version."""
    assert digest_of(b"") == 0
    assert digest_of(b"\x01\0\0\0") == ((splitmix64(0) | 1) * (splitmix64(2**32) | 1)) & MASK
    data = bytes(i * 7 % 256 for i in range(40_001))
    assert digest_of(data) == reference(data)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(0, 60_000), seed=st.integers(0, 2**32))
def test_it_equals_the_definition(size: int, seed: int) -> None:
    data = random.Random(seed).randbytes(size)
    assert digest_of(data) == reference(data)


@settings(max_examples=40, deadline=None)
@given(
    words=st.integers(0, 40_000),
    tail=st.integers(0, 3),
    cuts=st.lists(st.floats(0, 1), max_size=6),
    seed=st.integers(0, 2**32),
)
def test_parts_add_up_to_the_whole(words: int, tail: int, cuts: list[float], seed: int) -> None:
    data = random.Random(seed).randbytes(4 * words + tail)
    # A cut at the very end would give the tail to two parts.
    borders = [0, *sorted(border for cut in cuts if (border := int(cut * words)) < words), words]
    parts = []
    for start, end in itertools.pairwise(borders):
        last = 4 * end if end < words else len(data)
        parts.append(digest_of(data[4 * start : last], start) if end > start or last > 4 * end else 0)
    if words == 0:
        parts = [digest_of(data)]
    assert sum(parts) & MASK == digest_of(data)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 50_000), seed=st.integers(0, 2**32))
def test_any_flipped_bit_shows(size: int, seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(rng.randbytes(size))
    before = digest_of(bytes(data))
    data[rng.randrange(size)] ^= 1 << rng.randrange(8)
    assert digest_of(bytes(data)) != before


@settings(max_examples=60, deadline=None)
@given(first=st.integers(0, 20_000), second=st.integers(0, 20_000), bit=st.integers(0, 31))
def test_two_swapped_words_show_even_when_one_bit_differs(first: int, second: int, bit: int) -> None:
    if first == second:
        return
    words = np.zeros(20_001, np.uint32)
    words[first] = 1 << bit
    before = bytes_digest(words.view(np.uint8))
    words[first], words[second] = words[second], words[first]
    assert bytes_digest(words.view(np.uint8)) != before


@pytest.mark.parametrize("block", [1, 256, 4096, 16384, 65536])
def test_two_swapped_blocks_show(block: int) -> None:
    data = bytearray(random.Random(block).randbytes(8 * block))
    before = digest_of(bytes(data))
    data[block : 2 * block], data[5 * block : 6 * block] = data[5 * block : 6 * block], data[block : 2 * block]
    assert digest_of(bytes(data)) != before


@pytest.mark.parametrize("shift", [1, 2, 4, 16, 256, 16384])
def test_a_shift_shows(shift: int) -> None:
    data = random.Random(shift).randbytes(100_000)
    assert digest_of(data[shift:] + data[:shift]) != digest_of(data)


def test_zeros_in_the_place_of_a_missing_bucket_show() -> None:
    data = random.Random(1).randbytes(1 << 16)
    assert digest_of(data[: 1 << 15] + bytes(1 << 15)) != digest_of(data)


def test_a_moved_tensor_changes_the_step_though_not_itself() -> None:
    a, b = torch.arange(10), torch.arange(20)
    one, other = tensor_digests([a, b]), tensor_digests([b, a])
    assert sorted([one[:8], one[8:]]) == sorted([other[:8], other[8:]])
    assert combine(one) != combine(other)
    assert combine(one) == combine(tensor_digests([a.clone(), b.clone()]))


def test_combine_is_its_formula() -> None:
    digests = random.Random(5).randbytes(8 * 9)
    values = [int.from_bytes(digests[8 * t : 8 * t + 8], "little") for t in range(9)]
    expected = sum(splitmix64(value + splitmix64(t)) for t, value in enumerate(values)) & MASK
    assert combine(digests) == expected
    assert combine(b"") == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_counts_by_its_bytes(dtype: torch.dtype) -> None:
    tensor = random_tensor(dtype, (3, 5), 3)
    assert tensor_digest(tensor) == reference(tensor.view(torch.uint8).numpy().tobytes())
    # Strided: its contiguous form counts.
    assert tensor_digest(tensor.t()) == tensor_digest(tensor.t().contiguous())
    assert tensor_digest(tensor[0, 0]) == reference(tensor[0, 0].clone().reshape(1).view(torch.uint8).numpy().tobytes())


def test_lazily_conjugated_and_negated_tensors_count_by_their_values() -> None:
    tensor = torch.randn(6, dtype=torch.complex64)
    assert tensor_digest(tensor.conj()) == tensor_digest(tensor.conj().resolve_conj())
    assert tensor_digest(tensor.conj()) != tensor_digest(tensor)
    assert tensor_digest(tensor.conj().imag) == tensor_digest(-tensor.imag)


def test_a_parameter_a_view_at_an_odd_place_and_an_empty_tensor() -> None:
    raw = torch.arange(1000, dtype=torch.int64).to(torch.uint8)
    assert tensor_digest(raw[3:998]) == reference(raw[3:998].numpy().tobytes())
    assert tensor_digest(torch.nn.Parameter(torch.ones(3))) == tensor_digest(torch.ones(3))
    assert tensor_digests([torch.empty(0, 4), torch.empty(3, 0)]) == bytes(16)


def test_tied_tensors_have_each_their_own_digest() -> None:
    tensor = torch.randn(100)
    digests = tensor_digests([tensor, torch.zeros(1), tensor, tensor[:50]])
    assert digests[:8] == digests[16:24]
    assert digests[:8] != digests[24:]
    assert digests[8:16] == bytes(8)


def test_differences_are_named_in_order_and_counted() -> None:
    names = [f"t{i}" for i in range(40)]
    mine = tensor_digests(torch.full((3,), i) for i in range(1, 41))
    assert first_differences(mine, mine, names) == []
    theirs = bytearray(mine)
    theirs[8 * 7] ^= 1
    theirs[8 * 30 + 7] ^= 128
    assert first_differences(mine, bytes(theirs), names) == ["t7", "t30"]
    assert first_differences(mine, bytes(8 * 40), names)[-2:] == ["t19", "and 20 more"]


@pytest.mark.parametrize("length", [0, 7, 8, 24])
def test_digests_of_the_wrong_length_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match="2 tensors have 8 each"):
        first_differences(bytes(16), bytes(length), ["a", "b"])


def test_memory_of_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="host memory"):
        tensor_digest(torch.empty(3, device="meta"))
