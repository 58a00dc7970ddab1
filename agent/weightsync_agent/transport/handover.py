"""Handing what a collective brought to a `load_weights` callable, an operation at a time, and keeping its digests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..digest import DIGEST_BYTES
from ..manifest import Manifest, Piece
from ..targets import Target
from .group_plan import Op

Digests = Callable[[Op, Sequence[torch.Tensor]], bytes]
"""8 bytes little-endian for each of an operation's tensors, in order."""


class Handover:
    """Knows which names lie where in an operation's staging buffer. An alias is handed over with its first.

    Tensors of no bytes come first, in a call of their own: no collective carries them.
    """

    def __init__(self, manifest: Manifest, target: Target, device: torch.device, digests: Digests) -> None:
        self._manifest = manifest
        self._target = target
        self._device = device
        self._digests_of = digests
        self._names: dict[int, list[str]] = {}
        for index, entry in enumerate(manifest.tensors):
            self._names.setdefault(index if entry.alias is None else entry.alias, []).append(entry.name)
        self._found: dict[int, bytes] = {}

    def begin(self) -> None:
        """A new step: forgets the last one's digests and hands over the tensors of no bytes."""
        self._found = {}
        empty = [
            (entry.name, torch.empty(entry.shape, dtype=entry.torch_dtype, device=self._device))
            for entry in self._manifest.tensors
            if not entry.nbytes
        ]
        if empty:
            self._target.load(empty)

    def load(self, op: Op, staging: torch.Tensor, verify: bool) -> None:
        """Hands over one operation's tensors as views of `staging` (uint8, at the pieces' bucket offsets).

        The caller proves afterwards that no view of `staging` is alive; this keeps none. Raises what the target raises.
        """
        views = [self._view(piece, staging) for piece in op.pieces]
        if verify:
            digests = self._digests_of(op, views)
            for position, piece in enumerate(op.pieces):
                self._found[piece.tensor] = digests[position * DIGEST_BYTES : (position + 1) * DIGEST_BYTES]
        named = [
            (name, view) for piece, view in zip(op.pieces, views, strict=True) for name in self._names[piece.tensor]
        ]
        del views
        self._target.load(named)

    def digests(self) -> bytes:
        """Of what was handed over since `begin` with `verify` set, in manifest order."""
        nothing = bytes(DIGEST_BYTES)
        return b"".join(
            self._found.get(index if entry.alias is None else entry.alias, nothing)
            for index, entry in enumerate(self._manifest.tensors)
        )

    def _view(self, piece: Piece, staging: torch.Tensor) -> torch.Tensor:
        entry = self._manifest.tensors[piece.tensor]
        part = staging[piece.bucket_offset : piece.bucket_offset + piece.nbytes]
        return part.view(entry.torch_dtype).view(entry.shape)
