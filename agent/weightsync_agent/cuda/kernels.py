# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: N803, SIM102 - constants are in capitals, and a compile-time `if` must stand alone
"""The Triton kernels: a copy plan's and the digest's. Imported lazily, since it needs Triton.

Row numbers are int32, addresses int64. No argument is specialised on its value, so that one compilation serves every
plan: a kernel that is loaded while a stream waits on a flag would block (flags.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

ELEMENTS = 8192
"""Elements that one program copies at a time, whatever their size: 64 KiB in the widest case."""
WARPS = 16


@triton.jit
def _copy_block(source, destination, count, ELEMENTS: tl.constexpr, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """`count` elements from one address to another. ALIGNED: 16-byte units at multiples of 16 bytes, as word pairs."""
    # Of its own in each path: shared ones would get one layout for all widths, and a conversion through shared memory.
    offsets = tl.arange(0, ELEMENTS)
    reading = source.to(tl.pointer_type(ELEMENT))
    writing = destination.to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        reading = tl.multiple_of(reading, 16)
        writing = tl.multiple_of(writing, 16)
        count = count * 2  # lets the compiler see that no pair is cut, so accesses are 16 bytes wide
    inside = offsets < count
    tl.store(writing + offsets, tl.load(reading + offsets, mask=inside), mask=inside)


@triton.jit
def _copy_row(
    row,
    sources,
    destinations,
    counts,
    end16,
    end8,
    end4,
    end2,
    end1,
    end_converted,
    ELEMENTS: tl.constexpr,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    CONVERTS: tl.constexpr,
):
    source = tl.load(sources + row)
    destination = tl.load(destinations + row)
    count = tl.load(counts + row)
    if row < end16:
        _copy_block(source, destination, count, ELEMENTS, tl.int64, True)
    elif row < end8:
        _copy_block(source, destination, count, ELEMENTS, tl.int64, False)
    elif row < end4:
        _copy_block(source, destination, count, ELEMENTS, tl.int32, False)
    elif row < end2:
        _copy_block(source, destination, count, ELEMENTS, tl.int16, False)
    elif row < end1:
        _copy_block(source, destination, count, ELEMENTS, tl.int8, False)
    elif CONVERTS:
        if row < end_converted:
            offsets = tl.arange(0, ELEMENTS)
            inside = offsets < count
            values = tl.load(source.to(tl.pointer_type(FROM)) + offsets, mask=inside)
            tl.store(destination.to(tl.pointer_type(TO)) + offsets, values.to(TO), mask=inside)


_PLAIN_NUMBERS = ["end16", "end8", "end4", "end2", "end1", "end_converted"]


@triton.jit(do_not_specialize=_PLAIN_NUMBERS)
def copy_rows(
    sources,
    destinations,
    counts,
    end16,
    end8,
    end4,
    end2,
    end1,
    end_converted,
    permit,
    ELEMENTS: tl.constexpr,
    PERSISTENT: tl.constexpr,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    CONVERTS: tl.constexpr,
    PERMITTED: tl.constexpr,
):
    """Copies every row of a table. Rows come by the widest element that both addresses allow, converted ones last.

    sources, destinations: int64 [rows], addresses; counts: int32 [rows], elements of the row's width (16, 8, 4, 2 or
    1 bytes, or FROM), at most ELEMENTS, of the widest half as many. end*: int32, the row behind the last of each kind;
    rows at and behind `end_converted` are not touched. permit: int32 [1] in memory of the same GPU; with PERMITTED each
    program looks at it when it starts, and copies nothing where it is 0.
    """
    if PERMITTED:
        # Volatile: another process takes the permission back while this kernel runs.
        end_converted = tl.where(tl.load(permit, volatile=True) != 0, end_converted, 0)
    if PERSISTENT:
        for row in range(tl.program_id(0), end_converted, tl.num_programs(0)):
            _copy_row(
                row, sources, destinations, counts, end16, end8, end4, end2, end1, end_converted,
                ELEMENTS, FROM, TO, CONVERTS,
            )  # fmt: skip
    else:
        row = tl.program_id(0)
        if row < end_converted:
            _copy_row(
                row, sources, destinations, counts, end16, end8, end4, end2, end1, end_converted,
                ELEMENTS, FROM, TO, CONVERTS,
            )  # fmt: skip


@triton.jit
def _block_key(block):
    """B[block] of digest.py, int64: splitmix64(block + 2^32) | 1."""
    z = block.to(tl.uint64) + 0x9E3779B97F4A7C15 + 0x100000000
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = (z ^ (z >> 31)) | 1
    return z.to(tl.int64, bitcast=True)


@triton.jit
def _wide(low, high):
    return (high.to(tl.int64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit(do_not_specialize=["rows"])
def digest_blocks(
    addresses,
    counts,
    blocks,
    tensors,
    keys_low,
    keys_high,
    digests,
    rows,
    WORDS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Adds whole blocks of WORDS words at multiples of 16 bytes to their tensors' digests. Persistent programs.

    addresses: int64 [rows]; counts: int32 [rows], consecutive blocks; blocks: int32 [rows], number of the first one in
    its tensor; tensors: int32 [rows], place in `digests` (int64). keys_low, keys_high: int32 [WORDS], halves of A.
    """
    # A block as LANES columns: sums down a column stay within one thread, so the loop has no barrier. A stays in
    # registers for the program's life, in the layout of the words (hence two halves of their size).
    offsets = tl.arange(0, WORDS // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    keys = _wide(tl.load(keys_low + offsets), tl.load(keys_high + offsets))
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        words = tl.multiple_of(tl.load(addresses + row).to(tl.pointer_type(tl.int32)), 16)
        first = tl.load(blocks + row)
        columns = tl.zeros([LANES], tl.int64)
        for block in range(tl.load(counts + row)):
            columns += tl.sum(tl.load(words + offsets).to(tl.int64) * keys, axis=0) * _block_key(first + block)
            words += WORDS
        tl.atomic_add(digests + tl.load(tensors + row), tl.sum(columns, axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def digest_odd(
    addresses,
    lengths,
    first_words,
    blocks,
    tensors,
    keys_low,
    keys_high,
    digests,
    rows,
    WORDS: tl.constexpr,
):
    """The same for runs that start at any byte, hold any number of bytes, and lie within one block.

    lengths: int32 [rows], bytes, 1 to 4 * WORDS; first_words: int32 [rows], of the run's first word in its block;
    blocks: int32 [rows], number of the block in its tensor.
    """
    offsets = tl.arange(0, WORDS)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        address = tl.load(addresses + row)
        length = tl.load(lengths + row)
        ahead = (address & 3).to(tl.int32)
        shift = (ahead * 8).to(tl.uint32)
        # Words of memory that hold at least one byte of the run are read, and no others: none of them can be unmapped.
        words = (address & -4).to(tl.pointer_type(tl.int32))
        held = ahead + length
        low = tl.load(words + offsets, mask=offsets * 4 < held, other=0).to(tl.uint32, bitcast=True)
        high = tl.load(words + offsets + 1, mask=offsets * 4 + 4 < held, other=0).to(tl.uint32, bitcast=True)
        joined = tl.where(shift == 0, low, (low >> shift) | (high << ((32 - shift) & 31)))
        # The last word is padded with zeros: only the run's own bytes count.
        own = tl.minimum(tl.maximum(length - offsets * 4, 0), 4).to(tl.uint32)
        filled = tl.where(own == 4, joined, joined & ((1 << ((own & 3) * 8)) - 1))
        at = tl.load(first_words + row) + offsets
        keys = _wide(
            tl.load(keys_low + at, mask=at < WORDS, other=0),
            tl.load(keys_high + at, mask=at < WORDS, other=0),
        )
        total = tl.sum(filled.to(tl.int32, bitcast=True).to(tl.int64) * keys, axis=0)
        tl.atomic_add(digests + tl.load(tensors + row), total * _block_key(tl.load(blocks + row)), sem="relaxed")
