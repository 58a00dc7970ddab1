"""A receiver with which NCCL would fail at the first broadcast is refused when it says Hello."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import torch
from weightsync_agent.errors import Refused
from weightsync_agent.identity import local_identity
from weightsync_agent.manifest import describe
from weightsync_agent.transport.base import SendPlan
from weightsync_agent.transport.nccl_sender import NcclSender


def test_one_host_id_for_pods_that_see_their_own_gpus_only_is_refused(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "one-host")
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    tensors = {"a": torch.ones(3, device=device)}
    plan = SendPlan(
        manifest=describe(tensors), tensors=list(tensors.values()), mode="Packed", bucket_bytes=1 << 20, slots=2,
        runtime_dir=str(tmp_path), device=device,
    )  # fmt: skip
    sender = NcclSender(plan)
    here = local_identity(1, device)
    assert here.gpu_nodes >= 1, "a GPU without a device node in /dev"
    there = here.model_copy(update={"gpu": str(uuid.uuid4()), "gpu_nodes": 1})
    with pytest.raises(Refused, match=r"NCCL_HOSTID is 'one-host' in ranks 0, 1.*NCCL_P2P_DISABLE=1"):
        sender.offer(there)
    sender.offer(there.model_copy(update={"nccl_host": "another-host"}))
    sender.close()
