"""Driver memory by descriptor: shared with another process, given back whatever happens, also to a killed importer."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import pytest
import torch
from peer import Here, Peer
from weightsync_agent.adopt import adopt
from weightsync_agent.cuda.arena import GRANULARITY, DeviceArena
from weightsync_agent.cuda.driver import free_bytes, gpu_uuid
from weightsync_agent.deadline import Deadline
from weightsync_agent.errors import TransportError
from weightsync_agent.manifest import describe
from weightsync_agent.targets import named_tensors

MIB = 1 << 20
SIZE = 64 * MIB
KERNELS = 32 * MIB
"""What kernels that are loaded meanwhile may take of the device, and tables of pages."""


def map_and_keep(here: Here, nbytes: int, gpu: str) -> list[int]:
    arena = DeviceArena.map(here.receive_fd(), nbytes, 0, gpu)
    here.kept["arena"] = arena
    view = arena.tensor()
    seen = [int(view[0]), int(view[-1]), arena.mapped_bytes]
    view.fill_(9)
    torch.cuda.synchronize()
    return seen


def unmap(here: Here) -> bool:
    arena = here.kept.pop("arena")
    arena.close()
    return bool(arena.views_alive())


def until(condition: Any, seconds: float = 20.0) -> bool:
    """Polls what the driver does in its own time, such as reaping a killed process."""
    deadline = Deadline(seconds)
    while not condition():
        if deadline.passed:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.alone
def test_closing_gives_the_memory_back_to_the_device(device: torch.device) -> None:
    torch.zeros(1, device=device)
    before = free_bytes(device)
    arena = DeviceArena.create(SIZE - 5, device)
    assert (arena.nbytes, arena.mapped_bytes) == (SIZE - 5, SIZE)
    assert arena.gpu == gpu_uuid(device)
    view = arena.tensor()
    assert view.shape == (SIZE - 5,)
    assert view.device == device
    assert view.data_ptr() == arena.pointer
    view.fill_(3)
    assert int(view[-1]) == 3
    assert before - free_bytes(device) >= SIZE
    del view
    taken = free_bytes(device)
    arena.close()
    arena.close()
    assert free_bytes(device) - taken >= SIZE
    with pytest.raises(TransportError, match="closed"):
        arena.tensor()
    with pytest.raises(TransportError, match="closed"):
        arena.export_fd()


@pytest.mark.alone
def test_a_hundred_arenas_leave_nothing(device: torch.device) -> None:
    torch.zeros(1, device=device)
    before = free_bytes(device)
    for _ in range(100):
        with DeviceArena.create(GRANULARITY, device) as arena:
            os.close(arena.export_fd())
    assert before - free_bytes(device) < KERNELS < 100 * GRANULARITY


@pytest.mark.alone
def test_views_are_known_and_memory_waits_for_the_last_of_them(device: torch.device) -> None:
    arena = DeviceArena.create(SIZE, device)
    assert not arena.views_alive()
    whole = arena.tensor()
    part = whole[10:20].view(torch.int8)
    del whole
    assert arena.views_alive()
    part.fill_(4)
    arena.close()
    assert arena.views_alive()
    assert int(part.sum()) == 40, "a view stays good after close"
    taken = free_bytes(device)
    del part
    assert not arena.views_alive()
    assert free_bytes(device) - taken >= SIZE


def test_two_processes_share_one_memory_by_descriptor(device: torch.device, peer: Peer) -> None:
    with DeviceArena.create(SIZE, device) as arena:
        view = arena.tensor()
        view.fill_(7)
        torch.cuda.synchronize()
        peer.send_fd(arena.export_fd())
        assert peer.call(map_and_keep, SIZE, arena.gpu) == [7, 7, SIZE]
        assert torch.equal(view, torch.full_like(view, 9))
        del view
        assert peer.call(unmap) is False


@pytest.mark.alone
def test_a_killed_importer_strands_nothing(device: torch.device, victim: Peer) -> None:
    torch.zeros(1, device=device)
    before = free_bytes(device)  # the other process has no context yet
    arena = DeviceArena.create(SIZE, device)
    arena.tensor().fill_(7)
    torch.cuda.synchronize()
    victim.send_fd(arena.export_fd())
    victim.call(map_and_keep, SIZE, arena.gpu)
    victim.kill()
    arena.close()
    assert until(lambda: free_bytes(device) >= before - KERNELS), f"{before - free_bytes(device)} bytes are stranded"


def test_a_killed_exporter_leaves_its_importer_whole(device: torch.device, victim: Peer) -> None:
    fd = victim.call(create_and_pass)
    assert fd == "passed"
    arena = DeviceArena.map(receive(victim), SIZE, device)
    victim.kill()
    view = arena.tensor()
    assert torch.equal(view, torch.full_like(view, 5))
    view.fill_(6)
    torch.cuda.synchronize()
    del view
    arena.close()


def create_and_pass(here: Here) -> str:
    arena = DeviceArena.create(SIZE, 0)
    arena.tensor().fill_(5)
    torch.cuda.synchronize()
    fd = arena.export_fd()
    socket.send_fds(here.passing, [b"."], [fd])
    os.close(fd)
    here.kept["arena"] = arena
    return "passed"


def receive(peer: Peer) -> int:
    return socket.recv_fds(peer.passing, 1, 1)[1][0]


def test_a_descriptor_of_something_else_is_refused_and_closed(device: torch.device) -> None:
    fd = os.memfd_create("no device memory")
    with pytest.raises(TransportError, match="can't map"):
        DeviceArena.map(fd, SIZE, device)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_more_than_the_device_has_is_refused_with_what_is_free(device: torch.device) -> None:
    with pytest.raises(TransportError, match=r"CUDA_ERROR_OUT_OF_MEMORY.*are free"):
        DeviceArena.create(1 << 45, device)


def test_a_model_moves_into_an_arena_and_trains_on(device: torch.device) -> None:
    torch.manual_seed(0)
    models = [torch.nn.Linear(256, 256, device=device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    inputs = torch.randn(3, 256, device=device)

    def train() -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()

    train()
    named = named_tensors(models[1])
    manifest = describe(named)
    arena = DeviceArena.create(manifest.arena_bytes, device)
    allocated = torch.cuda.memory_allocated(device)
    done = adopt(named, manifest, arena.tensor())
    assert allocated - torch.cuda.memory_allocated(device) >= done.nbytes, "the old storages are free again"
    train()
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert models[1].weight.data_ptr() == arena.pointer + manifest.arena_offsets[0]
    arena.close()
    train()  # the parameters are views: the memory stays theirs
    assert torch.equal(models[0].weight, models[1].weight)
