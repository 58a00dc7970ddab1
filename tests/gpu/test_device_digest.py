"""The digest on a GPU equals the CPU's, bit for bit."""

from __future__ import annotations

import itertools
from typing import Literal

import numpy as np
import pytest
import torch
from weightsync_agent.cuda.digest import DeviceDigest
from weightsync_agent.digest import bytes_digest, tensor_digests

SIZES = [0, 1, 2, 3, 5, 4095, 4096, 4097, 16_384, 16_385, 100_003, 1_000_000]
DTYPES = [torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn]
BACKENDS: list[Literal["Auto", "Torch"]] = ["Auto", "Torch"]


def random_tensor(count: int, dtype: torch.dtype, device: torch.device, apart: int = 0) -> torch.Tensor:
    """`apart` elements behind an allocation's start: aligned to the element's size alone."""
    raw = torch.randint(0, 256, ((count + apart) * dtype.itemsize,), dtype=torch.uint8, device=device)
    return raw.view(dtype)[apart:]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_size_and_start_has_the_cpus_digest(
    device: torch.device, dtype: torch.dtype, backend: Literal["Auto", "Torch"]
) -> None:
    tensors = [random_tensor(count, dtype, device, apart) for count in SIZES for apart in (0, 1, 3)]
    digest = DeviceDigest.of_tensors(tensors, device, backend=backend)
    wanted = tensor_digests([tensor.cpu() for tensor in tensors])
    assert digest.bytes() == wanted
    assert digest.bytes() == wanted, "a second run starts from 0"


@pytest.mark.parametrize("backend", BACKENDS)
def test_tied_strided_and_empty_tensors_have_the_cpus_digests(
    device: torch.device, backend: Literal["Auto", "Torch"]
) -> None:
    whole = torch.randn(300, 200, device=device)
    tensors = [whole, whole, whole.t(), whole[:0], whole[5], torch.tensor(1.5, device=device), whole[:0]]
    digest = DeviceDigest.of_tensors(tensors, device, backend=backend)
    assert digest.bytes() == tensor_digests([tensor.cpu() for tensor in tensors])
    whole.add_(1)
    assert digest.bytes() == tensor_digests([tensor.cpu() for tensor in tensors])


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_add_up_in_any_order(device: torch.device, backend: Literal["Auto", "Torch"]) -> None:
    data = random_tensor(3_000_001, torch.uint8, device)
    cuts = [0, 256, 16_384 * 3, 16_384 * 3 + 4, 1_000_000, 1_000_256, 3_000_001]
    parts = [(data.data_ptr() + a, b - a, 1, a) for a, b in itertools.pairwise(cuts)]
    first = DeviceDigest(parts[::2], 2, device, backend=backend)
    first.run()
    rest = DeviceDigest(parts[1::2], 2, device, backend=backend)
    rest.digests = first.digests
    rest.run(add=True)
    assert rest.digests.cpu().numpy().view(np.uint64).tolist() == [0, bytes_digest(data.cpu().numpy())]


def test_one_flipped_bit_a_swap_and_a_shift_are_seen(device: torch.device) -> None:
    data = random_tensor(5_000_000, torch.uint8, device)
    digest = DeviceDigest.of_tensors([data], device)
    before = digest.bytes()
    data[4_321_987] ^= 0x40
    assert digest.bytes() != before
    data[4_321_987] ^= 0x40
    assert digest.bytes() == before
    kept = data.clone()
    data[16_384:32_768], data[32_768:49_152] = kept[32_768:49_152], kept[16_384:32_768]
    assert digest.bytes() != before
    data.copy_(kept.roll(4))
    assert digest.bytes() != before


def test_the_result_does_not_depend_on_the_schedule(device: torch.device) -> None:
    tensors = [random_tensor(7_000_003, torch.bfloat16, device, apart) for apart in (0, 1)]
    digest = DeviceDigest.of_tensors(tensors, device)
    assert len({digest.bytes() for _ in range(20)}) == 1
