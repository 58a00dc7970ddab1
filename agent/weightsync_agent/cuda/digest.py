"""The digest of `weightsync_agent.digest` on a GPU: equal bit for bit, at memory speed, however many the tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from ..copy_plan import is_plain
from ..digest import BLOCK_WORDS, WORD_BYTES, block_keys, word_keys
from ..manifest import identity_of
from .arena import bytes_at
from .compiled import Launcher, kernels, triton_problem
from .driver import device_index

BLOCK_BYTES = BLOCK_WORDS * WORD_BYTES

Parts = npt.NDArray[np.int64]
"""int64 [n, 4]: address, bytes, place of the tensor's digest, position of the first byte in the tensor (in its
contiguous form; a multiple of 4)."""

ROW_BLOCKS = 16
"""Whole blocks in one row of the table: 256 KiB."""
LANES = 2048
PROGRAMS_PER_SM = 4
WARPS = 16
"""Measured on H200: 4,280 GB/s, the memory's speed; 8 warps reach 3,930, 4 with 1,024 lanes 4,240."""


class DeviceDigest:
    """The digests of tensors that lie on one GPU. Their memory must stay where it is for this object's life."""

    def __init__(
        self,
        parts: Parts | Sequence[tuple[int, int, int, int]],
        places: int,
        device: torch.device | int,
        *,
        backend: Literal["Auto", "Torch"] = "Auto",
        keep: object = None,
    ) -> None:
        """Builds the table and loads the kernels. `places`: number of digests. `keep`: held along.

        Where Triton does not work, torch's operators compute the same, slower and with some 100 MiB of scratch memory.
        Raises ValueError where a part does not start at a multiple of 4 bytes in its tensor. That a part ends within a
        word only where its tensor ends is the caller's to know.
        """
        index = device_index(device)
        self.device = torch.device("cuda", index)
        self.places = places
        self._keep = keep
        self._order: npt.NDArray[np.int64] | None = None
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._parts = np.asarray(parts, np.int64).reshape(-1, 4)
        whole, odd = digest_rows(self._parts)
        self.backend: Literal["Triton", "Torch"] = "Torch" if backend == "Torch" or triton_problem(index) else "Triton"
        self._whole_rows, self._odd_rows = len(whole), len(odd)
        self._whole = [self._column(whole[:, c], np.int64 if c == 0 else np.int32) for c in range(4)]
        self._odd = [self._column(odd[:, c], np.int64 if c == 0 else np.int32) for c in range(5)]
        keys = word_keys()
        halves = keys.view(np.int32).reshape(-1, 2)
        self._keys = [torch.from_numpy(halves[:, half].copy()).to(self.device) for half in (0, 1)]
        self._wide_keys = torch.from_numpy(keys).to(self.device)
        self.digests = torch.zeros(max(places, 1), dtype=torch.int64, device=self.device)[:places]
        """int64 [places]: the 64 bits of each digest, whatever their sign. Written by `run`."""
        self._programs = torch.cuda.get_device_properties(index).multi_processor_count * PROGRAMS_PER_SM
        self.warm()

    @classmethod
    def of_tensors(
        cls,
        tensors: Sequence[torch.Tensor],
        device: torch.device | int,
        *,
        backend: Literal["Auto", "Torch"] = "Auto",
    ) -> DeviceDigest:
        """Of whole tensors, in order. Equal memory is read once; strided ones are copied first, into kept memory."""
        places: dict[tuple[object, ...], int] = {}
        parts: list[tuple[int, int, int, int]] = []
        order: list[int] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tensor in tensors:
            identity = identity_of(tensor) if tensor.numel() else ()
            fresh = identity not in places
            place = places.setdefault(identity, len(places))
            order.append(place)
            if not fresh or not tensor.numel():
                continue
            plain = tensor.detach()
            if not is_plain(plain):
                plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                copies.append((plain, tensor.detach()))
            parts.append((plain.data_ptr(), plain.numel() * plain.element_size(), place, 0))
        made = cls(
            np.array(parts, np.int64).reshape(-1, 4),
            len(places),
            device,
            backend=backend,
            keep=(list(tensors), [copy for copy, _ in copies]),
        )
        made._order = np.array(order, np.int64)
        made._copies = copies
        for plain, tensor in copies:
            plain.copy_(tensor)
        return made

    def warm(self) -> None:
        """Loads every kernel that `run` launches."""
        if self.backend == "Triton":
            module = kernels()
            with torch.cuda.device(self.device):
                self._launch_whole = Launcher(module.digest_blocks, self._arguments(0, whole=True), WARPS)
                self._launch_odd = Launcher(module.digest_odd, self._arguments(0, whole=False), WARPS)
        self.digests.zero_()
        # The table came over the current stream, and `run` may be on another.
        torch.cuda.current_stream(self.device).synchronize()

    def run(self, stream: torch.cuda.Stream | None = None, *, add: bool = False) -> torch.Tensor:
        """Queues the digests on `stream` (None: the current one) and gives `digests`. Neither waits nor allocates.

        `add`: to what is there already, for tensors whose bytes come in several parts.
        """
        with torch.cuda.device(self.device), torch.cuda.stream(stream), torch.no_grad():
            if not add:
                self.digests.zero_()
            for plain, tensor in self._copies:
                plain.copy_(tensor)
            if self.backend == "Triton":
                queue = stream or torch.cuda.current_stream()
                if rows := self._whole_rows:
                    self._launch_whole(min(rows, self._programs), queue, self._arguments(rows, whole=True))
                if rows := self._odd_rows:
                    self._launch_odd(min(rows, self._programs), queue, self._arguments(rows, whole=False))
            else:
                self._with_torch()
        return self.digests

    def bytes(self, stream: torch.cuda.Stream | None = None) -> bytes:
        """Runs and waits. 8 bytes little-endian a tensor, in the order of the tensors given."""
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            values = self.run(stream).cpu().numpy()
        return (values if self._order is None else values[self._order]).astype("<i8").tobytes()

    def _column(self, values: npt.NDArray[np.int64], dtype: type[np.int64] | type[np.int32]) -> torch.Tensor:
        # A row more than there are: a launch needs an address.
        return torch.from_numpy(np.append(values, 0).astype(dtype)).to(self.device)

    def _arguments(self, rows: int, *, whole: bool) -> tuple[object, ...]:
        if whole:
            return (*self._whole, *self._keys, self.digests, rows, BLOCK_WORDS, LANES)
        return (*self._odd, *self._keys, self.digests, rows, BLOCK_WORDS)

    def _with_torch(self) -> None:
        for address, nbytes, place, position in self._parts.tolist():
            for start, size, first_word in torch_chunks(nbytes, position):
                # `new_zeros` pads the last word, and gives words that lie at any byte a place at a multiple of 4.
                held = bytes_at(address + start, size)[0]
                words = held.new_zeros(-(-size // WORD_BYTES) * WORD_BYTES)
                words[:size] = held
                block, offset = divmod(first_word, BLOCK_WORDS)
                padded = self.digests.new_zeros(-(-(offset + len(words) // WORD_BYTES) // BLOCK_WORDS) * BLOCK_WORDS)
                padded[offset : offset + len(words) // WORD_BYTES] = words.view(torch.int32)
                sums = (padded.view(-1, BLOCK_WORDS) * self._wide_keys).sum(1)
                self.digests[place] += (sums * torch.from_numpy(block_keys(block, len(sums))).to(self.device)).sum()


TORCH_CHUNK_BYTES = 16 << 20


def torch_chunks(nbytes: int, position: int) -> Iterator[tuple[int, int, int]]:
    """(first byte of the part, bytes, first word in the tensor) of chunks of a part that bound the scratch memory."""
    for start in range(0, nbytes, TORCH_CHUNK_BYTES):
        yield start, min(TORCH_CHUNK_BYTES, nbytes - start), (position + start) // WORD_BYTES


def digest_rows(parts: Parts) -> tuple[Parts, Parts]:
    """The two tables. Whole blocks at multiples of 16 bytes: (address, blocks, first block, place), at most
    ROW_BLOCKS blocks a row; all else: (address, bytes, first word in its block, block, place), one block a
    row. Raises ValueError.
    """
    parts = parts[parts[:, 1] != 0]
    if parts.size and (parts.min() < 0 or (parts[:, 3] % WORD_BYTES).any()):
        raise ValueError("a part of a tensor must start at a multiple of 4 bytes in it")
    address, nbytes, place, position = parts.T
    first = position // BLOCK_BYTES
    count = (position + nbytes - 1) // BLOCK_BYTES - first + 1
    # Of each part: an odd row at its start and its end where these are no whole block, whole blocks between.
    aligned = ((address - position) % 16) == 0
    starts_whole = (position % BLOCK_BYTES == 0) & (nbytes >= BLOCK_BYTES)
    ends_whole = (position + nbytes) % BLOCK_BYTES == 0
    whole_first = first + np.where(starts_whole, 0, 1)
    whole_count = np.maximum(first + count - np.where(ends_whole, 0, 1) - whole_first, 0) * aligned
    whole = _group(address, position, place, whole_first, whole_count)

    of = np.repeat(np.arange(len(parts)), count)
    block = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count) + first[of]
    other = (block < whole_first[of]) | (block >= (whole_first + whole_count)[of])
    of, block = of[other], block[other]
    start = np.maximum(block * BLOCK_BYTES, position[of])
    end = np.minimum((block + 1) * BLOCK_BYTES, (position + nbytes)[of])
    odd = np.stack(
        [
            address[of] + start - position[of],
            end - start,
            (start - block * BLOCK_BYTES) // WORD_BYTES,
            block,
            place[of],
        ],
        axis=1,
    )
    return whole, odd


def _group(
    address: npt.NDArray[np.int64],
    position: npt.NDArray[np.int64],
    place: npt.NDArray[np.int64],
    first: npt.NDArray[np.int64],
    count: npt.NDArray[np.int64],
) -> Parts:
    size = ROW_BLOCKS
    rows = -(-count // size)
    of = np.repeat(np.arange(len(count)), rows)
    done = (np.arange(len(of)) - np.repeat(np.cumsum(rows) - rows, rows)) * size
    block = first[of] + done
    return np.stack(
        [
            address[of] + block * BLOCK_BYTES - position[of],
            np.minimum(count[of] - done, size),
            block,
            place[of],
        ],
        axis=1,
    )
