"""The first seed fault, as a test that can fail: 4 transfers of 3 chunks leave the producer's memory flat, because one
export meets one import and one release; a consumer that opens the handle once a chunk strands every buffer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peer import Here, Peer
from weightsync_agent.cuda.export import WRAPPED, TorchExport
from weightsync_agent.cuda.importer import TorchImport
from weightsync_agent.protocol import TorchHandle

MIB = 1 << 20
CHUNK = 64 * MIB
TRANSFERS = 4
CHUNKS = 3


def read_once_opened(here: Here, handle: TorchHandle, last: bool) -> int:
    """A right consumer: opens at the first chunk, releases after the last."""
    opened = here.kept.get("import") or TorchImport(handle, 0)
    here.kept["import"] = opened
    value = int(opened.tensor()[-1])
    if last:
        here.kept.pop("import").close()
    return value


def read_by_rebuilding(here: Here, handle: TorchHandle, last: bool) -> int:
    """The fault: torch's rebuild and a release at every chunk."""
    torch.cuda.init()  # torch would crash without
    storage = torch.UntypedStorage._new_shared_cuda(
        0, handle.handle, handle.storage_bytes, handle.storage_offset_bytes, handle.counter_name.encode(),
        handle.counter_slot, handle.event, False,
    )  # fmt: skip
    return int(torch.tensor([], dtype=torch.uint8, device="cuda").set_(storage)[CHUNK - 1])


def transfers(
    peer: Peer, device: torch.device, consume: Callable[..., Any], *, repair: bool
) -> tuple[list[int], list[tuple[int, int]]]:
    """Runs them. Gives memory_allocated after each, above the start's, and the counter after export and at the end.

    `repair=False`: the buffer is only dropped, as any producer would.
    """
    start = torch.cuda.memory_allocated(device)
    allocated, counters = [], []
    for transfer in range(TRANSFERS):
        buffer = torch.empty(CHUNK, dtype=torch.uint8, device=device)
        export = TorchExport(buffer.untyped_storage())
        first = export.counter()
        for chunk in range(CHUNKS):
            buffer.fill_(10 * transfer + chunk)
            torch.cuda.synchronize()
            assert peer.call(consume, export.handle, chunk == CHUNKS - 1) == 10 * transfer + chunk
        counters.append((first, export.counter()))
        del buffer
        if repair:
            export.retire()
        else:
            export._storage = None
            torch.cuda.ipc_collect()
        allocated.append(torch.cuda.memory_allocated(device) - start)
    return allocated, counters


def test_the_producers_memory_is_the_same_after_every_transfer(device: torch.device, peer: Peer) -> None:
    allocated, counters = transfers(peer, device, read_once_opened, repair=False)
    assert allocated == [0] * TRANSFERS
    assert counters == [(1, 0)] * TRANSFERS


def test_a_consumer_that_releases_every_chunk_is_seen_and_strands_every_buffer(
    device: torch.device, peer: Peer
) -> None:
    allocated, counters = transfers(peer, device, read_by_rebuilding, repair=False)
    assert allocated == [CHUNK * (transfer + 1) for transfer in range(TRANSFERS)], "this is the fault"
    assert counters == [(1, (1 << 64) + 1 - CHUNKS)] * TRANSFERS
    assert all(end >= WRAPPED for _, end in counters)


def test_even_such_a_consumers_buffers_come_back_when_the_exporter_retires_them(
    device: torch.device, peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        allocated, _ = transfers(peer, device, read_by_rebuilding, repair=True)
    assert allocated == [0] * TRANSFERS
    assert caplog.text.count("released 2 times too often") == TRANSFERS
