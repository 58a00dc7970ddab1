"""The two ends of the NCCL transport alone on two GPUs, without the state machine: which of its numbers are right?

    python benchmarks/nccl_parts.py [--model MODEL ...] [--steps N]

Prints a line a variant: GB/s by the median of the sender's own time, and the reserved memory of both ends over the
weights. The first variant is what the library does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Literal

import torch
from measure import Other, checksum, make_weights, serve
from weightsync_agent.bench.models import manifest_of
from weightsync_agent.deadline import Deadline
from weightsync_agent.protocol import Regroup, Welcome
from weightsync_agent.targets import target_for
from weightsync_agent.transport import group_plan
from weightsync_agent.transport.base import SendPlan
from weightsync_agent.transport.nccl_end import Call, End
from weightsync_agent.transport.nccl_receiver import NcclReceiver
from weightsync_agent.transport.nccl_sender import NcclSender
from weightsync_api.agent_config import AgentConfig
from weightsync_api.v1alpha1.spec import Device, Transport

MODELS = ("qwen3-0.6b", "qwen3-4b", "qwen3-30b-a3b")
MIB = 1 << 20
SECONDS = 120.0


@dataclass(frozen=True)
class Variant:
    """Numbers that both ends must have alike."""

    mode: Literal["Direct", "Packed"] = "Packed"
    bucket: int = 256 * MIB
    slots: int = 2
    straight: int = group_plan.STRAIGHT_BYTES
    lone: int = group_plan.LONE_BUCKET_BYTES
    call_buckets: int = group_plan.CALL_BUCKETS
    register: Literal["nothing", "slots", "all"] = "nothing"

    def apply(self) -> None:
        group_plan.STRAIGHT_BYTES = self.straight
        group_plan.LONE_BUCKET_BYTES = self.lone
        group_plan.CALL_BUCKETS = self.call_buckets

    def registered(self, end: End, calls: list[Call]) -> list[tuple[int, int]]:
        if self.register == "nothing":
            return []
        slots = [(slot.data_ptr(), slot.numel()) for slot in end.slots]
        if self.register == "slots":
            return slots
        starts = {pointer for pointer, _ in slots}
        return slots + [move for call in calls for move in call.broadcasts if move[0] not in starts]

    def __str__(self) -> str:
        return (
            f"{self.mode:6} {self.slots} x {self.bucket // MIB:3} MiB  straight from {self.straight / MIB:g} MiB  "
            f"lone from {self.lone // MIB} MiB  calls of {self.call_buckets}  registered: {self.register}"
        )


LIBRARY = Variant()
VARIANTS = (
    LIBRARY,
    replace(LIBRARY, call_buckets=8),
    replace(LIBRARY, call_buckets=32),
    replace(LIBRARY, straight=16 * MIB, call_buckets=8),
    replace(LIBRARY, straight=32 * MIB, call_buckets=8),
    replace(LIBRARY, straight=256 * MIB),
    replace(LIBRARY, bucket=128 * MIB, slots=4, straight=16 * MIB, call_buckets=16),
    replace(LIBRARY, register="all", call_buckets=8),
    replace(LIBRARY, mode="Direct"),
    replace(LIBRARY, mode="Direct", call_buckets=32),
    replace(LIBRARY, mode="Direct", register="all", call_buckets=32),
)


class Quiet:
    """The channel of a step in which nothing goes wrong."""

    step = 1
    verify = False
    ranks = (1,)

    def __init__(self) -> None:
        self.deadline = Deadline(SECONDS)

    def alive(self) -> bool:
        return True

    def started(self) -> None:
        pass

    def check(self) -> None:
        return


def _receiver(pipe: Connection, variant: Variant, model: str) -> None:
    device = torch.device("cuda", 1)
    torch.cuda.set_device(device)
    variant.apply()
    manifest = manifest_of(model)
    weights = make_weights(model, device, random=False)
    base = torch.cuda.memory_reserved(device)
    target = target_for(weights)
    target.bind(manifest)
    welcome = Welcome(
        protocol=1, session="s", transport="NCCL", mode=variant.mode, manifest_hash=manifest.hash,
        bucket_bytes=variant.bucket, slots=variant.slots,
    )  # fmt: skip
    config = AgentConfig(
        namespace="bench", name="bench", device=Device.CUDA, transport=Transport.NCCL, receivers=1, bind="", connect="",
        runtime_dir="/tmp",
    )  # fmt: skip
    end = NcclReceiver(welcome, manifest, target, config, device)
    end.join(Deadline(SECONDS))
    end._end.registered = variant.registered(end._end, end._calls)
    pipe.send("ready")

    def step() -> int:
        end.receive(Quiet())  # type: ignore[arg-type]
        return torch.cuda.memory_reserved(device) - base

    def group(invitation: str) -> str:
        return end.regroup(Regroup.model_validate_json(invitation), 1, Deadline(SECONDS), lambda: None).route

    serve(pipe, {"group": group, "step": step, "checksum": lambda: checksum(weights)})
    end.close()


def measure(variant: Variant, model: str, steps: int) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    variant.apply()
    manifest = manifest_of(model)
    weights = make_weights(model, device, random=True)
    base = torch.cuda.memory_reserved(device)
    sender = NcclSender(
        SendPlan(
            manifest=manifest,
            tensors=list(weights.values()),
            mode=variant.mode,
            bucket_bytes=variant.bucket,
            slots=variant.slots,
            runtime_dir="/tmp",
            device=device,
        )
    )
    sender._end.registered = variant.registered(sender._end, sender._calls)
    times, theirs = [], 0
    with Other(_receiver, variant, model) as other:
        other.hear()
        invitation = sender.regroup(1, [0, 1], SECONDS)
        other.say("group", invitation.model_dump_json())
        sender.connect(invitation, Deadline(SECONDS), lambda: None)
        route = other.hear()
        for number in range(3 + steps):
            other.say("step")
            time.sleep(0.002)  # the receiver has queued its part: what is timed is the transfer
            began = time.perf_counter()
            sender.send(Quiet())  # type: ignore[arg-type]
            if number >= 3:
                times.append(time.perf_counter() - began)
            theirs = other.hear()
        ours = torch.cuda.memory_reserved(device) - base
        right = other.ask("checksum") == checksum(weights)
        other.say("stop")
        sender.close()
    median = statistics.median(times)
    print(
        f"{model:14} {manifest.nbytes / median / 1e9:7.1f} GB/s  {median * 1e3:8.3f} ms  "
        f"reserved +{ours // MIB} and +{theirs // MIB} MiB  {len(sender.moves.calls):4} calls  {route}  {variant}"
        + ("" if right else "  WRONG BYTES"),
        flush=True,
    )
    del sender
    weights.clear()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help=f"repeatable; default: {', '.join(MODELS)}")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--first", type=int, default=len(VARIANTS), help="only so many of the variants")
    options = parser.parse_args()
    for model in options.model or MODELS:
        for variant in VARIANTS[: options.first]:
            try:
                measure(variant, model, options.steps)
            except Exception as error:
                print(f"{model:14} {variant}: {type(error).__name__}: {error}", flush=True)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
