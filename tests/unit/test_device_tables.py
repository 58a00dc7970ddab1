"""The tables of the GPU's copy plans and digests, carried out by numpy: every byte once, and no other."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weightsync_agent.cuda.copy_plan import (
    _WIDTHS,
    Conversion,
    by_width,
    merge_runs,
    piece_runs,
    split_converted,
    split_rows,
)
from weightsync_agent.cuda.digest import BLOCK_BYTES, digest_rows, torch_chunks
from weightsync_agent.digest import bytes_digest
from weightsync_agent.manifest import describe, layout

ELEMENTS = 64
Bytes = npt.NDArray[np.uint8]

runs_of = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 40), st.integers(0, 3000)), max_size=12)


@settings(deadline=None)
@given(runs_of)
def test_rows_copy_every_byte_of_every_run_and_nothing_else(shapes: list[tuple[int, int, int]]) -> None:
    source = np.random.default_rng(0).integers(0, 256, 8192, dtype=np.uint8)
    end, table = 16, []
    for start, gap, size in shapes:
        table.append((start, end + gap, size))
        end += gap + size
    wanted, got = np.zeros(end + 64, np.uint8), np.zeros(end + 64, np.uint8)
    for start, at, size in table:
        wanted[at : at + size] = source[start : start + size]
    written = np.zeros(end + 64, np.int64)
    runs = np.array(table, np.int64).reshape(-1, 3)
    for part, width in zip(by_width(runs), _WIDTHS, strict=True):
        for start, at, count in split_rows(part, width, ELEMENTS).tolist():
            assert start % width == at % width == 0
            assert 0 < count <= (ELEMENTS // 2 if width == 16 else ELEMENTS)
            got[at : at + count * width] = source[start : start + count * width]
            written[at : at + count * width] += 1
    assert np.array_equal(got, wanted)
    assert written.max(initial=0) <= 1
    assert written.sum() == runs[:, 2].sum()


def test_equal_misalignment_still_takes_the_widest_rows_but_for_the_ends() -> None:
    widths = {width: len(p) for p, width in zip(by_width(np.array([[16 + 3, 1600 + 3, 1000]])), _WIDTHS, strict=True)}
    assert widths == {16: 1, 8: 0, 4: 0, 2: 0, 1: 2}


def test_neighbours_that_continue_at_both_ends_become_one_run() -> None:
    runs = np.array([[0, 1000, 10], [10, 1010, 5], [20, 1020, 5], [25, 2000, 5], [30, 2005, 0], [30, 2005, 1]])
    assert merge_runs(runs).tolist() == [[0, 1000, 15], [20, 1020, 5], [25, 2000, 6]]
    assert merge_runs(runs, 5).tolist() == [[0, 1000, 25], [25, 2000, 6]]
    assert merge_runs(runs[:1]).tolist() == [[0, 1000, 10]]


def test_converted_rows_step_by_each_sides_own_size() -> None:
    runs = np.array([[0, 10_000, 130], [4000, 20_000, 1]])
    conversion = Conversion(torch.float32, torch.bfloat16, runs)
    assert split_converted(runs, 64, conversion).tolist() == [
        [0, 10_000, 64],
        [256, 10_128, 64],
        [512, 10_256, 2],
        [4000, 20_000, 1],
    ]


def test_the_runs_of_a_bucket_go_between_tensors_and_slot() -> None:
    tensors = [torch.zeros(100, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8)]
    pieces = layout(describe({"a": tensors[0], "b": tensors[1]}), 512).buckets
    pointers = np.array([10_000, 20_000])
    assert piece_runs(pieces[0], pointers, 512_000, into="Slot").tolist() == [
        [10_000, 512_000, 100],
        [20_000, 512_256, 256],
    ]
    assert piece_runs(pieces[1], pointers, 512_000, into="Tensors").tolist() == [[512_000, 20_256, 512]]
    assert piece_runs(pieces[2], pointers, 0, into="Slot").tolist() == [[20_768, 0, 232]]


def digest_of_rows(memory: Bytes, whole: npt.NDArray[np.int64], odd: npt.NDArray[np.int64], places: int) -> list[int]:
    found = [0] * places
    for address, blocks, first, place in whole.tolist():
        assert address % 16 == 0
        assert 0 < blocks <= 16
        part = memory[address : address + blocks * BLOCK_BYTES]
        found[place] += bytes_digest(part, first * BLOCK_BYTES // 4)
    for address, nbytes, first_word, block, place in odd.tolist():
        assert nbytes > 0
        assert first_word * 4 + nbytes <= BLOCK_BYTES
        found[place] += bytes_digest(memory[address : address + nbytes], block * BLOCK_BYTES // 4 + first_word)
    return [value & ((1 << 64) - 1) for value in found]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(0, 70_000), st.integers(0, 700_000), st.integers(0, 700_000)), min_size=1, max_size=4
    )
)
def test_digest_rows_add_up_to_the_digest_wherever_a_tensor_lies_and_however_it_is_cut(
    shapes: list[tuple[int, int, int]],
) -> None:
    memory = np.random.default_rng(1).integers(0, 256, 800_000, dtype=np.uint8)
    parts, wanted = [], []
    for place, (start, size, cut) in enumerate(shapes):
        cut = min(size, cut) // 4 * 4
        parts += [(start, cut, place, 0), (start + cut, size - cut, place, cut)]
        wanted.append(bytes_digest(memory[start : start + size]))
    whole, odd = digest_rows(np.array(parts, np.int64))
    assert digest_of_rows(memory, whole, odd, len(shapes)) == wanted


def test_an_aligned_tensor_is_whole_blocks_but_for_its_end() -> None:
    whole, odd = digest_rows(np.array([[160, 40 * BLOCK_BYTES + 5, 0, 0]], np.int64))
    assert whole[:, 1].tolist() == [16, 16, 8]
    assert odd.tolist() == [[160 + 40 * BLOCK_BYTES, 5, 0, 40, 0]]


def test_a_part_that_starts_within_a_word_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        digest_rows(np.array([[0, 8, 0, 2]], np.int64))


def test_chunks_of_the_fallback_cover_a_part_once() -> None:
    chunks = list(torch_chunks(40 << 20, 64))
    assert [size for _, size, _ in chunks] == [16 << 20, 16 << 20, 8 << 20]
    assert [word * 4 - 64 for _, _, word in chunks] == [start for start, _, _ in chunks]


INTERPRETED = """
import numpy as np, torch
import triton.language as tl
from weightsync_agent.cuda import kernels
from weightsync_agent.cuda.copy_plan import _WIDTHS, Conversion, by_width, split_converted, split_rows
from weightsync_agent.cuda.digest import digest_rows
from weightsync_agent.digest import bytes_digest, word_keys

generator = np.random.default_rng(2)
source = torch.from_numpy(generator.integers(0, 256, 1 << 20, dtype=np.uint8))
target, wanted = torch.zeros(1 << 20, dtype=torch.uint8), torch.zeros(1 << 20, dtype=torch.uint8)
runs, at = [], 0
for size in (1, 15, 16, 17, 40_001, 33_000, 4096, 140_000, 2, 0, 100_000):
    for apart in (0, 8, 4, 2, 1):
        start = int(generator.integers(0, 900_000))
        at = (at + 15) // 16 * 16 + start % 16 + apart
        if size > 30_000 and apart:
            continue
        runs.append((source.data_ptr() + start, target.data_ptr() + at, size))
        wanted[at : at + size] = source[start : start + size]
        at += size
parts = [split_rows(p, w, kernels.ELEMENTS) for p, w in zip(by_width(np.array(runs)), _WIDTHS)]
floats, halves = torch.randn(10_007, dtype=torch.float64), torch.zeros(10_007)
conversion = Conversion(torch.float64, torch.float32, np.array([[floats.data_ptr(), halves.data_ptr(), 10_007]]))
parts.append(split_converted(conversion.runs, kernels.ELEMENTS, conversion))
ends = np.cumsum([len(p) for p in parts]).tolist()
assert all(len(p) for p in parts), ends
rows = np.concatenate(parts)
columns = [torch.from_numpy(rows[:, c].copy()) for c in range(2)] + [torch.from_numpy(rows[:, 2].astype(np.int32))]
for grid, persistent in ((len(rows), False), (7, True)):
    target.zero_(), halves.zero_()
    constants = dict(ELEMENTS=kernels.ELEMENTS, PERSISTENT=persistent, FROM=tl.float64, TO=tl.float32, CONVERTS=True)
    word = torch.zeros(1, dtype=torch.int32)
    kernels.copy_rows[(grid,)](*columns, *ends, word, **constants, PERMITTED=True)
    assert not target.any() and not halves.any(), persistent
    word.fill_(1)
    kernels.copy_rows[(grid,)](*columns, *ends, word, **constants, PERMITTED=True)
    assert torch.equal(target, wanted), persistent
    target.zero_(), halves.zero_()
    kernels.copy_rows[(grid,)](*columns, *ends, word, **constants, PERMITTED=False)
    assert torch.equal(target, wanted), persistent
    assert torch.equal(halves, floats.float()), persistent

SHAPES = [(16, 300_001), (3, 40_000), (5000, 3), (18, 16_384), (32, 16_384), (2, 70_001)]
parts, wanted = [], []
for place, (start, size) in enumerate(SHAPES):
    cut = size // 8 * 4
    start += -source.data_ptr() % 16
    wanted.append(bytes_digest(source.numpy()[start : start + size]))
    for at, length in ((0, cut), (cut, size - cut)):
        parts.append((source.data_ptr() + start + at, length, place, at))
whole, odd = digest_rows(np.array(parts))
assert len(whole) and len(odd)
keys = word_keys().view(np.int32).reshape(-1, 2)
keys = [torch.from_numpy(keys[:, half].copy()) for half in (0, 1)]
column = lambda table: [torch.from_numpy(v.astype(np.int32 if c else np.int64)) for c, v in enumerate(table.T)]
digests = torch.zeros(len(wanted), dtype=torch.int64)
kernels.digest_blocks[(3,)](*column(whole), *keys, digests, len(whole), WORDS=4096, LANES=2048)
kernels.digest_odd[(3,)](*column(odd), *keys, digests, len(odd), WORDS=4096)
assert digests.numpy().view(np.uint64).tolist() == wanted
print("equal")
"""


def test_the_triton_kernels_give_the_same_bytes_and_digests_in_tritons_interpreter() -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "equal"
