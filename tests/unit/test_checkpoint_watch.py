"""A directory of checkpoints that is watched: each new whole version once, and never a mixture."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from checkpoints import attached, cut, read, replace, same, save_sharded, save_version, weights
from safetensors.torch import save_file
from weightsync_agent.deadline import Deadline
from weightsync_agent.errors import SourceError
from weightsync_agent.sources import open_source
from weightsync_agent.sources.checkpoint import Checkpoint, CheckpointSource
from weightsync_agent.sources.safetensors_file import IncompleteError
from weightsync_api.v1alpha1.spec import CheckpointSource as CheckpointSpec
from weightsync_api.v1alpha1.spec import Source as SourceSpec


def test_a_half_written_version_never_counts_and_the_older_whole_one_does(tmp_path: Path) -> None:
    save_version(tmp_path, "step-1", 1)
    save_version(tmp_path, "step-2", 2)
    save_sharded(tmp_path / "step-3", weights(3), 2)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.current().name == "step-3"
    cut(tmp_path / "step-3" / "model-00002-of-00002.safetensors", 5)
    cut(tmp_path / "step-2" / "model.safetensors", 1)
    assert checkpoint.current().name == "step-1"
    assert len(checkpoint.problems) == 2
    assert "step-3/model-00002-of-00002.safetensors is truncated" in checkpoint.problems[0]
    (tmp_path / "step-1" / "model.safetensors").unlink()
    with pytest.raises(IncompleteError, match=r"step-3.*and 2 older versions, none of them whole"):
        checkpoint.current()


def test_every_state_of_a_version_being_written_is_either_refused_or_whole(tmp_path: Path) -> None:
    """Byte by byte, as a writer would: no prefix but the whole is ever taken."""
    done = save_version(tmp_path / "done", "step-2", 2) / "model.safetensors"
    raw = done.read_bytes()
    save_version(tmp_path / "w", "step-1", 1)
    (tmp_path / "w" / "step-2").mkdir()
    growing = tmp_path / "w" / "step-2" / "model.safetensors"
    checkpoint = Checkpoint(tmp_path / "w")
    for size in sorted({*range(0, len(raw), 97), *range(32), len(raw) - 1}):
        growing.write_bytes(raw[:size])
        assert checkpoint.current().name == "step-1", size
    growing.write_bytes(raw)
    assert checkpoint.current().name == "step-2"


def test_a_watcher_sees_each_new_version_once(tmp_path: Path) -> None:
    save_version(tmp_path, "step-1", 1)
    source = CheckpointSource(tmp_path)
    named = attached(source)
    assert source.refresh(1, Deadline(0))
    assert same(named, weights(1))
    assert not source.refresh(2, Deadline(0))
    save_version(tmp_path, "step-2", 2)
    save_version(tmp_path, "step-4", 4)
    assert source.refresh(2, Deadline(30))
    assert same(named, weights(4))
    assert source.version is not None
    assert source.version.name == "step-4"
    save_version(tmp_path, "step-3", 3)  # older than what was sent
    assert not source.refresh(3, Deadline(0))
    assert not source.finished


def test_a_waiting_watcher_takes_a_version_as_soon_as_it_is_whole(tmp_path: Path) -> None:
    save_version(tmp_path, "step-1", 1)
    checkpoint = Checkpoint(tmp_path)
    first = checkpoint.current()

    def write() -> None:
        save_sharded(tmp_path / "step-2", weights(2), 3)

    writer = threading.Thread(target=write)
    writer.start()
    found = checkpoint.wait_for_newer(first, Deadline(60))
    writer.join()
    assert found is not None
    assert found.name == "step-2"
    assert same(read(checkpoint, found), weights(2))


def test_an_empty_directory_can_be_waited_on(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "later")
    assert checkpoint.wait_for_newer(None, Deadline(0)) is None
    assert "doesn't exist" in checkpoint.problems[0]
    save_version(tmp_path / "later", "step-1", 1)
    found = checkpoint.wait_for_newer(None, Deadline(30))
    assert found is not None
    assert found.name == "step-1"


def test_a_file_that_is_replaced_is_a_new_version(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(weights(1), path)
    source = CheckpointSource(path)
    named = attached(source)
    assert source.refresh(1, Deadline(0))
    replace(path, 2)
    assert source.refresh(2, Deadline(30))
    assert same(named, weights(2))


def test_a_link_that_is_moved_to_another_checkpoint_is_a_new_version(tmp_path: Path) -> None:
    for seed in (1, 2):
        save_version(tmp_path / "all", f"run{seed}x", seed)
    link = tmp_path / "latest"
    link.symlink_to(tmp_path / "all" / "run1x")
    checkpoint = Checkpoint(link)
    first = checkpoint.current()
    link.unlink()
    link.symlink_to(tmp_path / "all" / "run2x")
    found = checkpoint.wait_for_newer(first, Deadline(30))
    assert found is not None
    assert same(read(checkpoint, found), weights(2))


def test_a_version_renamed_when_it_was_done_is_not_sent_twice(tmp_path: Path) -> None:
    save_version(tmp_path, "writing-5", 5)
    checkpoint = Checkpoint(tmp_path)
    first = checkpoint.current()
    (tmp_path / "writing-5").rename(tmp_path / "step-5")
    assert checkpoint.wait_for_newer(first, Deadline(0.5)) is None


def test_a_file_that_changed_since_it_was_judged_is_not_taken_for_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(weights(1), path)
    checkpoint = Checkpoint(path)
    version = checkpoint.current()
    replace(path, 2)
    with pytest.raises(IncompleteError, match="was changed while it was being read"):
        read(checkpoint, version)


def test_a_source_whose_file_changed_before_it_was_read_reads_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(weights(1), path)
    source = CheckpointSource(path, watch=False)
    named = attached(source)
    replace(path, 2)
    assert source.refresh(1, Deadline(30))
    assert same(named, weights(2))


def test_weights_mixed_by_a_writer_are_never_called_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second file is replaced after the first was read: the tensors are of two versions."""
    save_sharded(tmp_path, weights(1), 2)
    source = CheckpointSource(tmp_path)
    named = attached(source)
    assert not source.whole
    assert source.refresh(1, Deadline(0))
    assert source.whole
    save_sharded(tmp_path, weights(2), 2)
    found = source.checkpoint.current()
    os.truncate(tmp_path / "model-00002-of-00002.safetensors", 40)
    # What a look between the two writes of the trainer gave.
    monkeypatch.setattr(source, "_next", found)
    with pytest.raises(IncompleteError, match=r"model-00002-of-00002\.safetensors was changed while it was being read"):
        source.refresh(2, Deadline(0))
    assert not source.whole
    assert not source.refresh(2, Deadline(0))
    assert not source.whole
    save_sharded(tmp_path, weights(3), 2)
    assert source.refresh(2, Deadline(30))
    assert source.whole
    assert same(named, weights(3))


def test_a_new_version_of_other_shapes_is_an_error_that_names_it(tmp_path: Path) -> None:
    save_version(tmp_path, "step-1", 1)
    source = CheckpointSource(tmp_path)
    attached(source)
    assert source.refresh(1, Deadline(0))
    (tmp_path / "step-2").mkdir()
    save_file({"embed": torch.zeros(3)}, tmp_path / "step-2" / "model.safetensors")
    with pytest.raises(SourceError, match=r"checkpoint step-2 doesn't fit what is sent: embed"):
        source.refresh(2, Deadline(30))
    assert same(source.named, weights(1))
    assert source.whole


def test_without_watching_the_newest_is_sent_once(tmp_path: Path) -> None:
    save_version(tmp_path, "step-1", 1)
    spec = SourceSpec(checkpoint=CheckpointSpec(path=str(tmp_path), watch=False))
    source = open_source(spec)
    attached(source)
    assert not source.finished
    assert source.refresh(1, Deadline(0))
    assert source.finished
    save_version(tmp_path, "step-2", 2)
    assert not source.refresh(2, Deadline(0))
    assert same(source.named, weights(1))


def test_a_source_of_nothing_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="doesn't exist"):
        open_source(SourceSpec(checkpoint=CheckpointSpec(path=str(tmp_path / "none"))))
