"""A sender or receiver in a pod of `pod_routes.py`: the program that the pod's template names for both roles.

    WEIGHTSYNC_CONFIG=... WEIGHTSYNC_ROLE=... WEIGHTSYNC_RANK=... python benchmarks/pod_agent.py MODEL STEPS DEVICE

The sender writes a Measured to stdout, as one line of JSON; an error is one sentence on stderr and exit code 1.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch
from pydantic import BaseModel, ConfigDict, Field
from weightsync_agent import parent
from weightsync_agent.bench.baseline import copy_times
from weightsync_agent.bench.models import allocate, fill, manifest_of
from weightsync_agent.errors import Closed, WeightSyncError
from weightsync_agent.identity import load_config, rank_from_env
from weightsync_agent.receiver import Receiver
from weightsync_agent.sender import Sender
from weightsync_agent.transport import make_arena
from weightsync_api.agent_config import ENV_ROLE
from weightsync_api.reports import Report
from weightsync_api.v1alpha1.spec import Transport

WARMUPS = 3
COPIES = 8
WAIT_SECONDS = 60.0


class Measured(BaseModel):
    """What the sender found."""

    model_config = ConfigDict(extra="forbid")

    report: Report = Field(description="The sender's, after the last step, which carried new bytes and was verified.")
    seconds: list[float] = Field(description="Of each measured step, by the sender's clock.")
    copy_seconds: float = Field(description="Median of one flat copy of the same bytes on the sender's device.")


def send(model: str, steps: int, device: torch.device) -> Measured:
    config, manifest = load_config(), manifest_of(model)
    arena = make_arena(device, manifest.arena_bytes) if config.transport == Transport.IPC else None
    weights = allocate(manifest, device, arena.tensor() if arena is not None else None)
    fill(weights, 0)
    seconds: list[float] = []
    with Sender(weights, config=config, arena=arena) as sender:
        for number in range(WARMUPS + steps):
            list(weights.values())[number % len(weights)].view(-1)[:1].fill_(number + 2)
            began = time.perf_counter()
            sender.step()
            if number >= WARMUPS:
                seconds.append(time.perf_counter() - began)
        fill(weights, 1)
        if not sender.step().verified:
            raise AssertionError("the step after the last was not verified")
        report = sender.report()
    copy = statistics.median(copy_times(manifest.nbytes, device, COPIES))
    return Measured(report=report, seconds=seconds, copy_seconds=copy)


def receive(model: str, device: torch.device) -> None:
    weights = allocate(manifest_of(model), device)
    with Receiver(weights, config=load_config(), rank=rank_from_env()) as receiver:
        while True:
            broken = receiver.state.message
            try:
                step = receiver.wait(timeout=WAIT_SECONDS)
            except Closed:
                return
            if step is None and receiver.state.message != broken:
                print(f"rank {receiver.identity.rank}: {receiver.state.message}", file=sys.stderr, flush=True)


def main() -> int:
    parent.end_with_parent()
    model, steps, device = sys.argv[1], int(sys.argv[2]), torch.device(sys.argv[3])
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        if os.environ[ENV_ROLE] == "sender":
            sys.stdout.write(send(model, steps, device).model_dump_json() + "\n")
        else:
            receive(model, device)
    except WeightSyncError as error:
        print(f"{os.environ[ENV_ROLE]}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
