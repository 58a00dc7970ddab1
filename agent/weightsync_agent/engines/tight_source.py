"""A trainer's weights as SGLang's flattened buckets: tensor behind tensor without gaps, the widest dtypes first.

SGLang 0.5.23 (srt/weight_sync/tensor_bucket.py) cuts a bucket by the sizes alone and refuses one in which a tensor's
first byte is no multiple of its dtype's size; by falling sizes of dtypes, none is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..manifest import Layout, Piece, TensorEntry
from ..names import NameRules
from ..sources.module import Weights
from .bucket_source import BucketSource


class TightSource(BucketSource):
    """Each chosen name has bytes of its own: a tied tensor whose both names the engine has goes twice."""

    def __init__(
        self, source: Weights, bucket_bytes: int, dtype: torch.dtype | None = None, names: NameRules = ()
    ) -> None:
        super().__init__(source, bucket_bytes, dtype, names, halves=1)
        self.choose([i for i, entry in enumerate(self.manifest.tensors) if entry.alias is None])

    def choose(self, indices: Sequence[int]) -> None:
        """Which entries of the manifest are sent, from the next `attach` on."""
        buckets: list[list[int]] = [[]]
        end = 0
        for index in indices:
            nbytes = self.manifest.tensors[index].nbytes
            if buckets[-1] and end + nbytes > self.half:
                buckets.append([])
                end = 0
            buckets[-1].append(index)
            end += nbytes
        self._lay_out(Layout(self.half, tuple(self._pieces(some) for some in buckets)), 1)
        self.sent_bytes = sum(self.manifest.tensors[index].nbytes for index in indices)

    def _pieces(self, indices: Sequence[int]) -> tuple[Piece, ...]:
        tensors, place, found = self.manifest.tensors, 0, []
        for index in sorted(indices, key=lambda i: -tensors[i].torch_dtype.itemsize):
            found.append(Piece(index, 0, place, tensors[index].nbytes))
            place += tensors[index].nbytes
        return tuple(found)

    def entries(self, bucket: int) -> list[TensorEntry]:
        """In the order of their bytes."""
        return [self.manifest.tensors[piece.tensor] for piece in self._layout.buckets[bucket]]

    def packed(self, bucket: int) -> torch.Tensor:
        """The bucket's bytes, uint8."""
        pieces = self._layout.buckets[bucket]
        return self._buffer[: pieces[-1].bucket_offset + pieces[-1].nbytes if pieces else 0]

    def views(self, bucket: int) -> list[tuple[str, torch.Tensor]]:
        """The bucket's tensors over the buffer."""
        found: list[tuple[str, torch.Tensor]] = []
        for piece in self._layout.buckets[bucket]:
            entry = self.manifest.tensors[piece.tensor]
            raw = self._buffer[piece.bucket_offset : piece.bucket_offset + piece.nbytes]
            found.append((entry.name, raw.view(entry.torch_dtype).view(entry.shape)))
        return found
