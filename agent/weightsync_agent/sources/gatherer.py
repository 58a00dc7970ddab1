"""What a trainer's weights are to the sender: sent in place where they are whole, made on the way where not."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..manifest import ALIGNMENT, Manifest, align
from .lookup import Found, Lookup


class Gatherer:
    """Weights that are whole and sent as they are: nothing to gather. The base of the others.

    The trainer's rank that `leads` sends; it calls `gather` within a step and `conclude` after it, whatever became of
    the step. Every other rank calls `follow` once a step, which returns when the leader concludes.
    """

    plain = True
    """`tensors` are what is sent, so their memory may be read in place."""
    sharded = False
    """The trainer's ranks share the weights: there is no one place to read a tensor from."""
    leads = True
    """This process is the one that sends."""
    lookup: Lookup | None = None
    """Finds what the source holds by now; None: what it held at first."""
    renaming = ""
    """What was done to the names, for the status."""
    dropped = 0
    """Tensors of the source that are not sent."""

    def __init__(self, sent: Found, manifest: Manifest) -> None:
        self.names = sent.names
        self.tensors = sent.tensors
        """In manifest order, aliases included: the trainer's. One list for life, which the transport reads too."""
        self.manifest = manifest
        self._values = sent.values

    def gather(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """The whole tensors of these manifest entries: contiguous, in the manifest's dtype, valid until the next call
        (those that both calls name, until the one after it)."""
        return [self.tensors[index].detach().contiguous() for index in indices]

    def value(self, index: int) -> torch.Tensor:
        """What is sent of one tensor, before it is gathered or converted. To be called under `no_grad`."""
        make = self._values.get(index)
        return (self.tensors[index] if make is None else make()).detach()

    @property
    def computed(self) -> bool:
        """Some of what is sent is neither a tensor nor a converted one: only `gather` can make it."""
        return bool(self._values)

    def replace(self, sent: Found) -> None:
        """The source holds these by now, of the same shapes."""
        self.tensors[:] = sent.tensors
        self._values = sent.values

    def refresh(self) -> None:
        """Before a step, on every rank alike: takes what the source holds by now, where nobody reads it in place.

        Raises ConfigError where that is of another shape or dtype.
        """

    def conclude(self) -> None:
        """The leader's step is over. Exactly once a `step()`, in a `finally`; free of cost where no one follows."""

    def follow(self) -> None:
        """Takes part in the leader's gathering until it concludes."""

    def let_go(self) -> None:
        """Keeps nothing of the trainer's weights alive."""
        self.tensors = []
        self._values = {}
        self.lookup = None


class ConvertingGatherer(Gatherer):
    """Whole weights that are made on the way, one at a time: float32 masters sent as bfloat16, or LoRA merged."""

    plain = False

    def __init__(self, sent: Found, manifest: Manifest) -> None:
        super().__init__(sent, manifest)
        self._scratch = [torch.empty(0, dtype=torch.uint8)] * 2
        self._kept: dict[int, torch.Tensor] = {}
        self._kept_in = 0

    def gather(self, indices: Sequence[int]) -> list[torch.Tensor]:
        # A tensor that is split over buckets comes in consecutive calls: it is converted once. What both calls name
        # stays in the one scratch buffer, and the rest goes into the other.
        kept = {index: self._kept[index] for index in indices if index in self._kept}
        fresh = [index for index in dict.fromkeys(indices) if index not in kept]
        if fresh:
            place = 1 - self._kept_in if kept else self._kept_in
            views = self._views(place, fresh)
            with torch.no_grad():
                for index, view in views.items():
                    view.copy_(self.value(index))
            kept |= views
            # Two generations in one dict would outlive a buffer: only what this call made lies in `place` for certain.
            self._kept, self._kept_in = views, place
        return [kept[index] for index in indices]

    def conclude(self) -> None:
        self._kept = {}

    def let_go(self) -> None:
        super().let_go()
        self._kept = {}
        self._scratch = [torch.empty(0, dtype=torch.uint8)] * 2

    def _views(self, place: int, indices: list[int]) -> dict[int, torch.Tensor]:
        """Tensors in the manifest's shapes and dtypes over one scratch buffer, which grows once to what it needs."""
        entries = [self.manifest.tensors[index] for index in indices]
        need = sum(align(entry.nbytes) for entry in entries)
        device = self.tensors[indices[0]].device
        if self._scratch[place].numel() < need or self._scratch[place].device != device:
            self._scratch[place] = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            self._scratch[place] = torch.empty(max(need, ALIGNMENT), dtype=torch.uint8, device=device)
        views: dict[int, torch.Tensor] = {}
        start = 0
        for index, entry in zip(indices, entries, strict=True):
            raw = self._scratch[place][start : start + entry.nbytes]
            views[index] = raw.view(entry.torch_dtype).view(entry.shape)
            start += align(entry.nbytes)
        return views
