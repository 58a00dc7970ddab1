"""A copy plan moves every byte and no other, whatever the alignment, in one launch, and allocates nothing."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from weightsync_agent.cuda.arena import DeviceArena
from weightsync_agent.cuda.copy_plan import NVLINK_GRID, Conversion, DeviceCopyPlan

MIB = 1 << 20
BACKENDS: list[Literal["Triton", "Torch"]] = ["Triton", "Torch"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grid_limit", [None, 1, 3, NVLINK_GRID])
@pytest.mark.parametrize("seed", range(6))
def test_random_tables_are_copied_byte_for_byte_and_nothing_beside(
    device: torch.device, backend: Literal["Triton", "Torch"], grid_limit: int | None, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    source = torch.randint(0, 256, (8 * MIB,), dtype=torch.uint8, device=device)
    target = torch.full((24 * MIB,), 0xEE, dtype=torch.uint8, device=device)
    wanted = target.clone()
    runs, at = [], 0
    for _ in range(120):
        size = int(generator.choice([0, 1, 7, 8, 15, 16, 17, 255, 4096, 32_768, 32_769, 100_003, 524_288]))
        start = int(generator.integers(0, source.numel() - size))
        at += int(generator.integers(0, 70))
        if generator.random() < 0.5:
            start, at = start // 16 * 16, (at + 15) // 16 * 16
        runs.append((source.data_ptr() + start, target.data_ptr() + at, size))
        wanted[at : at + size] = source[start : start + size]
        at += size
    plan = DeviceCopyPlan(np.array(runs), device, grid_limit=grid_limit, backend=backend)
    assert plan.backend == backend
    assert torch.equal(target, torch.full_like(target, 0xEE)), "building a plan writes nothing"
    plan.run()
    assert torch.equal(target, wanted)
    assert plan.nbytes == sum(size for _, _, size in runs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "kinds",
    [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, torch.float32)],
    ids=str,
)
def test_dtypes_are_converted_as_torch_converts_them(
    device: torch.device, backend: Literal["Triton", "Torch"], kinds: tuple[torch.dtype, torch.dtype]
) -> None:
    generator = torch.Generator(device).manual_seed(0)
    sizes = [1, 5, 4096, 4097, 1_000_003]
    sources = [torch.randn(n, generator=generator, device=device).mul_(100).to(kinds[0]) for n in sizes]
    sources[2][:8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-40, 3e38, 65519.0, 1.00390625])
    plain = torch.randint(0, 9, (1000,), device=device)
    targets = [torch.zeros(n, dtype=kinds[1], device=device) for n in sizes]
    copied = torch.zeros_like(plain)
    pairs = [*zip(sources, targets, strict=True), (plain, copied)]
    DeviceCopyPlan.of_tensors(pairs, device, backend=backend).run()
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, source.to(kinds[1]))
    assert torch.equal(copied, plain)


def test_strided_tensors_go_along(device: torch.device) -> None:
    source = torch.randn(64, 48, device=device)
    target = torch.zeros(48, 64, device=device).t()
    flat = torch.zeros(64, 48, device=device)
    plan = DeviceCopyPlan.of_tensors([(source, target), (source, flat)], device)
    plan.run()
    assert torch.equal(target, source)
    assert torch.equal(flat, source)
    assert plan.nbytes == 2 * source.numel() * 4


def test_a_run_allocates_nothing_and_waits_for_nothing(device: torch.device) -> None:
    sources = [torch.randn(n, device=device) for n in (10, 5000, 300_000)]
    pairs = [(source, torch.zeros_like(source)) for source in sources]
    plans = [DeviceCopyPlan.of_tensors(pairs, device, grid_limit=limit) for limit in (None, 4)]
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize()

    def allocations() -> int:
        return int(torch.cuda.memory_stats(device)["allocation.all.allocated"])

    assert all(launcher._direct for plan in plans for launcher in plan._launchers.values()), "Triton's quick launch"
    before = allocations()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
    for plan in plans:
        plan.run(stream)
    assert not stream.query(), "run only queues"
    assert allocations() == before
    stream.synchronize()
    for source, target in pairs:
        assert torch.equal(source, target)


def test_a_plan_of_nothing_is_a_plan(device: torch.device) -> None:
    for plan in (
        DeviceCopyPlan([], device),
        DeviceCopyPlan([(0, 0, 0)], device),
        DeviceCopyPlan.of_tensors([], device),
    ):
        plan.run()
        assert plan.nbytes == 0
    torch.cuda.synchronize()


def test_what_cant_be_copied_is_refused(device: torch.device) -> None:
    ones = torch.ones(4, device=device)
    with pytest.raises(ValueError, match="shape"):
        DeviceCopyPlan.of_tensors([(ones, torch.ones(5, device=device))], device)
    with pytest.raises(ValueError, match="a copy of"):
        DeviceCopyPlan.of_tensors([(ones, ones.int())], device)
    with pytest.raises(ValueError, match="one kind of conversion"):
        DeviceCopyPlan.of_tensors([(ones, ones.half()), (ones, ones.bfloat16())], device)
    with pytest.raises(ValueError, match="negative"):
        DeviceCopyPlan([(1, 1, -1)], device)
    runs = np.array([(ones.data_ptr(), ones.data_ptr(), 1)])
    with pytest.raises(ValueError, match="can't convert"):
        DeviceCopyPlan([], device, conversion=Conversion(torch.float32, torch.float8_e4m3fn, runs), backend="Triton")


def test_arena_memory_is_a_source_and_a_destination(device: torch.device) -> None:
    with DeviceArena.create(4 * MIB, device) as first, DeviceArena.create(4 * MIB, device) as second:
        first.tensor().copy_(torch.randint(0, 256, (4 * MIB,), dtype=torch.uint8, device=device))
        for backend in BACKENDS:
            second.tensor().zero_()
            plan = DeviceCopyPlan([(first.pointer + 3, second.pointer + 3, 4 * MIB - 3)], device, backend=backend)
            plan.run()
            assert torch.equal(first.tensor()[3:], second.tensor()[3:])
            del plan
