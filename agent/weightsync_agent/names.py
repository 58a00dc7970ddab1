"""Names of tensors: what wrappers put into them is left out, and the user's rules rename the rest.

A trainer that was wrapped calls `model.layers.0.mlp.up_proj.weight` by names such as
`module._orig_mod.model.layers.0.mlp.up_proj.weight`; an engine has never heard of the wrappers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import ValidationError
from weightsync_api.v1alpha1.names import NameRule

from .errors import ConfigError
from .manifest import Manifest

WRAPPER_PARTS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer")
"""Parts of a name that torch.compile, FSDP1, activation checkpointing and peft put in, at any place."""

WRAPPER_PREFIXES = ("module.", "base_model.model.")
"""What DistributedDataParallel and peft put before every name; before some of them it is the model's own."""

MAX_LISTED = 5

NameRules = Sequence[NameRule] | Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Renamed:
    """The names that are sent."""

    names: tuple[str | None, ...]
    """In the order of what was given; None: not sent."""
    said: str
    """What was done to them, for the log and the status; empty: nothing."""


def renamed(names: Sequence[str], rules: NameRules = ()) -> Renamed:
    """Leaves wrappers' parts out of `names`, then applies `rules` in order. An empty name is not sent.

    Raises ConfigError where a rule is none, or where two names become one.
    """
    checked = name_rules(rules)
    plain, left_out = without_wrappers(names)
    said = []
    if left_out:
        changed = sum(a != b for a, b in zip(plain, names, strict=True))
        said.append(f"{' and '.join(map(repr, left_out))} left out of {changed} names")
    done = [_apply(name, checked) for name in plain]
    if checked:
        changed = sum(a != b for a, b in zip(done, plain, strict=True) if a)
        said.append(f"{changed} renamed by names")
    dropped = [name for name, new in zip(plain, done, strict=True) if not new]
    if dropped:
        said.append(f"{len(dropped)} not sent: {listed(dropped)}")
    twice = {name for name, count in Counter(filter(None, done)).items() if count > 1}
    if twice and checked:
        one = min(twice)
        olds = [old for old, new in zip(names, done, strict=True) if new == one]
        raise ConfigError(f"names: {listed(olds)} all become {one!r}: make the patterns narrower")
    return Renamed(tuple(name or None for name in done), "; ".join(said))


def without_wrappers(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """`names` as the model inside all wrappers has them, and what was left out of them, in the words of the log.

    Names of which two would become one stay as they are.
    """
    plain, left_out = list(names), []
    for part in WRAPPER_PARTS:
        shorter = [_without(part, name) for name in plain]
        if shorter != plain:
            plain = shorter
            left_out.append(f"{part}.")
    # One prefix may hide another: DDP around a peft model, or a compiled one.
    while prefix := next((p for p in WRAPPER_PREFIXES if plain and all(_has(p, name) for name in plain)), ""):
        plain = [name.removeprefix(prefix) for name in plain]
        left_out.append(prefix)
    if len(set(plain)) < len(set(names)) or not all(plain):
        return list(names), []
    return plain, left_out


def unwrapped(manifest: Manifest) -> Manifest:
    """The manifest with wrappers' parts left out of its names: two that differ in wrappers alone become equal."""
    names, left_out = without_wrappers([entry.name for entry in manifest.tensors])
    if not left_out:
        return manifest
    entries = (e.model_copy(update={"name": name}) for e, name in zip(manifest.tensors, names, strict=True))
    return Manifest(tensors=tuple(entries))


def name_rules(rules: NameRules) -> list[NameRule]:
    """Rules, or (pattern, replacement) pairs, checked. Raises ConfigError that quotes the one at fault."""
    checked = []
    for rule in rules:
        if isinstance(rule, NameRule):
            checked.append(rule)
            continue
        try:
            pattern, replacement = rule
            checked.append(NameRule(pattern=pattern, replacement=replacement))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "rule"
            raise ConfigError(f"names: {rule!r}: {where}: {first['msg']}") from None
        except (TypeError, ValueError):
            raise ConfigError(f"names: {rule!r} is no pair of a pattern and a replacement") from None
    return checked


def listed(names: Iterable[str]) -> str:
    """The first few, and how many more."""
    found = list(names)
    return ", ".join(found[:MAX_LISTED]) + (f" and {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else "")


def _without(part: str, name: str) -> str:
    return ".".join(word for word in name.split(".") if word != part) if part in name else name


def _has(prefix: str, name: str) -> bool:
    return name.startswith(prefix) and len(name) > len(prefix)


def _apply(name: str, rules: Sequence[NameRule]) -> str:
    for rule in rules:
        # \1 is a group whatever digit follows; and nothing else in a replacement is special.
        template = re.sub(r"\\([1-9])", r"\\g<\1>", rule.replacement)
        name = re.sub(rule.pattern, template, name, flags=re.ASCII)
    return name
