"""A checkpoint whose file is rewritten, cut, replaced or taken away at any moment of its being read: whole, or refused.

The seed is printed; WEIGHTSYNC_FUZZ_SEED runs one again.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file
from weightsync_agent.deadline import Deadline
from weightsync_agent.errors import SourceError
from weightsync_agent.sources import safetensors_file
from weightsync_agent.sources.checkpoint import CheckpointSource
from weightsync_agent.sources.safetensors_file import FileIdentity

SECONDS = 6.0
VERSIONS = 40
TICK_NS = 40_000_000
SIZES = {"version": 1, "odd": 7, "large": 30_000, "small": 100}


def weights(version: int) -> dict[str, torch.Tensor]:
    """Each element of each tensor follows from the version."""
    return {name: torch.full((size,), version, dtype=torch.int64) for name, size in SIZES.items()}


def version_of(named: dict[str, torch.Tensor]) -> int:
    """The version of which every element of every tensor is. Fails where they are of several."""
    found = {int(value) for tensor in named.values() for value in tensor.unique()}
    assert len(found) == 1, f"of versions {sorted(found)}"
    return found.pop()


class Writer:
    """Does to the file what a bad writer may do, at the moments of `strike`: each leaves it whole, or to be mended."""

    def __init__(self, path: Path, dice: random.Random) -> None:
        self.path = path
        self.version = 1
        self.written = {1}
        """Versions that were whole at some moment."""
        self._dice = dice
        self._mend: Callable[[], None] | None = None
        save_file(weights(1), path)

    def strike(self) -> None:
        if self._mend is not None:
            self.mend()
        elif self._dice.random() < 0.2 and self.version < VERSIONS:
            self._dice.choice([self._replace, self._rewrite, self._rewrite_a_part, self._cut, self._take_away])()

    def mend(self) -> None:
        """Finishes what was begun."""
        mend, self._mend = self._mend, None
        if mend is not None:
            mend()
            self.written.add(self.version)

    def _next(self) -> bytes:
        self.version += 1
        # Headers of several lengths: offsets of tensors move.
        return save(weights(self.version), metadata={"padding": "x" * self._dice.choice([0, 0, 8, 400])})

    def _replace(self) -> None:
        whole = self._next()
        aside = self.path.with_name("aside")
        aside.write_bytes(whole)
        aside.replace(self.path)
        self.written.add(self.version)

    def _in_place(self, whole: bytes, first: int, last: int) -> None:
        with self.path.open("r+b") as file:
            file.seek(first)
            file.write(whole[first:last])
            if last == len(whole):
                file.truncate()

    def _rewrite(self) -> None:
        whole = self._next()
        self._in_place(whole, 0, len(whole))
        self.written.add(self.version)

    def _rewrite_a_part(self) -> None:
        whole = self._next()
        first, last = sorted(self._dice.sample(range(len(whole)), 2))
        self._in_place(whole, first, last)
        self._mend = lambda: self._in_place(whole, 0, len(whole))

    def _cut(self) -> None:
        whole = self._next()
        os.truncate(self.path, self._dice.randrange(self.path.stat().st_size))
        self._mend = lambda: self._in_place(whole, 0, len(whole))

    def _take_away(self) -> None:
        whole = self._next()
        self.path.unlink()
        if self._dice.random() < 0.5:
            self.path.mkdir()

        def mend() -> None:
            if self.path.is_dir():
                self.path.rmdir()
            self.path.write_bytes(whole)

        self._mend = mend


def test_a_write_within_a_tick_of_the_file_systems_clock_is_noticed(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "model.safetensors"
    preadv, left = os.preadv, [3]

    def striking_preadv(*arguments: object) -> int:
        left[0] -= 1
        if left[0] == 0:
            with path.open("r+b") as file:
                file.write(save(weights(2)))
        return preadv(*arguments)  # type: ignore[arg-type]

    def coarse(status: os.stat_result) -> FileIdentity:
        """As kernels before 6.13 stamp, but for a slower clock: a busy machine takes a while for what follows."""
        return FileIdentity(status.st_size, status.st_mtime_ns // TICK_NS * TICK_NS + 1, status.st_ino)

    monkeypatch.setattr(FileIdentity, "of", coarse)
    monkeypatch.setattr(safetensors_file, "_READ_BYTES", 20_000)
    monkeypatch.setattr(safetensors_file.os, "preadv", striking_preadv)
    while time.time_ns() % TICK_NS > TICK_NS // 4:
        pass  # all that follows is within one tick
    path.write_bytes(save(weights(1)))
    source = CheckpointSource(path)
    named = source.attach(torch.zeros(source.manifest.arena_bytes, dtype=torch.uint8))
    assert source.refresh(1, Deadline(30))
    assert version_of(named) == 2


def test_weights_of_several_versions_are_never_called_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = int(os.environ.get("WEIGHTSYNC_FUZZ_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"WEIGHTSYNC_FUZZ_SEED={seed}")
    dice = random.Random(seed)
    writer = Writer(tmp_path / "model.safetensors", dice)
    preadv, opens = os.preadv, os.open

    def striking_preadv(*arguments: object) -> int:
        writer.strike()
        return preadv(*arguments)  # type: ignore[arg-type]

    def striking_open(path: object, *arguments: object) -> int:
        if path == writer.path:
            writer.strike()
        return opens(path, *arguments)  # type: ignore[call-overload]

    source = CheckpointSource(writer.path)
    named = source.attach(torch.zeros(source.manifest.arena_bytes, dtype=torch.uint8))
    monkeypatch.setattr(safetensors_file, "_READ_BYTES", 20_000)
    whole, refused, until = [], 0, time.monotonic() + SECONDS
    with monkeypatch.context() as patch:
        patch.setattr(safetensors_file.os, "preadv", striking_preadv)
        patch.setattr(safetensors_file.os, "open", striking_open)
        while time.monotonic() < until and writer.version < VERSIONS:
            try:
                if source.refresh(len(whole) + 1, Deadline(0.3)):
                    whole.append(version_of(named))
            except SourceError:
                refused += 1
            if source.whole:
                assert version_of(named) in writer.written
            else:
                writer.mend()
    writer.mend()
    print(f"{writer.version} versions were written, {len(whole)} taken, {refused} looks refused")
    assert whole == sorted(whole)
    # In the calm after it, the last version is there whole.
    if not whole or whole[-1] != writer.version:
        assert source.refresh(len(whole) + 1, Deadline(30))
    assert version_of(named) == writer.version
