"""Where a peer's buckets go. Every bucket is checked against the target before a byte of it is written.

The peers announce no manifest: what the later buckets hold is known when they come. So a mismatch in the second bucket
finds the first one written, and the target tainted; `atomic` keeps the step aside until it is whole, at the price of
one more copy of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..copy_plan import byte_view, is_plain
from ..errors import ManifestMismatch
from ..manifest import Manifest, TensorEntry, describe, differences, summarize
from ..targets import Target, TensorTarget
from .bucket_messages import Placed
from .lent_memory import Borrowed, BorrowedCuda, borrow

_NOT_SENT = "but it is not sent"


class BucketTarget:
    """One receiver's target, for its life."""

    def __init__(
        self, target: Target, device: torch.device, expect: Manifest | None = None, *, atomic: bool = False
    ) -> None:
        """`expect`: what a `load_weights` callable is to be given; a module or dict knows its own."""
        self._target = target
        self.device = device
        self._tensors = target.tensors if isinstance(target, TensorTarget) else None
        self._expected = describe(self._tensors) if self._tensors is not None else expect
        self._atomic = atomic
        self._seen: dict[str, TensorEntry] = {}
        self._aside: dict[str, torch.Tensor] = {}
        self.written = False
        """A byte of this step is in the target, or was handed to it."""

    @property
    def tensors(self) -> int:
        return len(self._seen)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self._seen.values())

    def begin(self) -> None:
        self._seen, self._aside, self.written = {}, {}, False

    def check(self, placed: Sequence[Placed], buffer_bytes: int, peer: str) -> None:
        """Names, shapes, dtypes, places. Raises ManifestMismatch that lists every difference of this bucket."""
        found: list[str] = []
        entries: dict[str, TensorEntry] = {}
        for one in placed:
            entry = one.entry
            if entry.name in self._seen or entry.name in entries:
                found.append(f"{entry.name}: sent twice in one step, and which one is meant can't be told")
            elif one.handle is None and one.offset + entry.nbytes > buffer_bytes:
                found.append(f"{entry.name}: bytes {one.offset} to {one.offset + entry.nbytes} of {buffer_bytes}")
            entries.setdefault(entry.name, entry)
        if self._expected is not None:
            found += [
                line
                for line in differences(Manifest(tensors=tuple(entries.values())), self._expected)
                if not line.endswith(_NOT_SENT)
            ]
            if found and all(line.startswith("likely cause") for line in found):
                found = []
        if found:
            raise ManifestMismatch(f"what {peer} sends does not fit: {summarize(found)}")
        self._seen |= entries

    def take(self, placed: Sequence[Placed], buffer: Borrowed, what: str, peer: str) -> None:
        """Brings one checked bucket into the target. Raises ViewsRetained, or what the target raised."""
        own = {p.entry.name: borrow(p.handle, self.device, peer) for p in placed if p.handle is not None}
        try:
            # In a function of its own: when that returns, no name here holds a view any more.
            self._take(placed, buffer, own)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            for borrowed in (buffer, *own.values()):
                borrowed.end(what)
        finally:
            for borrowed in own.values():
                borrowed.close()

    def _take(self, placed: Sequence[Placed], buffer: Borrowed, own: dict[str, Borrowed]) -> None:
        window = buffer.window()
        if self._tensors is None or self._atomic:
            named = [(p.entry.name, self._view(p, window, own)) for p in placed]
            if self._atomic:
                self._aside |= {name: tensor.clone() for name, tensor in named}
            elif named:
                self.written = True
                self._target.load(named)
            return
        with torch.no_grad():
            for one in placed:
                destination = self._tensors[one.entry.name].detach()
                self.written = True
                if one.handle is None and is_plain(destination):
                    # As bytes: the peer's offset need not be a multiple of the dtype's size.
                    byte_view(destination).copy_(window[one.offset : one.offset + one.entry.nbytes])
                else:
                    destination.copy_(self._view(one, window, own))

    def _view(self, placed: Placed, window: torch.Tensor, own: dict[str, Borrowed]) -> torch.Tensor:
        entry = placed.entry
        if placed.handle is not None:
            borrowed = own[entry.name]
            assert isinstance(borrowed, BorrowedCuda)
            return borrowed.tensor()
        raw = window[placed.offset : placed.offset + entry.nbytes]
        if placed.offset % entry.torch_dtype.itemsize:
            raw = raw.clone()
        return raw.view(entry.torch_dtype).view(entry.shape).to(self.device)

    def finish(self, peer: str) -> None:
        """The step is whole, or raises ManifestMismatch with what did not come."""
        if self._expected is not None:
            found = differences(Manifest(tensors=tuple(self._seen.values())), self._expected)
            if found:
                raise ManifestMismatch(f"what {peer} sent does not fit: {summarize(found)}")
        if not self._atomic:
            return
        aside, self._aside = self._aside, {}
        self.written = True
        if self._tensors is None:
            self._target.load(list(aside.items()))
            return
        with torch.no_grad():
            for name, tensor in aside.items():
                self._tensors[name].detach().copy_(tensor)
