"""Which tensors a source holds now. A framework moves a parameter in two ways: it gives the same object other memory,
or it puts another object in its place (`load_state_dict(assign=True)`, an entry of a dict).

The second way costs nothing to watch. A dict's values are read instead of a list of them. A module says by itself that
it is given something: torch calls a hook then. Going through a module's own dicts would take 0.2 us a tensor more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from ..errors import ConfigError


@dataclass(frozen=True)
class Found:
    """What a source holds, or what is sent of it, in one order."""

    names: list[str]
    tensors: list[torch.Tensor]
    values: dict[int, Callable[[], torch.Tensor]]
    """By index: makes what is sent of a tensor. Those without one are sent as they are."""

    def only(self, indices: Sequence[int]) -> Found:
        """These alone, in the order of `indices`."""
        return Found(
            [self.names[index] for index in indices],
            [self.tensors[index] for index in indices],
            {place: self.values[index] for place, index in enumerate(indices) if index in self.values},
        )


class Lookup:
    """Looks a source's tensors up again, by name.

    Not seen: what is written into a module's own `_parameters` or `_buffers` while no parameter moves. What came out of
    an iterator is what it was.
    """

    def __init__(
        self,
        source: object,
        find: Callable[[Any], Found],
        first: Found,
        kept: Sequence[int],
    ) -> None:
        """`find`: reads a source. `first`: what it found at first; `kept`: indices of those that are sent."""
        self._find = find
        self._names = names = list(first.names)
        self._kept = list(kept)
        self._dict: dict[str, torch.Tensor] | None = source if isinstance(source, dict) else None
        # Else the dict holds other things than tensors.
        self._reads = not any(index in first.values for index in kept)
        self._selectors = None
        if len(kept) < len(names):
            sent = set(kept)
            self._selectors = [index in sent for index in range(len(names))]
        self._module = weakref.ref(source) if isinstance(source, torch.nn.Module) else None
        self._watch = _Watch(source) if isinstance(source, torch.nn.Module) else None

    def at_hand(self, known: list[torch.Tensor]) -> Collection[torch.Tensor] | None:
        """What is sent, as the source holds it now, without Python code for each; None: call `again`.

        `known`: what it held.
        """
        if self._watch is not None:
            return None if self._watch.given else known
        if self._dict is None or not self._reads:
            return known
        if list(self._dict) != self._names:
            return None
        values = self._dict.values()
        return values if self._selectors is None else list(compress(values, self._selectors))

    def again(self) -> Found | None:
        """What is sent, looked up by the source's names. None: there is nowhere to look.

        Raises ConfigError where a name is gone, and as `gatherer_for` does.
        """
        source = self._dict if self._module is None else self._module()
        if source is None:
            return None
        if self._watch is not None:
            self._watch.given = False
        try:
            found = self._find(source)
            place = {name: index for index, name in enumerate(found.names)}
            if gone := [name for name in self._names if name not in place]:
                raise ConfigError(
                    f"the source has no {', '.join(gone[:20])}{f' and {len(gone) - 20} more' if gone[20:] else ''} any "
                    "more: close this Sender and make another"
                )
        except BaseException:
            if self._watch is not None:
                self._watch.given = True
            raise
        if isinstance(source, torch.nn.Module) and self._watch is not None:
            self._watch.modules = set(map(id, source.modules()))
        return found.only([place[self._names[index]] for index in self._kept])


class _Watch:
    """Notes when a module, or one within it, is given a parameter, a buffer or a module."""

    def __init__(self, root: torch.nn.Module) -> None:
        self.modules = set(map(id, root.modules()))
        """Their identities. One that is gone may lend its own to another: then `given` says too much, never too
        little."""
        self.given = False
        mine = weakref.ref(self)

        def note(module: torch.nn.Module, name: str, given: object) -> None:
            watch = mine()
            if watch is not None and id(module) in watch.modules:
                watch.given = True

        handles = [
            torch_module.register_module_parameter_registration_hook(note),
            torch_module.register_module_buffer_registration_hook(note),
            torch_module.register_module_module_registration_hook(note),
        ]
        weakref.finalize(self, _remove, handles).atexit = False


def _remove(handles: list[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
