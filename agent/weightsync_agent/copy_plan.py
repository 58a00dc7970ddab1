"""A copy plan on the CPU: which tensors go where, worked out once and replayed at every step by one call.

`pack_pairs` and `unpack_pairs` make the pairs of one bucket; `direct_pairs` those of whole tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from .manifest import ALIGNMENT, Layout, Manifest, Piece, identity_of

Pair = tuple[torch.Tensor, torch.Tensor]
"""(source, destination): equal shape and dtype, both in host memory."""


class CopyPlan:
    """Copies every source into its destination, in order, by one call a run (lazily conjugated tensors: by one each).

    Pairs whose memory continues at both ends are merged, so that copying an arena into an arena is few copies.
    """

    def __init__(self, pairs: Sequence[Pair], *, over_padding: bool = False) -> None:
        """Tensors must keep their addresses for the plan's life.

        `over_padding`: gaps below ALIGNMENT that are equal at both ends are copied along. Only for an arena or slot
        on both sides, where nothing lies in the gaps; anywhere else it would overwrite a neighbour's bytes.
        Raises ValueError where a pair differs in dtype or shape, is not in host memory, or a destination's own
        elements overlap (an expanded tensor).
        """
        for source, destination in pairs:
            _check(source, destination)
        merged = _merge([pair for pair in pairs if pair[0].numel()], ALIGNMENT - 1 if over_padding else 0)
        self._calls = _calls(merged)
        self._copies = len(merged)
        self.nbytes = sum(source.numel() * source.element_size() for source, _ in merged)
        """Bytes that a run copies, padding included."""

    def __len__(self) -> int:
        """Copies a run makes."""
        return self._copies

    def run(self) -> None:
        """Copies. The bytes are in place when it returns. Gradients are not tracked."""
        # Inference mode instead of no_grad: it also skips the bookkeeping of views, a third of the cost of small
        # tensors. Version counters are still bumped, so autograd notices a weight changed under a pending backward.
        with torch.inference_mode():
            for destinations, sources in self._calls:
                if len(sources) == 1:
                    destinations[0].copy_(sources[0])
                else:
                    # On the CPU this is torch's own C++ loop of copy_: as good for a tensor of 1 GB as for 1 KB.
                    torch._foreach_copy_(destinations, sources)


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [nbytes] over a contiguous tensor of any dtype and shape, scalars and empty ones included.

    Raises ValueError where the bytes in memory are not the contiguous form: strided, or lazily conjugated or negated.
    """
    if not is_plain(tensor):
        raise ValueError(
            f"a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} has no view of its bytes: "
            "it is not contiguous, or lazily conjugated or negated"
        )
    return tensor.detach().reshape(-1).view(torch.uint8)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is its contiguous form, byte for byte."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


@dataclass
class Bounces:
    """Contiguous stand-ins, kept for life, of tensors that are both strided and split over buckets."""

    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    """By index in the manifest."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def of(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in of tensor `index`, made at the first call."""
        found = self.tensors.get(index)
        if found is None:
            found = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            self.tensors[index] = found
        return found


def pack_pairs(
    tensors: Sequence[torch.Tensor], pieces: Sequence[Piece], slot: torch.Tensor, bounces: Bounces
) -> list[Pair]:
    """The pairs that fill one bucket: from `tensors` (in manifest order) into `slot` (uint8, ALIGNMENT-aligned).

    `bounces`: one object for all buckets of a sender, which must be run in order.
    """
    pairs: list[Pair] = []
    for piece in pieces:
        tensor = tensors[piece.tensor].detach()
        target = slot[piece.bucket_offset : piece.bucket_offset + piece.nbytes]
        if is_plain(tensor):
            pairs.append((byte_view(tensor)[piece.tensor_offset : piece.tensor_offset + piece.nbytes], target))
        elif piece.nbytes == tensor.numel() * tensor.element_size():
            pairs.append((tensor, target.view(tensor.dtype).view(tensor.shape)))
        else:
            bounce = bounces.of(piece.tensor, tensor)
            if piece.tensor_offset == 0:
                pairs.append((tensor, bounce))
            pairs.append((byte_view(bounce)[piece.tensor_offset : piece.tensor_offset + piece.nbytes], target))
    return pairs


def unpack_pairs(
    tensors: Sequence[torch.Tensor],
    pieces: Sequence[Piece],
    slot: torch.Tensor,
    bounces: Bounces,
    also: Mapping[int, Sequence[int]] | None = None,
) -> list[Pair]:
    """The pairs that empty one bucket: from `slot` into `tensors`. `also`: see `separate_aliases`."""
    pairs: list[Pair] = []
    for piece in pieces:
        source = slot[piece.bucket_offset : piece.bucket_offset + piece.nbytes]
        for index in (piece.tensor, *(also or {}).get(piece.tensor, ())):
            tensor = tensors[index].detach()
            nbytes = tensor.numel() * tensor.element_size()
            if is_plain(tensor):
                pairs.append((source, byte_view(tensor)[piece.tensor_offset : piece.tensor_offset + piece.nbytes]))
            elif piece.nbytes == nbytes:
                pairs.append((source.view(tensor.dtype).view(tensor.shape), tensor))
            else:
                bounce = bounces.of(index, tensor)
                pairs.append((source, byte_view(bounce)[piece.tensor_offset : piece.tensor_offset + piece.nbytes]))
                if piece.tensor_offset + piece.nbytes == nbytes:
                    pairs.append((bounce, tensor))
    return pairs


def pack_plans(tensors: Sequence[torch.Tensor], layout: Layout, slots: Sequence[torch.Tensor]) -> list[CopyPlan]:
    """One plan a bucket, for the agent's life; bucket b goes through slot b modulo their number. Run in order."""
    bounces = Bounces()
    return [
        CopyPlan(pack_pairs(tensors, pieces, slots[bucket % len(slots)], bounces))
        for bucket, pieces in enumerate(layout.buckets)
    ]


def unpack_plans(
    tensors: Sequence[torch.Tensor],
    layout: Layout,
    slots: Sequence[torch.Tensor],
    also: Mapping[int, Sequence[int]] | None = None,
) -> list[CopyPlan]:
    """The receiver's counterpart of `pack_plans`."""
    bounces = Bounces()
    return [
        CopyPlan(unpack_pairs(tensors, pieces, slots[bucket % len(slots)], bounces, also))
        for bucket, pieces in enumerate(layout.buckets)
    ]


def separate_aliases(manifest: Manifest, tensors: Sequence[torch.Tensor]) -> dict[int, list[int]]:
    """Tied at the sender, apart at the receiver: index of each first -> aliases that need the bytes too.

    `tensors`: the receiver's, in manifest order.
    """
    written: dict[int, set[tuple[object, ...]]] = {}
    found: dict[int, list[int]] = {}
    for index, entry in enumerate(manifest.tensors):
        if entry.alias is None:
            continue
        known = written.setdefault(entry.alias, {identity_of(tensors[entry.alias])})
        if identity_of(tensors[index]) not in known:
            known.add(identity_of(tensors[index]))
            found.setdefault(entry.alias, []).append(index)
    return found


def direct_pairs(
    manifest: Manifest, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]
) -> list[Pair]:
    """The pairs of whole tensors, both lists in manifest order; an alias only where the destinations are apart."""
    also = separate_aliases(manifest, destinations)
    pairs: list[Pair] = []
    for index, entry in enumerate(manifest.tensors):
        if entry.alias is not None or not entry.nbytes:
            continue
        targets = (index, *also.get(index, ()))
        pairs += [(sources[index].detach(), destinations[target].detach()) for target in targets]
    return pairs


def _check(source: torch.Tensor, destination: torch.Tensor) -> None:
    if source.shape != destination.shape or source.dtype != destination.dtype:
        raise ValueError(
            f"a copy of {source.dtype} {list(source.shape)} into {destination.dtype} {list(destination.shape)}"
        )
    if source.device.type != "cpu" or destination.device.type != "cpu":
        raise ValueError(f"a CPU copy plan can't copy from {source.device} to {destination.device}")
    if any(size > 1 and stride == 0 for size, stride in zip(destination.shape, destination.stride(), strict=True)):
        raise ValueError(
            f"the destination of shape {list(destination.shape)} is expanded (strides {list(destination.stride())}): "
            "its elements share memory, so it can't hold different weights; make it contiguous"
        )


def _calls(pairs: list[Pair]) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """(destinations, sources) of each call: one, but for lazily conjugated or negated tensors, which go alone.

    foreach resolves those before it copies anything, so it would read a source that the same call has yet to fill.
    """
    calls: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    alone = True
    for source, destination in pairs:
        lazy = source.is_conj() or source.is_neg() or destination.is_conj() or destination.is_neg()
        if alone or lazy:
            calls.append(([], []))
        calls[-1][0].append(destination)
        calls[-1][1].append(source)
        alone = lazy
    return calls


def _merge(pairs: list[Pair], largest_gap: int) -> list[Pair]:
    """Joins neighbours whose bytes continue at both ends; plain pairs become byte views on the way.

    Byte views also make all copies one kernel, whatever the dtypes.
    """
    merged: list[Pair] = []
    run: list[Pair] = []

    def flush() -> None:
        if len(run) == 1:
            merged.append(run[0])
        elif run:
            merged.append((_span(run[0][0], run[-1][0]), _span(run[0][1], run[-1][1])))
        run.clear()

    for source, destination in pairs:
        if not (is_plain(source) and is_plain(destination)):
            flush()
            merged.append((source.detach(), destination.detach()))
            continue
        pair = byte_view(source), byte_view(destination)
        if run:
            gaps = {_gap(before, after) for before, after in zip(run[-1], pair, strict=True)}
            if len(gaps) != 1 or not 0 <= next(iter(gaps)) <= largest_gap:
                flush()
        run.append(pair)
    flush()
    return merged


def _gap(before: torch.Tensor, after: torch.Tensor) -> int:
    """Bytes between the end of one byte view and the start of the next; -1 where they are of different storages."""
    first, second = before.untyped_storage(), after.untyped_storage()
    if first.data_ptr() != second.data_ptr() or first.nbytes() != second.nbytes():
        return -1
    return int(after.storage_offset()) - int(before.storage_offset()) - before.numel()


def _span(first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """uint8 view from the start of one byte view to the end of another, of the same storage."""
    start = int(first.storage_offset())
    return first.as_strided((int(last.storage_offset()) + last.numel() - start,), (1,), start)
