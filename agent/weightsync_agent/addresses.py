"""Whether the trainer's tensors still lie where they were when the transport's copy plans were made; else where.

Looking is a loop in C, and yet takes 0.1 us a tensor where all is in the CPU's caches and 0.4 us where nothing is: each
tensor is two or three places in memory of its own. So a sender of many tensors looks while its receivers copy, and
commits the step only then (carrier.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter, ne

import torch
from torch.distributed.tensor import DTensor

from .adopt import check_adoptable
from .errors import ConfigError
from .manifest import ties
from .sources.gatherer import Gatherer

MANY_TENSORS = 1_000
MANY_ON_GPU = 64
"""From here on looking costs more than the Commit message that looking later costs; on a GPU, whose copies leave the
host free, sooner."""

_ADDRESS = torch.Tensor.data_ptr
_ELEMENTS = torch.Tensor.numel
_OF_A_KIND = ("shape", "dtype", "device", "layout")
"""What must stay of a tensor that moves."""


class Moved(Exception):
    """Tensors lie elsewhere, and can be sent from there. For `Sender.step`, which sees to it."""

    def __init__(self, indices: Sequence[int]) -> None:
        super().__init__(f"{len(indices)} tensors moved")
        self.indices = indices
        """In manifest order."""


class Addresses:
    """Remembers address and number of elements of each tensor, and finds those that changed."""

    def __init__(self, gatherer: Gatherer, arena: torch.Tensor | None = None) -> None:
        """`arena`: what the tensors are to lie in. Shards have no addresses that anybody reads: nothing is found."""
        self._gatherer = gatherer
        self._arena = arena
        tensors = [] if gatherer.sharded else gatherer.tensors
        self._now: Collection[torch.Tensor] = tensors
        self._kinds = {key: list(map(attrgetter(key), tensors)) for key in _OF_A_KIND if tensors}
        self._ties = ties(tensors)
        self._elements = list(map(_ELEMENTS, tensors))
        self.settle()

    @property
    def many(self) -> bool:
        on_gpu = bool(self._kinds) and self._kinds["device"][0].type == "cuda"
        return len(self._elements) >= (MANY_ON_GPU if on_gpu else MANY_TENSORS)

    def settle(self) -> None:
        """What is sent is read from where the tensors lie now."""
        self._addresses = list(map(_ADDRESS, self._gatherer.tensors)) if self._kinds else []

    def let_go(self) -> None:
        """Keeps no tensor alive, and finds nothing from now on."""
        self._now, self._kinds, self._arena = (), {}, None
        self._addresses, self._elements, self._ties = [], [], {}

    def check(self, consequence: str) -> None:
        """What is sent from an old address is old bytes, or another's.

        Raises Moved where tensors moved; ConfigError, with their names, where they can't be sent from where they are.
        `consequence`: what became of the step, for the sentence.
        """
        if not self._kinds:
            return
        lookup, known = self._gatherer.lookup, self._gatherer.tensors
        now = known if lookup is None else lookup.at_hand(known)
        try:
            if now is not None and list(map(_ADDRESS, now)) == self._addresses:
                self._now = now
                return
        except (TypeError, RuntimeError):
            pass  # a dict holds something without an address by now: what follows says which
        try:
            found = None if lookup is None else lookup.again()
        except ConfigError as error:
            raise ConfigError(f"{error} ({consequence})") from None
        self._check_kinds(known if found is None else found.tensors, consequence)
        if found is not None:
            self._gatherer.replace(found)
        self._now = known
        pairs = zip(map(_ADDRESS, known), self._addresses, strict=True)
        if moved := [index for index, (after, before) in enumerate(pairs) if after != before]:
            raise Moved(moved)

    def check_sizes(self, consequence: str) -> None:
        """A tensor that was resized where it lies is sent as it was before. Raises ConfigError, as `check`."""
        now = list(map(_ELEMENTS, self._now))
        if now == self._elements:
            return
        triples = zip(self._gatherer.names, now, self._elements, strict=False)
        resized = [f"{name} (from {before} to {after} elements)" for name, after, before in triples if after != before]
        raise _changed(resized, "were resized", consequence)

    def _check_kinds(self, tensors: Sequence[torch.Tensor], consequence: str) -> None:
        names = self._gatherer.names
        sharded = any(issubclass(kind, DTensor) for kind in set(map(type, tensors)))
        # One at a time: as many tuples in one list would set the collector off.
        if sharded or any(any(map(ne, map(attrgetter(k), tensors), had)) for k, had in self._kinds.items()):
            before = zip(*self._kinds.values(), strict=True)
            triples = zip(names, before, tensors, strict=True)
            pairs = [(name, _said(*had), _said_of(tensor)) for name, had, tensor in triples]
            changed = [f"{name} (from {had} to {now})" for name, had, now in pairs if had != now]
            raise _changed(changed, "changed", consequence)
        tied, had = ties(tensors), self._ties
        if other := [index for index in sorted(tied.keys() | had.keys()) if tied.get(index) != had.get(index)]:
            said = [
                f"{names[i]} ({f'tied to {names[tied[i]]}' if i in tied else f'untied from {names[had[i]]}'})"
                for i in other
            ]
            raise _changed(said, "changed", consequence)
        if self._arena is not None:
            try:
                check_adoptable(self._gatherer.manifest, tensors, self._arena)
            except ConfigError as error:
                raise ConfigError(f"tensors moved since the Sender was made, and {consequence}: {error}") from None


def _said(shape: torch.Size, dtype: torch.dtype, device: torch.device, layout: torch.layout) -> str:
    return f"{dtype} {list(shape)} {str(layout).removeprefix('torch.')} on {device}"


def _said_of(tensor: torch.Tensor) -> str:
    said = _said(*(getattr(tensor, key) for key in _OF_A_KIND))
    return f"shards of {said}" if isinstance(tensor, DTensor) else said


def _changed(names: list[str], how: str, consequence: str) -> ConfigError:
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ConfigError(
        f"{', '.join(names[:20])}{more} {how} since the Sender was made (`param.data = ...`, `resize_`, "
        f"`model.to(...)`), and {consequence}: write weights in place (`param.data.copy_(...)`), or close this Sender "
        "and make another"
    )
