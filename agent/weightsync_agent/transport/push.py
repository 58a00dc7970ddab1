"""Where both processes share a GPU: the sender writes into the receivers' own tensors.

Two processes take turns on a GPU, 0.25 ms each, so a step in which one fills slots and the other drains them spends a
third of its time on turns. Here one process does all the copying, and no slot is needed but for what has to be gathered
first. What makes it safe:

- The receiver exports its tensors by torch's handles once, when it joins, and the sender imports them once.
- Within a step the receiver says when its engine has let go of the weights (READY), the sender when all is written
  (WRITTEN). Both are words of the page that they share.
- The sender's kernel looks at a word of the receiver's GPU memory, the permission, whenever one of its programs starts,
  and copies nothing where it is 0. The receiver takes it back when a step breaks off, and for good when it closes. So a
  sender that was stopped in mid-step and runs on an hour later writes nothing, though it still has the memory mapped.
  It is given again only to the next step, which that sender can't begin before it has done with the one before.
- A program that has started may still write, 64 KiB at most, and the GPU may have set its process aside in that moment.
  So after a step that broke off the receiver lets SETTLE_SECONDS go by before anybody may write again, unless the
  sender said that nothing of it is at work any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from ..cuda.arena import DeviceArena, bytes_at
from ..cuda.copy_plan import DeviceCopyPlan, Runs, merge_runs, piece_runs
from ..cuda.digest import DeviceDigest
from ..cuda.export import ExportLedger, why_torch_handles_fail
from ..cuda.importer import TorchImport
from ..errors import ConfigError, TransportError, WeightSyncError
from ..identity import is_gone
from ..manifest import Layout, Manifest, TensorEntry
from ..protocol import Identity, Joined

READY_WORD, WRITTEN_WORD, STILL_WORD = 16, 32, 48
"""The flag page's words, each the step's number (`step_word`): once the receiver's engine stands still; once all is
written; and once the sender has nothing queued any more though the step broke off."""

SETTLE_SECONDS = 1.0
"""Longer than any process waits for its turn on a GPU, by two orders."""

STRANDED_LIMIT = 1 << 40
"""Nothing is lost with an importer that dies: what was exported is the engine's own memory and stays in use."""


_withdrawn: list[tuple[ExportLedger, torch.Tensor]] = []
"""Permissions that were taken back for good, as long as a sender may still have them mapped: given back to the
allocator, their bytes would be somebody's data, or the next sender's permission, and a late kernel would read those."""


def step_word(step: int) -> int:
    """1 to 2^30 - 1: differs from the step's before, and fits a flag."""
    return step % 0x3FFFFFFF + 1


class Targets:
    """A receiver's tensors, exported to its one sender."""

    def __init__(self, tensors: Sequence[torch.Tensor], sender: Identity, own: Identity, device: torch.device) -> None:
        """`tensors`: plain, in manifest order. Raises TransportError with why they can't be exported."""
        if problem := why_torch_handles_fail(own, sender):
            raise TransportError(problem)
        _withdrawn[:] = [(ledger, permit) for ledger, permit in _withdrawn if ledger.stranded_bytes()]
        self._permitted = self._closed = False
        self._sender = sender
        self._ledger = ExportLedger(device, STRANDED_LIMIT)
        self._permit = torch.ones(1, dtype=torch.int32, device=device)
        try:
            self.handles, placements = self._ledger.export_all([*tensors, self._permit])
            self.placements, self.permit = placements[:-1], placements[-1]
            self._permitted = True
            torch.cuda.synchronize(device)
        except (ConfigError, TransportError) as problem:
            self._closed = True
            self._ledger.retire_all(importer_gone=True)  # nobody was told of them
            raise TransportError(str(problem)) from None

    def allow(self) -> None:
        """Lets the sender write, once all that it was let write before has settled."""
        if not self._permitted:
            self._permit.fill_(1)
            torch.cuda.current_stream(self._permit.device).synchronize()
            self._permitted = True

    def forbid(self) -> None:
        """Lets no kernel of the sender's write from now on; one program may still be at it for SETTLE_SECONDS."""
        if self._permitted:
            self._permitted = False
            self._permit.zero_()
            torch.cuda.current_stream(self._permit.device).synchronize()

    def close(self) -> None:
        """Takes the permission back for good. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.forbid()
        if self._ledger.retire_all(importer_gone=is_gone(self._sender)):
            _withdrawn.append((self._ledger, self._permit))


class Pushed:
    """One receiver's tensors, as the sender has them mapped, and the plans that write them."""

    def __init__(self, joined: Joined, manifest: Manifest, device: torch.device) -> None:
        """Maps; `from_tensors` or `from_buckets` follows.

        Raises TransportError: what the receiver says can't be, or can't be opened. Nothing is mapped then.
        """
        if joined.placements is None or len(joined.placements) != len(manifest.tensors):
            raise TransportError("the receiver does not say where each of its tensors lies")
        self._device = device
        self._manifest = manifest
        self._imports: list[TorchImport] = []
        self._digest: DeviceDigest | None = None
        self._plans: list[DeviceCopyPlan] = []
        self._permit: torch.Tensor | None = None
        try:
            for handle in joined.targets:
                self._imports.append(TorchImport(handle, device))
            self._pointers = self._places(joined.placements)
            self._permit = self._permission(joined)
        except WeightSyncError as problem:
            self.close()
            raise TransportError(str(problem)) from None

    def from_tensors(self, sources: Sequence[torch.Tensor]) -> None:
        """All in one launch, from the trainer's tensors in manifest order, plain; another floating dtype is converted.

        Raises TransportError where this GPU or torch can't do it.
        """
        try:
            if all(
                source.dtype == entry.torch_dtype for source, entry in zip(sources, self._manifest.tensors, strict=True)
            ):
                plan = DeviceCopyPlan(self._runs(sources), self._device, recorded=True, permit=self._permit)
            else:
                plan = DeviceCopyPlan.of_tensors(self._pairs(sources), self._device, recorded=True, permit=self._permit)
        except ValueError as problem:
            raise TransportError(str(problem)) from None
        self._plans = [plan]

    def from_buckets(self, layout: Layout, slots: Sequence[DeviceArena]) -> None:
        """A launch for each bucket, from the slot that it is gathered into. Raises as `from_tensors`."""
        pointers = np.array(self._pointers, np.int64)
        also: dict[int, list[int]] = {}
        for index, entry in enumerate(self._manifest.tensors):
            if entry.alias is not None and self._pointers[index] not in (0, self._pointers[entry.alias]):
                also.setdefault(entry.alias, []).append(index)
        try:
            for bucket, pieces in enumerate(layout.buckets):
                widened = [
                    replace(piece, tensor=i) for piece in pieces for i in (piece.tensor, *also.get(piece.tensor, ()))
                ]
                runs = piece_runs(widened, pointers, slots[bucket % len(slots)].pointer, into="Tensors")
                self._plans.append(DeviceCopyPlan(runs, self._device, recorded=True, permit=self._permit))
        except ValueError as problem:
            raise TransportError(str(problem)) from None

    def _permission(self, joined: Joined) -> torch.Tensor:
        handle, offset = joined.permit or (len(self._imports), 0)
        if handle >= len(self._imports) or offset % 4:
            raise TransportError("the receiver does not say where its permission lies")
        return bytes_at(self._imports[handle].pointer_at(offset, 4), 4)[0].view(torch.int32)

    def _places(self, placements: tuple[tuple[int, int], ...]) -> list[int]:
        """Address of each of the receiver's tensors in this process; 0 for one without bytes."""
        found: list[int] = []
        for (handle, offset), entry in zip(placements, self._manifest.tensors, strict=True):
            if not entry.nbytes:
                found.append(0)
                continue
            if not 0 <= handle < len(self._imports):
                raise TransportError(
                    f"the receiver places {entry.name} in allocation {handle}, which it did not export"
                )
            if offset % entry.torch_dtype.itemsize:
                raise TransportError(f"the receiver places {entry.name} ({entry.dtype}) at byte {offset}")
            found.append(self._imports[handle].pointer_at(offset, entry.nbytes))
        return found

    def _runs(self, sources: Sequence[torch.Tensor]) -> Runs:
        """(source, destination, bytes) of tensors that are copied as they are: by addresses, for 20,000 tensors too."""
        rows = [(source.data_ptr(), pointer, entry.nbytes) for source, pointer, entry in self._written(sources)]
        return merge_runs(np.array(rows, np.int64).reshape(-1, 3))

    def _pairs(self, sources: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (source, bytes_at(pointer, entry.nbytes)[0].view(entry.torch_dtype).view(entry.shape))
            for source, pointer, entry in self._written(sources)
        ]

    def _written(self, sources: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, int, TensorEntry]]:
        """Each of the receiver's tensors once that has bytes: where it is read, where it is written, and what it is."""
        for source, pointer, entry in zip(sources, self._pointers, self._manifest.tensors, strict=True):
            if pointer and not (entry.alias is not None and pointer == self._pointers[entry.alias]):
                yield source, pointer, entry

    @property
    def exported(self) -> int:
        return len(self._imports)

    def run(self, stream: torch.cuda.Stream, bucket: int = 0) -> None:
        """Queues all of it, or one bucket of `from_buckets`."""
        self._plans[bucket].run(stream)

    def digests(self, stream: torch.cuda.Stream) -> bytes:
        """Of what lies there now."""
        if self._digest is None:
            rows = [
                (pointer, entry.nbytes, index, 0)
                for index, (pointer, entry) in enumerate(zip(self._pointers, self._manifest.tensors, strict=True))
            ]
            self._digest = DeviceDigest(rows, len(rows), self._device)
        return self._digest.bytes(stream)

    def close(self) -> None:
        """Releases every import, exactly once. Idempotent."""
        self._plans, self._digest, self._permit = [], None, None
        for opened in self._imports:
            opened.close()
        self._imports = []
