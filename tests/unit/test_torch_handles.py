"""What stands in the way of torch's handles is named at hello, and a counter is read where torch keeps it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from weightsync_agent.cuda.counters import FILE_BYTES, FOLDER, HEADER_BYTES, SLOTS, counter_file, owner_pid
from weightsync_agent.cuda.driver import normal_uuid
from weightsync_agent.cuda.export import handle_kind, why_torch_handles_fail
from weightsync_agent.errors import TransportError
from weightsync_agent.protocol import Identity

UUID = "6f2a9c1e-0000-1111-2222-333344445555"


def identity(**changes: object) -> Identity:
    fields: dict[str, object] = {"rank": 0, "pod": "p", "node": "n", "pid": 10, "uid": 1000, "gpu": UUID, "shm": "1:2"}
    return Identity.model_validate(fields | changes)


def test_two_processes_of_one_container_can_use_torch_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert why_torch_handles_fail(identity(), identity(rank=1, pid=11)) is None
    assert why_torch_handles_fail(identity(), identity(rank=1, pid=11, gpu=f"GPU-{UUID.upper()}")) is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"node": "m"}, "use NCCL"),
        ({"gpu": UUID.replace("6f", "7f")}, "torch's handles need one GPU"),
        ({"gpu": f"MIG-{UUID}"}, "MIG instances"),
        ({"gpu": ""}, "rank 1 has none"),
        ({"pid": 10}, "shareProcessNamespace"),
        ({"shm": "1:3"}, "at /dev/shm in both containers"),
        ({"shm": ""}, "at /dev/shm in both containers"),
        ({"uid": 0}, "runAsUser"),
    ],
)
def test_what_the_peer_lacks_is_said_with_what_to_change(changes: dict[str, object], sentence: str) -> None:
    found = why_torch_handles_fail(identity(), identity(**({"rank": 1, "pid": 11} | changes)))
    assert found is not None
    assert sentence in found


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_found_under_both_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments:True")
    found = why_torch_handles_fail(identity(), identity(rank=1, pid=11))
    assert found is not None
    assert "expandable_segments" in found


@pytest.mark.parametrize(
    ("spelling", "normal"), [(f"GPU-{UUID.upper()}", UUID), (UUID, UUID), (f"mig-{UUID}", f"MIG-{UUID}"), ("", "")]
)
def test_both_spellings_of_a_uuid_are_one(spelling: str, normal: str) -> None:
    assert normal_uuid(spelling) == normal
    assert normal_uuid(normal) == normal


def test_only_handles_of_plain_memory_are_taken() -> None:
    assert handle_kind(bytes(64)) == ""
    assert handle_kind(b"\x01c" + bytes(64)) == ""
    assert "expandable_segments" in handle_kind(b"\x01e" + bytes(100))
    assert handle_kind(b"\x01c" + bytes(63)) != ""
    assert handle_kind(b"") != ""


@pytest.fixture
def counters() -> tuple[str, torch.UntypedStorage]:
    """A file of torch's own making, as it makes that of its counters (RefcountedMapAllocator)."""
    storage = torch.zeros(SLOTS, dtype=torch.int64).untyped_storage()
    _, name, _ = storage._share_filename_cpu_()
    return name.decode(), storage  # torch removes the file with the storage, and aborts if it is gone by then


def test_a_counter_is_read_and_set_where_torch_keeps_it(counters: tuple[str, torch.UntypedStorage]) -> None:
    name, storage = counters
    words = torch.tensor([], dtype=torch.int64).set_(storage)
    words[7] = -1
    words[SLOTS - 1] = 1
    file = counter_file(name)
    assert file is counter_file(name)
    assert file.read(7) == (1 << 64) - 1
    assert file.read(SLOTS - 1) == 1
    file.write(7, 0)
    assert words[7] == 0
    assert owner_pid(name) == os.getpid()


def test_a_name_that_could_lead_elsewhere_is_refused() -> None:
    for name in ("/torch_1_../../etc/passwd", "/torch_x_1", "torch_1_2", "/etc/passwd", "/torch_1_2\n"):
        with pytest.raises(TransportError, match="no name of torch's counters"):
            counter_file(name)


def test_an_absent_file_is_another_dev_shm_and_a_wrong_size_another_torch() -> None:
    with pytest.raises(TransportError, match="another /dev/shm"):
        counter_file(f"/torch_{os.getpid()}_absent")
    path = Path(FOLDER / f"torch_{os.getpid()}_small")
    path.write_bytes(bytes(FILE_BYTES - HEADER_BYTES))
    try:
        with pytest.raises(TransportError, match="lays them out differently"):
            counter_file(f"/{path.name}")
    finally:
        path.unlink()
