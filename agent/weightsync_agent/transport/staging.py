"""Hands a step's tensors from staging memory to a `load_weights` callable, and proves that it kept none.

Tensors that a bucket holds whole are passed as views; one that is split over buckets is put together first, in a
buffer that is kept for the agent's life.
"""

from __future__ import annotations

import torch

from ..digest import tensor_digest
from ..errors import ViewsRetained
from ..host_memory import HostMemory
from ..manifest import Layout, Manifest, Piece
from ..targets import Target


class Loader:
    """Feeds one target, bucket by bucket; the target is called once a bucket with the tensors that it completes."""

    def __init__(self, manifest: Manifest, layout: Layout, target: Target) -> None:
        self._manifest = manifest
        self._layout = layout
        self._target = target
        self._aliases: dict[int, list[int]] = {}
        for index, entry in enumerate(manifest.tensors):
            if entry.alias is not None:
                self._aliases.setdefault(entry.alias, []).append(index)
        self._split: dict[int, torch.Tensor] = {}
        self._digests: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers for split tensors."""
        return sum(buffer.numel() for buffer in self._split.values())

    def load_bucket(self, bucket: int, slot: HostMemory, verify: bool) -> None:
        """Raises ViewsRetained, or what the target raised."""
        if bucket == 0:
            self._load_empty()
        window = slot.window()
        # In a function of its own: when that returns, no name here holds a view any more.
        self._load_pieces(self._layout.buckets[bucket], window, verify)
        del window
        self._end(slot, f"bucket {bucket}")

    def load_arena(self, arena: HostMemory, verify: bool) -> None:
        """Direct mode: all tensors at once, as views of the sender's arena."""
        window = arena.window()
        self._load_whole(window, verify)
        del window
        self._end(arena, "the sender's arena")

    def digests(self) -> bytes:
        """Of what the last verified step handed over, in manifest order."""
        values = (
            self._digests.get(index if entry.alias is None else entry.alias, 0)
            for index, entry in enumerate(self._manifest.tensors)
        )
        return b"".join(value.to_bytes(8, "little") for value in values)

    def _load_pieces(self, pieces: tuple[Piece, ...], window: torch.Tensor, verify: bool) -> None:
        named: list[tuple[str, torch.Tensor]] = []
        for piece in pieces:
            entry = self._manifest.tensors[piece.tensor]
            data = window[piece.bucket_offset : piece.bucket_offset + piece.nbytes]
            if piece.nbytes != entry.nbytes:
                buffer = self._split.get(piece.tensor)
                if buffer is None:
                    buffer = self._split[piece.tensor] = torch.empty(entry.nbytes, dtype=torch.uint8)
                buffer[piece.tensor_offset : piece.tensor_offset + piece.nbytes].copy_(data)
                if piece.tensor_offset + piece.nbytes < entry.nbytes:
                    continue
                data = buffer
            named += self._named(piece.tensor, data, verify)
        if named:
            self._target.load(named)

    def _load_whole(self, window: torch.Tensor, verify: bool) -> None:
        named: list[tuple[str, torch.Tensor]] = []
        for index, (entry, offset) in enumerate(
            zip(self._manifest.tensors, self._manifest.arena_offsets, strict=True)
        ):
            if entry.alias is None:
                named += self._named(index, window[offset : offset + entry.nbytes], verify)
        self._target.load(named)

    def _load_empty(self) -> None:
        """Tensors without bytes are in no bucket; an engine that counts its tensors wants them all the same."""
        named = [
            (entry.name, torch.empty(entry.shape, dtype=entry.torch_dtype))
            for entry in self._manifest.tensors
            if not entry.nbytes
        ]
        if named:
            self._target.load(named)

    def _named(self, index: int, data: torch.Tensor, verify: bool) -> list[tuple[str, torch.Tensor]]:
        entry = self._manifest.tensors[index]
        if entry.nbytes:
            tensor = data.view(entry.torch_dtype).view(entry.shape)
        else:
            tensor = torch.empty(entry.shape, dtype=entry.torch_dtype)
        if verify:
            self._digests[index] = tensor_digest(tensor)
        names = [entry.name, *(self._manifest.tensors[alias].name for alias in self._aliases.get(index, ()))]
        return [(name, tensor) for name in names]

    def _end(self, memory: HostMemory, what: str) -> None:
        try:
            memory.end_window()
        except ViewsRetained as error:
            raise ViewsRetained(f"{what}: {error}") from None
