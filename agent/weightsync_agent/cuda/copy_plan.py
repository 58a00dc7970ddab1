"""A copy plan on a GPU: a table of (source, destination, bytes), replayed at every step by one kernel launch.

The table is built once, with no Python a block, and lies on the device: 20 bytes for each 64 KiB. Per-tensor Python
on the step path loses: 18,867 tensors at 7 us each is already the time of the whole transfer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import torch

from ..copy_plan import Pair, is_plain
from ..manifest import Piece
from .arena import bytes_at
from .compiled import Launcher, kernels, triton_dtype, triton_problem
from .driver import device_index
from .graph import RecordedLaunch

log = logging.getLogger(__name__)

Runs = npt.NDArray[np.int64]
"""int64 [n, 3]: source address, destination address, bytes."""

NVLINK_GRID: Final = 32
"""Programs that saturate NVLink (measured on H200: 376 GB/s; 16 reach 332) and leave the other SMs alone."""

_WIDTHS: Final = (16, 8, 4, 2, 1)
"""Bytes that both addresses of a row are multiples of, in the table's order."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """Elements of one floating dtype that become another's while they are copied, rounded to nearest even."""

    source: torch.dtype
    destination: torch.dtype
    runs: Runs
    """int64 [n, 3]: source address, destination address, elements."""


class DeviceCopyPlan:
    """Copies every run, in no order. The memory of all of them must stay where it is for the plan's life."""

    def __init__(
        self,
        runs: Runs | Sequence[tuple[int, int, int]],
        device: torch.device | int,
        *,
        grid_limit: int | None = None,
        conversion: Conversion | None = None,
        backend: Literal["Auto", "Triton", "Torch"] = "Auto",
        keep: object = None,
        recorded: bool = False,
        permit: torch.Tensor | None = None,
    ) -> None:
        """Builds the table and loads the kernel; `run` then allocates and loads nothing.

        `grid_limit`: at most so many programs at a time, for copies beside other work (NVLINK_GRID). `keep`: held for
        the plan's life. `recorded`: launched as a CUDA graph, with less of the host's time, but not beside streams that
        wait on flags. `permit`: int32 [1] in this GPU's memory; each program of the kernel looks at it when it starts
        and copies nothing where it is 0. (In host memory a look costs 8 us, one after the other: 4 GB/s.) Destinations
        must not overlap. Auto falls back to torch where Triton does not work, with the same bytes. Raises ValueError
        for a negative size or address, or where a kernel that is asked for can't work.
        """
        self.device = torch.device("cuda", device_index(device))
        self.grid_limit = grid_limit
        """May be changed, before `warm`."""
        self._keep = keep
        self._launchers: dict[bool, Launcher] = {}
        self._recorded: RecordedLaunch | None = None
        self._sources: list[torch.Tensor] = []
        self._destinations: list[torch.Tensor] = []
        self._strided: list[Pair] = []
        table = np.asarray(runs, np.int64).reshape(-1, 3)
        if table.size and (table.min() < 0):
            raise ValueError("a copy plan with a negative size or address")
        self._conversion = conversion
        converted = np.zeros((0, 3), np.int64) if conversion is None else np.asarray(conversion.runs, np.int64)
        self.nbytes = int(table[:, 2].sum())
        """Bytes that a run writes."""
        if conversion is not None:
            self.nbytes += int(converted[:, 2].sum()) * conversion.destination.itemsize
        problem = None if backend == "Torch" else triton_problem(self.device.index)
        if backend == "Triton" and problem:
            raise ValueError(f"no Triton kernel can be run: {problem}")
        self.backend: Literal["Triton", "Torch"] = "Torch" if backend == "Torch" or problem else "Triton"
        if permit is not None and self.backend == "Torch":
            raise ValueError(f"torch's kernels can't ask for a permission: {problem or 'backend Torch'}")
        self._permit = permit
        self.rows = 0
        """Rows of the table: what the kernel's programs copy one of at a time."""
        if self.backend == "Triton":
            self._build(table, converted)
        else:
            self._build_views(table, converted)
        if recorded and self.rows:
            try:
                self._recorded = RecordedLaunch(self._queue, self.device)
            except Exception as error:  # whatever a launcher does that can't be recorded
                log.info("the copy plan's launch can't be recorded, so it is made anew each time: %s", error)

    @classmethod
    def of_tensors(
        cls,
        pairs: Sequence[Pair],
        device: torch.device | int,
        *,
        grid_limit: int | None = None,
        backend: Literal["Auto", "Triton", "Torch"] = "Auto",
        recorded: bool = False,
        permit: torch.Tensor | None = None,
    ) -> DeviceCopyPlan:
        """The plan of (source, destination) tensors of equal shape; a dtype that differs is converted.

        Strided tensors are copied by torch, one launch each: pack into contiguous ones where there are many.
        Raises ValueError for shapes that differ, or more than one kind of conversion.
        """
        runs: list[tuple[int, int, int]] = []
        converted: list[tuple[int, int, int]] = []
        kinds: set[tuple[torch.dtype, torch.dtype]] = set()
        strided: list[Pair] = []
        for source, destination in pairs:
            if source.shape != destination.shape:
                raise ValueError(f"a copy of shape {list(source.shape)} into {list(destination.shape)}")
            if not source.numel():
                continue
            if not (is_plain(source) and is_plain(destination)):
                strided.append((source.detach(), destination.detach()))
            elif source.dtype == destination.dtype:
                runs.append((source.data_ptr(), destination.data_ptr(), source.numel() * source.element_size()))
            elif source.is_floating_point() and destination.is_floating_point():
                kinds.add((source.dtype, destination.dtype))
                converted.append((source.data_ptr(), destination.data_ptr(), source.numel()))
            else:
                raise ValueError(f"a copy of {source.dtype} into {destination.dtype}")
        if len(kinds) > 1:
            raise ValueError(f"one plan makes one kind of conversion, not {sorted(map(str, kinds))}")
        conversion = Conversion(*kinds.pop(), np.array(converted, np.int64)) if kinds else None
        plan = cls(
            np.array(runs, np.int64).reshape(-1, 3),
            device,
            grid_limit=grid_limit,
            conversion=conversion,
            backend=backend,
            keep=[tensor for pair in pairs for tensor in pair],
            recorded=recorded and not strided,
            permit=permit,
        )
        if strided and permit is not None:
            raise ValueError("strided tensors are copied by torch's kernels, which can't ask for a permission")
        plan._strided = strided
        plan.nbytes += sum(d.numel() * d.element_size() for _, d in strided)
        plan.warm()
        return plan

    @property
    def table_bytes(self) -> int:
        """Device memory of the table."""
        return self.rows * 20

    def warm(self) -> None:
        """Loads every kernel that `run` launches and writes nothing to any destination."""
        if self.backend == "Triton":
            module = kernels()
            nothing = (0,) * len(self._ends)
            with torch.cuda.device(self.device):
                for persistent in {False, self.grid_limit is not None} - self._launchers.keys():
                    arguments = self._arguments(persistent, nothing)
                    self._launchers[persistent] = Launcher(module.copy_rows, arguments, module.WARPS)
        for source, destination in self._strided:
            # Of the same layout and dtype, so the same kernel of torch's.
            torch.empty_strided(
                destination.shape, destination.stride(), dtype=destination.dtype, device=destination.device
            ).copy_(source)
        # The table came over the current stream, and `run` may be on another.
        torch.cuda.current_stream(self.device).synchronize()

    def run(self, stream: torch.cuda.Stream | None = None) -> None:
        """Queues the copies on `stream` (None: the current one). Neither waits nor allocates."""
        if self._recorded is not None and stream is not None:
            self._recorded.run(stream)
            return
        self._queue(stream)

    def _queue(self, stream: torch.cuda.Stream | None) -> None:
        with torch.cuda.device(self.device):
            if self.rows:
                persistent = self.grid_limit is not None and self.rows > self.grid_limit
                grid = self.grid_limit if persistent and self.grid_limit else self.rows
                arguments = self._arguments(persistent, self._ends)
                self._launchers[persistent](grid, stream or torch.cuda.current_stream(), arguments)
            if self._destinations or self._strided:
                with torch.cuda.stream(stream), torch.no_grad():
                    if self._destinations:
                        torch._foreach_copy_(self._destinations, self._sources)
                    for source, destination in self._strided:
                        destination.copy_(source)

    def _build(self, table: Runs, converted: Runs) -> None:
        elements = int(kernels().ELEMENTS)
        parts = [split_rows(part, width, elements) for part, width in zip(by_width(table), _WIDTHS, strict=True)]
        parts.append(split_converted(converted, elements, self._conversion))
        self._ends = tuple(int(end) for end in np.cumsum([len(part) for part in parts]))
        # A row more than there are: a launch needs an address.
        rows = np.concatenate([*parts, np.zeros((1, 3), np.int64)])
        self.rows = self._ends[-1]
        if self.rows > np.iinfo(np.int32).max:
            raise ValueError(f"a copy plan of {self.rows} rows is too large")
        # One array a column, each at torch's own alignment, so that no plan needs a compilation of its own.
        self._columns = (
            torch.from_numpy(rows[:, 0].copy()).to(self.device),
            torch.from_numpy(rows[:, 1].copy()).to(self.device),
            torch.from_numpy(rows[:, 2].astype(np.int32)).to(self.device),
        )
        nothing = torch.zeros(1, dtype=torch.int32, device=self.device) if self._permit is None else self._permit
        self._permit_or_nothing = nothing
        kind = self._conversion
        self._constants = (
            (triton_dtype(kind.source), triton_dtype(kind.destination), True) if kind else (None, None, False)
        )
        self.warm()

    def _arguments(self, persistent: bool, ends: tuple[int, ...]) -> tuple[object, ...]:
        constants = (kernels().ELEMENTS, persistent, *self._constants, self._permit is not None)
        return (*self._columns, *ends, self._permit_or_nothing, *constants)

    def _build_views(self, table: Runs, converted: Runs) -> None:
        for source, destination, nbytes in table.tolist():
            if nbytes:
                self._sources.append(bytes_at(source, nbytes)[0])
                self._destinations.append(bytes_at(destination, nbytes)[0])
        if self._conversion is not None:
            for source, destination, count in converted.tolist():
                if count:
                    kind = self._conversion
                    self._sources.append(bytes_at(source, count * kind.source.itemsize)[0].view(kind.source))
                    self._destinations.append(
                        bytes_at(destination, count * kind.destination.itemsize)[0].view(kind.destination)
                    )


def piece_runs(
    pieces: Sequence[Piece], pointers: npt.NDArray[np.int64], slot: int, *, into: Literal["Slot", "Tensors"]
) -> Runs:
    """The runs of one bucket: from or into tensors at `pointers` (int64, by manifest index), slot at address `slot`."""
    columns = np.array([(p.tensor, p.tensor_offset, p.bucket_offset, p.nbytes) for p in pieces], np.int64).reshape(
        -1, 4
    )
    tensor = pointers[columns[:, 0]] + columns[:, 1]
    staged = slot + columns[:, 2]
    ends = (tensor, staged) if into == "Slot" else (staged, tensor)
    return np.stack([*ends, columns[:, 3]], axis=1)


def merge_runs(runs: Runs, largest_gap: int = 0) -> Runs:
    """Joins neighbours (in the given order) that continue at both ends.

    `largest_gap`: bytes between them, equal at both ends, that are copied along. Only from arena to arena, where
    nothing lies in the gaps.
    """
    if len(runs) < 2:
        return runs
    gap = runs[1:, 0] - (runs[:-1, 0] + runs[:-1, 2])
    same = (gap == runs[1:, 1] - (runs[:-1, 1] + runs[:-1, 2])) & (gap >= 0) & (gap <= largest_gap)
    starts = np.flatnonzero(np.concatenate([[True], ~same]))
    lasts = np.append(starts[1:], len(runs)) - 1
    merged = runs[starts].copy()
    merged[:, 2] = runs[lasts, 0] + runs[lasts, 2] - runs[starts, 0]
    return merged


def by_width(runs: Runs) -> list[Runs]:
    """Splits every run into a middle of the widest elements that both its addresses allow, and single bytes at its
    ends. Gives (source, destination, bytes) for each of _WIDTHS.
    """
    apart = (runs[:, 0] - runs[:, 1]) & 15
    width = np.where(apart == 0, 16, apart & -apart)
    head = np.minimum(-runs[:, 0] & (width - 1), runs[:, 2])
    middle = (runs[:, 2] - head) & -width
    tail = runs[:, 2] - head - middle
    body = np.stack([runs[:, 0] + head, runs[:, 1] + head, middle], axis=1)
    heads = np.stack([runs[:, 0], runs[:, 1], head], axis=1)
    after = head + middle
    tails = np.stack([runs[:, 0] + after, runs[:, 1] + after, tail], axis=1)
    parts = [body[(width == size) & (middle > 0)] for size in _WIDTHS]
    parts[-1] = np.concatenate([parts[-1], heads[head > 0], tails[tail > 0]])
    return parts


def split_rows(runs: Runs, width: int, elements: int) -> Runs:
    """Rows of (source, destination, count of `width` bytes), at most `elements` of at most 8 bytes each."""
    return _split(runs[:, 0], runs[:, 1], runs[:, 2] // width, width, width, elements // 2 if width == 16 else elements)


def split_converted(runs: Runs, elements: int, conversion: Conversion | None) -> Runs:
    """As split_rows, where `runs` count elements already."""
    if conversion is None:
        return np.zeros((0, 3), np.int64)
    sizes = conversion.source.itemsize, conversion.destination.itemsize
    return _split(runs[:, 0], runs[:, 1], runs[:, 2], *sizes, elements)


def _split(
    sources: npt.NDArray[np.int64],
    destinations: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    source_size: int,
    destination_size: int,
    elements: int,
) -> Runs:
    pieces = -(-counts // elements)
    of = np.repeat(np.arange(len(counts)), pieces)
    done = (np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * elements
    return np.stack(
        [
            sources[of] + done * source_size,
            destinations[of] + done * destination_size,
            np.minimum(counts[of] - done, elements),
        ],
        axis=1,
    ).astype(np.int64, copy=False)
