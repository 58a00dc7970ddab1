"""Torch's handles: one export, one import, one release, read off torch's own counter; and every way it can go wrong."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from peer import Here, Peer
from test_arena import until
from weightsync_agent.cuda.copy_plan import DeviceCopyPlan
from weightsync_agent.cuda.driver import free_bytes, gpu_uuid
from weightsync_agent.cuda.export import ExportLedger, TorchExport, allocator_problem
from weightsync_agent.cuda.importer import TorchImport
from weightsync_agent.deadline import Deadline
from weightsync_agent.errors import ConfigError, TransportError
from weightsync_agent.protocol import TorchHandle

MIB = 1 << 20
KERNELS = 32 * MIB
"""What kernels that are loaded meanwhile may take of the device."""


def digest_of(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest()


def open_and_keep(here: Here, handle: TorchHandle) -> str:
    opened = here.kept["import"] = TorchImport(handle, 0)
    return digest_of(opened.tensor())


def release(here: Here) -> None:
    opened = here.kept.pop("import")
    opened.close()
    opened.close()


def release_under_a_view(here: Here) -> bool:
    opened = here.kept.pop("import")
    here.kept["view"] = opened.tensor()[5:6]
    opened.close()
    return bool(opened.views_alive())


def drop_view(here: Here) -> None:
    del here.kept["view"]


def refusal(here: Here, handle: TorchHandle) -> str:
    try:
        TorchImport(handle, 0)
    except TransportError as error:
        return str(error)
    return "taken"


def random_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)


def test_the_counter_reads_one_after_the_export_and_zero_after_the_release(device: torch.device, peer: Peer) -> None:
    tensor = random_bytes(3 * MIB, device)
    torch.cuda.synchronize()
    export = TorchExport(tensor.untyped_storage())
    assert export.counter() == 1
    assert peer.call(open_and_keep, export.handle) == digest_of(tensor)
    assert export.counter() == 1
    peer.call(release)
    assert export.counter() == 0
    assert export.wait_released(Deadline(0.0))
    assert export.retire() == 0
    assert export.stranded() == 0


def test_every_export_has_a_counter_of_its_own_for_fresh_and_for_persistent_memory(device: torch.device) -> None:
    persistent = random_bytes(MIB, device)
    exports = [TorchExport(random_bytes(MIB, device).untyped_storage()) for _ in range(5)]
    exports += [TorchExport(persistent.untyped_storage()) for _ in range(5)]
    assert len({(e.handle.counter_name, e.handle.counter_slot) for e in exports}) == 10
    assert [e.counter() for e in exports] == [1] * 10
    exports[7]._counters.write(exports[7].handle.counter_slot, 0)
    assert [e.counter() for e in exports] == [1] * 7 + [0] + [1] * 2
    for export in exports:
        export.retire(importer_gone=True)  # nobody ever opened them
    assert sum(e.stranded() for e in exports) == 0


def test_a_view_that_is_kept_delays_the_release_and_is_known(device: torch.device, peer: Peer) -> None:
    export = TorchExport(random_bytes(MIB, device).untyped_storage())
    peer.call(open_and_keep, export.handle)
    assert peer.call(release_under_a_view) is True
    assert export.counter() == 1
    assert not export.wait_released(Deadline(0.02))
    peer.call(drop_view)
    assert export.counter() == 0
    export.retire()


def test_a_released_export_cant_be_opened_again(device: torch.device, peer: Peer) -> None:
    export = TorchExport(random_bytes(MIB, device).untyped_storage())
    peer.call(open_and_keep, export.handle)
    peer.call(release)
    assert "already released" in peer.call(refusal, export.handle)
    assert export.counter() == 0
    export.retire()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"gpu": "00000000-1111-2222-3333-444444444444"}, "torch's handles need one GPU"),
        ({"storage_bytes": 1 << 40}, "and the allocation has"),
        ({"storage_offset_bytes": 1 << 40}, ""),
        ({"counter_name": "/torch_1_absent"}, "another /dev/shm"),
        ({"counter_slot": 20_000}, "10000 slots"),
        ({"handle": bytes(10)}, "of a kind that"),
        ({"event": b""}, "event handle"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_field_that_does_not_fit_is_refused_and_nothing_stays_open(
    device: torch.device, peer: Peer, changes: dict[str, Any], sentence: str
) -> None:
    export = TorchExport(random_bytes(MIB, device).untyped_storage())
    found = peer.call(refusal, export.handle.model_copy(update=changes))
    assert found != "taken"
    assert sentence in found
    assert export.counter() in ((0, 1) if sentence in ("", "and the allocation has") else (1,))
    assert peer.call(refusal, TorchExport(random_bytes(MIB, device).untyped_storage()).handle) == "taken"
    export.retire(importer_gone=True)


def test_the_other_spelling_of_the_uuid_is_taken(device: torch.device, peer: Peer) -> None:
    export = TorchExport(random_bytes(MIB, device).untyped_storage())
    assert export.handle.gpu == gpu_uuid(device)
    spelled = export.handle.model_copy(update={"gpu": f"GPU-{export.handle.gpu.upper()}"})
    peer.call(open_and_keep, spelled)
    peer.call(release)
    export.retire()


def test_ones_own_export_is_refused(device: torch.device) -> None:
    export = TorchExport(random_bytes(MIB, device).untyped_storage())
    with pytest.raises(TransportError, match="own PID"):
        TorchImport(export.handle, device)
    assert export.counter() == 1
    export.retire(importer_gone=True)


@pytest.mark.alone
def test_a_killed_importer_is_noticed_and_its_memory_comes_back(device: torch.device, victim: Peer) -> None:
    size = 256 * MIB
    ledger = ExportLedger(device, limit_bytes=size - 1)
    torch.cuda.empty_cache()
    before, allocated = free_bytes(device), torch.cuda.memory_allocated(device)
    tensor = random_bytes(size, device)
    export = ledger.export(tensor)
    victim.call(open_and_keep, export.handle)
    victim.kill()
    del tensor
    assert not export.wait_released(Deadline(0.05))
    assert ledger.unreleased == 1
    assert ledger.retire_all() == size, "not known to be dead: the memory stays, and is counted"
    assert torch.cuda.memory_allocated(device) - allocated == size
    with pytest.raises(TransportError, match="were never released"):
        ledger.export(random_bytes(MIB, device))
    assert export.retire(importer_gone=True) == 0
    assert ledger.stranded_bytes() == 0
    assert torch.cuda.memory_allocated(device) == allocated
    torch.cuda.empty_cache()
    assert until(lambda: free_bytes(device) >= before - KERNELS), f"{before - free_bytes(device)} bytes are stranded"


@pytest.mark.alone
def test_an_importer_that_is_known_to_be_dead_strands_nothing(device: torch.device, victim: Peer) -> None:
    size = 256 * MIB
    ledger = ExportLedger(device, limit_bytes=0)
    torch.cuda.empty_cache()
    before, allocated = free_bytes(device), torch.cuda.memory_allocated(device)
    tensor = random_bytes(size, device)
    victim.call(open_and_keep, ledger.export(tensor).handle)
    victim.kill()
    del tensor
    assert ledger.retire_all(importer_gone=True) == 0
    assert torch.cuda.memory_allocated(device) == allocated
    torch.cuda.empty_cache()
    assert until(lambda: free_bytes(device) >= before - KERNELS), f"{before - free_bytes(device)} bytes are stranded"


def copy_all(
    here: Here, handles: tuple[TorchHandle, ...], places: list[tuple[int, int]], sizes: list[int]
) -> list[str]:
    opened = [TorchImport(handle, 0) for handle in handles]
    copies = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in sizes]
    runs = [
        (opened[handle].pointer_at(offset, size), copy.data_ptr(), size)
        for (handle, offset), size, copy in zip(places, sizes, copies, strict=True)
        if size
    ]
    DeviceCopyPlan(np.array(runs), 0).run()
    torch.cuda.synchronize()
    for one in opened:
        one.close()
    return [digest_of(copy) for copy in copies]


def test_many_tensors_go_by_few_handles_and_are_found_in_them(device: torch.device, peer: Peer) -> None:
    sizes = [0, 1, 100, 5000, MIB // 2, 3 * MIB, 0, 12 * MIB, 33 * MIB, 7] + [2 * MIB] * 30
    tensors = [random_bytes(size, device) for size in sizes]
    tensors[9] = tensors[8][MIB : MIB + 7]
    torch.cuda.synchronize()
    ledger = ExportLedger(device, limit_bytes=0)
    handles, places = ledger.export_all(tensors)
    assert 0 < len(handles) < len(sizes) / 2
    assert peer.call(copy_all, handles, list(places), sizes) == [digest_of(tensor) for tensor in tensors]
    assert ledger.unreleased == 0
    assert ledger.retire_all() == 0


def place_outside(here: Here, handle: TorchHandle) -> str:
    with TorchImport(handle, 0) as opened:
        for offset, nbytes in ((-1, 1), (opened.allocation_bytes, 1), (0, opened.allocation_bytes + 1)):
            try:
                opened.pointer_at(offset, nbytes)
            except TransportError:
                continue
            return f"{nbytes} bytes at {offset} were taken"
        return str(opened.pointer_at(opened.allocation_bytes - 1, 1) - opened.base - opened.allocation_bytes)


def test_a_place_outside_the_allocation_is_refused(device: torch.device, peer: Peer) -> None:
    export = TorchExport(random_bytes(MIB, device).untyped_storage())
    assert peer.call(place_outside, export.handle) == "-1"
    assert export.counter() == 0
    export.retire()


def export_expandable(here: Here) -> tuple[str, str]:
    try:
        TorchExport(torch.zeros(MIB, dtype=torch.uint8, device="cuda").untyped_storage())
    except ConfigError as error:
        return allocator_problem() or "", str(error)
    return allocator_problem() or "", "exported"


def test_expandable_segments_are_refused_with_what_to_change() -> None:
    with Peer({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}) as other:
        known, found = other.call(export_expandable)
    assert "expandable_segments" in known
    assert "expandable_segments" in found or "cuMem pool" in found
