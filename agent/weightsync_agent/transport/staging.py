"""Hands a step's tensors from staging memory to a `load_weights` callable, and proves that it kept none.

Tensors that a bucket holds whole are passed as views; one that is split over buckets is put together first, in a
buffer that is kept for the agent's life.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..errors import ViewsRetained
from ..manifest import Layout, Manifest, Piece
from ..targets import Target

Open = Callable[[], torch.Tensor]
"""Gives staging memory as uint8: a new tensor at each call, so that its views can be told from others'."""


class Loader:
    """Feeds one target, bucket by bucket; the target is called once a bucket with the tensors that it completes."""

    def __init__(
        self,
        manifest: Manifest,
        layout: Layout,
        target: Target,
        device: torch.device,
        digests_of: Callable[[Sequence[torch.Tensor]], bytes],
    ) -> None:
        self._manifest = manifest
        self._layout = layout
        self._target = target
        self._device = device
        self._digests_of = digests_of
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

    def load_bucket(self, bucket: int, slot: Open, views_alive: Callable[[], bool], verify: bool) -> None:
        """Hands over what one bucket completes. Raises ViewsRetained, or what the target raised."""
        if bucket == 0:
            self._load_empty()
        # In a function of its own: when that returns, no name here holds a view any more.
        self._load_pieces(self._layout.buckets[bucket], slot, verify)
        self._end(views_alive, f"bucket {bucket}")

    def load_arena(self, arena: Open, views_alive: Callable[[], bool], verify: bool) -> None:
        """Direct mode: all tensors at once, as views of the sender's arena."""
        self._load_whole(arena, verify)
        self._end(views_alive, "the sender's arena")

    def digests(self) -> bytes:
        """Of what the last verified step handed over, in manifest order."""
        values = (
            self._digests.get(index if entry.alias is None else entry.alias, 0)
            for index, entry in enumerate(self._manifest.tensors)
        )
        return b"".join(value.to_bytes(8, "little") for value in values)

    def _load_pieces(self, pieces: tuple[Piece, ...], slot: Open, verify: bool) -> None:
        window = slot()
        complete: dict[int, torch.Tensor] = {}
        for piece in pieces:
            entry = self._manifest.tensors[piece.tensor]
            data = window[piece.bucket_offset : piece.bucket_offset + piece.nbytes]
            if piece.nbytes != entry.nbytes:
                buffer = self._split.get(piece.tensor)
                if buffer is None:
                    buffer = torch.empty(entry.nbytes, dtype=torch.uint8, device=self._device)
                    self._split[piece.tensor] = buffer
                buffer[piece.tensor_offset : piece.tensor_offset + piece.nbytes].copy_(data)
                if piece.tensor_offset + piece.nbytes < entry.nbytes:
                    continue
                data = buffer
            complete[piece.tensor] = data.view(entry.torch_dtype).view(entry.shape)
        self._hand_over(complete, verify)

    def _load_whole(self, arena: Open, verify: bool) -> None:
        window = arena()
        complete = {
            index: window[offset : offset + entry.nbytes].view(entry.torch_dtype).view(entry.shape)
            if entry.nbytes
            else torch.empty(entry.shape, dtype=entry.torch_dtype, device=self._device)
            for index, (entry, offset) in enumerate(
                zip(self._manifest.tensors, self._manifest.arena_offsets, strict=True)
            )
            if entry.alias is None
        }
        self._hand_over(complete, verify)

    def _hand_over(self, complete: dict[int, torch.Tensor], verify: bool) -> None:
        if not complete:
            return
        if verify:
            raw = self._digests_of(list(complete.values()))
            for place, index in enumerate(complete):
                self._digests[index] = int.from_bytes(raw[8 * place : 8 * place + 8], "little")
        self._target.load(
            [
                (self._manifest.tensors[named].name, tensor)
                for index, tensor in complete.items()
                for named in (index, *self._aliases.get(index, ()))
            ]
        )

    def _load_empty(self) -> None:
        """Tensors without bytes are in no bucket; an engine that counts its tensors wants them all the same."""
        named = [
            (entry.name, torch.empty(entry.shape, dtype=entry.torch_dtype, device=self._device))
            for entry in self._manifest.tensors
            if not entry.nbytes
        ]
        if named:
            self._target.load(named)

    @staticmethod
    def _end(views_alive: Callable[[], bool], what: str) -> None:
        if views_alive():
            raise ViewsRetained(
                f"{what}: a view of staging memory outlived the load, and whoever holds it would see later weights "
                "under its feet: copy the tensors that load_weights keeps (tensor.clone() or parameter.copy_(tensor))"
            )
