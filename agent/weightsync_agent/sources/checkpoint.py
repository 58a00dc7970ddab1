"""Weights from safetensors files: one file, one checkpoint's directory, or a directory of versions that is watched.

A version counts once it is whole: every shard is there, has a valid header and exactly the size that the header says,
and every tensor of the index is in its shard. A half-written one is never sent; the newest whole one wins.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..deadline import Deadline
from ..errors import SourceError
from ..manifest import Manifest, TensorEntry, differences, summarize
from .base import Source
from .safetensors_file import FileIdentity, IncompleteError, Shard, read_shard, read_tensors

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
SETTLE_SECONDS = 0.1
"""A new version must look the same twice, this far apart: a writer may give a file its size before its bytes."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_INDEX_BYTES = 100_000_000
_VERSION = re.compile(r"^(?!\.|_|tmp)(?P<stem>.*?)(?P<number>\d{1,18})$")
"""Such as step-12, checkpoint-300, global_step_7, 42. Names that say that they are temporary are none."""
_NUMBERED_SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{1,6})-of-(?P<count>\d{1,6})\.safetensors$")
_READERS = 4


@dataclass(frozen=True)
class Version:
    """One whole checkpoint."""

    name: str
    """Name of its directory or file, such as step-12."""
    number: int
    """Its place among versions; 0 where the path is one checkpoint, which can only be replaced."""
    shards: tuple[Shard, ...]
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    """(name, dtype, shape) in the order of shards and of bytes in them."""

    @property
    def identity(self) -> tuple[object, ...]:
        """Differs for other files and for the same written anew; not for a directory that was renamed when done."""
        return (self.number, *((shard.path.name, shard.identity) for shard in self.shards))

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for shard in self.shards for stored in shard.tensors.values())

    def newer_than(self, other: Version | None) -> bool:
        """A higher number, or the same number written anew. Numbers that go back are never newer."""
        return other is None or (self.number >= other.number and self.identity != other.identity)


class _Index(BaseModel):
    model_config = ConfigDict(extra="ignore")

    weight_map: dict[str, str] = Field(min_length=1)


class Checkpoint:
    """The files at one path: finds whole versions there, and reads them."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.problems: list[str] = []
        """Why versions newer than what the last scan gave do not count, newest first."""
        self._shards: dict[tuple[Path, FileIdentity], Shard] = {}

    def current(self) -> Version:
        """The newest whole version. Raises SourceError, with the sentence that says why there is none."""
        self.problems = []
        path = self.path
        try:
            there, file = path.exists(), path.is_file()
        except OSError as error:
            raise SourceError(f"checkpoint path {path} can't be read: {error.strerror}") from None
        if not there:
            raise SourceError(f"checkpoint path {path} doesn't exist")
        if file:
            if path.name.endswith(".index.json"):
                return self._version(path.parent, 0, index=path)
            return self._single(path)
        if path.name.endswith(".safetensors"):
            raise SourceError(f"checkpoint path {path} is a directory, and its name is that of a safetensors file")
        if _holds_checkpoint(path):
            return self._version(path, 0)
        return self._newest(path)

    def wait_for_newer(self, than: Version | None, deadline: Deadline) -> Version | None:
        """The newest whole version once there is one newer than `than` (None: any); None at the deadline.

        What is missing or half-written is waited for; why it does not count is in `problems`.
        """
        while True:
            found = self._look()
            if found is not None and found.newer_than(than):
                time.sleep(min(SETTLE_SECONDS, deadline.remaining))
                again = self._look()
                if again is not None and again.identity == found.identity:
                    return found
            if deadline.passed:
                return None
            time.sleep(min(POLL_SECONDS, deadline.remaining))

    def check(self, version: Version, named: Mapping[str, torch.Tensor]) -> None:
        """Raises SourceError that lists the differences where the version's tensors are not those of `named`."""
        wanted = _manifest((k, str(v.dtype).removeprefix("torch."), tuple(v.shape)) for k, v in named.items())
        found = differences(_manifest(version.tensors), wanted)
        if found:
            raise SourceError(f"checkpoint {version.name} doesn't fit what is sent: {summarize(found)}")

    def read_into(self, version: Version, named: Mapping[str, torch.Tensor]) -> None:
        """Reads every tensor of `named` from the version's files, each byte once.

        Raises SourceError where they differ (before any byte is read), or a file can't be read or was changed.
        """
        self.check(version, named)
        if len(version.shards) == 1:
            read_tensors(version.shards[0], named)
            return
        with ThreadPoolExecutor(min(_READERS, len(version.shards))) as pool:
            for done in [pool.submit(read_tensors, shard, named) for shard in version.shards]:
                done.result()

    def _look(self) -> Version | None:
        try:
            return self.current()
        except SourceError as error:
            self.problems = [str(error)]
            return None

    def _newest(self, path: Path) -> Version:
        candidates = sorted(_versions(path), reverse=True)
        if not candidates:
            raise SourceError(
                f"checkpoint path {path} holds no safetensors: no *.safetensors file, no index, and no directory of a "
                "version such as step-12 or checkpoint-300"
            )
        problems: list[str] = []
        for number, name in candidates:
            try:
                version = self._version(path / name, number)
            except SourceError as error:
                problems.append(str(error))
                continue
            self.problems = problems
            return version
        kind = IncompleteError if len(problems) > 1 else SourceError
        more = f" (and {len(problems) - 1} older versions, none of them whole)" if len(problems) > 1 else ""
        raise kind(f"{problems[0]}{more}")

    def _version(self, directory: Path, number: int, index: Path | None = None) -> Version:
        try:
            names = sorted((entry.name for entry in directory.iterdir()), key=_natural)
        except OSError as error:
            raise SourceError(f"checkpoint {directory} can't be read: {error.strerror}") from None
        index = index or _index_of(directory, names)
        if index is not None:
            return self._indexed(directory, number, index)
        files = [_SINGLE] if _SINGLE in names else [name for name in names if name.endswith(".safetensors")]
        if not files:
            raise IncompleteError(f"checkpoint {directory} holds no safetensors")
        _all_numbered(directory, files)
        shards = tuple(self._shard(directory / name) for name in files)
        owner: dict[str, Path] = {}
        for shard in shards:
            for name in shard.tensors:
                if name in owner:
                    raise SourceError(
                        f"checkpoint {directory}: tensor {name} is both in {owner[name].name} and in "
                        f"{shard.path.name}; several versions need a directory each, such as step-12"
                    )
                owner[name] = shard.path
        return _whole(directory.name, number, shards)

    def _indexed(self, directory: Path, number: int, index: Path) -> Version:
        weight_map = _read_index(index)
        for name, file in weight_map.items():
            if "/" in file or file in ("", ".", ".."):
                raise SourceError(f"{index}: tensor {name} is said to be in {file!r}, which is no name of a file")
        shards: list[Shard] = []
        for file in sorted(set(weight_map.values()), key=_natural):
            if not (directory / file).exists():
                needed = sum(value == file for value in weight_map.values())
                raise IncompleteError(
                    f"shard {directory / file} is missing: {index.name} says that {needed} tensors are in it"
                )
            shard = self._shard(directory / file)
            listed = {name: stored for name, stored in shard.tensors.items() if weight_map.get(name) == file}
            shards.append(Shard(shard.path, shard.identity, listed))
        stored = {name for shard in shards for name in shard.tensors}
        lost = [name for name in weight_map if name not in stored]
        if lost:
            more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
            raise SourceError(f"{index} says that tensor {lost[0]} is in {weight_map[lost[0]]}, which hasn't it{more}")
        return _whole(directory.name, number, tuple(shards))

    def _single(self, path: Path) -> Version:
        return _whole(path.name, 0, (self._shard(path),))

    def _shard(self, path: Path) -> Shard:
        """The validated header, which is parsed again only where the file has changed."""
        try:
            key = (path, FileIdentity.of(path.stat()))
        except OSError:
            return read_shard(path)
        known = self._shards.get(key)
        if known is None:
            known = read_shard(path)
            if len(self._shards) > 4096:
                self._shards.clear()
            self._shards[path, known.identity] = known
        return known


class CheckpointSource(Source):
    """The sender's source: the newest whole version first, then (with `watch`) every newer one as a step."""

    def __init__(self, path: str | Path, *, watch: bool = True) -> None:
        """Raises SourceError where there is no whole version."""
        self.checkpoint = Checkpoint(path)
        self.watch = watch
        self._next: Version | None = self.checkpoint.current()
        super().__init__(_manifest(self._next.tensors))
        self.version: Version | None = None
        """What the tensors hold; None: nothing yet, or a mixture."""
        self._told: list[str] = []

    @property
    def whole(self) -> bool:
        return self.version is not None

    @property
    def finished(self) -> bool:
        return self.whole and not self.watch

    def refresh(self, step: int, deadline: Deadline) -> bool:
        """Waits up to the deadline for a newer version and reads it. A file that changes under us is read again."""
        if self.finished:
            return False
        changed: IncompleteError | None = None
        while True:
            found = self._next or self.checkpoint.wait_for_newer(self.version, deadline)
            self._next = None
            self._tell()
            if found is None:
                if changed is not None:
                    raise changed
                return False
            self.checkpoint.check(found, self.named)
            # From here on the tensors are mixed: whatever is whole next, the same version included, must be read.
            self.version = None
            try:
                self.checkpoint.read_into(found, self.named)
            except IncompleteError as error:
                changed = error
                continue
            self.version = found
            return True

    def _tell(self) -> None:
        if self.checkpoint.problems != self._told:
            self._told = self.checkpoint.problems
            for problem in self._told[:5]:
                log.warning("a newer version is not sent: %s", problem)


def _manifest(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> Manifest:
    try:
        return Manifest(
            tensors=tuple(TensorEntry(name=name, dtype=dtype, shape=shape) for name, dtype, shape in tensors)
        )
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise SourceError(f"the checkpoint's tensors can't be sent: {first['msg']}") from None


def _whole(name: str, number: int, shards: tuple[Shard, ...]) -> Version:
    tensors = tuple((s.name, s.dtype, s.shape) for shard in shards for s in shard.tensors.values())
    if not tensors:
        raise SourceError(f"checkpoint {shards[0].path.parent if len(shards) > 1 else shards[0].path} holds no tensor")
    return Version(name, number, shards, tensors)


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts step-9 before step-10."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part)


def _holds_checkpoint(directory: Path) -> bool:
    try:
        return any(e.name.endswith((".safetensors", ".safetensors.index.json")) for e in directory.iterdir())
    except OSError as error:
        raise SourceError(f"checkpoint path {directory} can't be read: {error.strerror}") from None


def _versions(path: Path) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for entry in path.iterdir():
        match = _VERSION.match(entry.name)
        if match and entry.is_dir():
            found.append((int(match["number"]), entry.name))
    return found


def _index_of(directory: Path, names: list[str]) -> Path | None:
    if _INDEX in names:
        return directory / _INDEX
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    if len(indexes) > 1:
        raise SourceError(
            f"checkpoint {directory} has {len(indexes)} indexes and none is {_INDEX}: name one as the path"
        )
    return directory / indexes[0] if indexes else None


def _read_index(index: Path) -> dict[str, str]:
    try:
        with index.open("rb") as file:
            text = file.read(_MAX_INDEX_BYTES + 1)
    except OSError as error:
        raise SourceError(f"{index} can't be read: {error.strerror}") from None
    if len(text) > _MAX_INDEX_BYTES:
        raise SourceError(f"{index} is larger than {_MAX_INDEX_BYTES} bytes: it is no index")
    try:
        return _Index.model_validate_json(text).weight_map
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:200] or "the file"
        raise IncompleteError(f"{index} is no index of a checkpoint: {where}: {first['msg']}") from None


def _all_numbered(directory: Path, files: list[str]) -> None:
    """Without an index, shards that say `-of-N` in their names must all be there."""
    present: dict[tuple[str, int], set[int]] = {}
    for name in files:
        match = _NUMBERED_SHARD.match(name)
        if match:
            present.setdefault((match["stem"], int(match["count"])), set()).add(int(match["number"]))
    for (stem, count), numbers in present.items():
        lost = [number for number in range(1, min(count, 100_000) + 1) if number not in numbers]
        if lost:
            raise IncompleteError(
                f"checkpoint {directory}: shard {lost[0]} of {count} ({stem}-{lost[0]:05}-of-{count:05}.safetensors) "
                "is missing"
            )
