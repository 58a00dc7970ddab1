"""The memory meter on a GPU."""

from __future__ import annotations

import torch
from weightsync_agent.memory import meter_for

MIB = 1 << 20


def test_a_gpu_meter_sees_torch_and_driver_memory() -> None:
    owned = 0
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    torch.cuda.empty_cache()
    meter = meter_for(device, lambda: owned)
    meter.before()
    kept = torch.ones(64 * MIB, dtype=torch.uint8, device=device)
    more = torch.ones(64 * MIB, dtype=torch.uint8, device=device)
    del more
    torch.cuda.empty_cache()
    owned = 32 * MIB
    sample = meter.after()
    assert sample.delta == kept.numel() + 32 * MIB
    assert sample.peak - sample.reserved_before == 160 * MIB
    assert sample.allocated_after == torch.cuda.memory_allocated(device) + 32 * MIB
    assert sample.untracked >= 32 * MIB
