"""Both ends of NCCL's transport in one process on one GPU, with a loop in place of the wire."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transfer.collective import config_for
from transfer.collective_weights import MIB
from weightsync_agent.cuda.arena import bytes_at
from weightsync_agent.cuda.nccl import unique_id
from weightsync_agent.deadline import Deadline
from weightsync_agent.manifest import Manifest, describe
from weightsync_agent.protocol import Welcome
from weightsync_agent.targets import target_for
from weightsync_agent.transport.base import SendPlan
from weightsync_agent.transport.nccl_end import Call, End
from weightsync_agent.transport.nccl_receiver import NcclReceiver
from weightsync_agent.transport.nccl_sender import NcclSender
from weightsync_api.v1alpha1.spec import Device

GPU = torch.device("cuda", 0)


@dataclass
class Channel:
    """Both ends' channel of a step in which nothing goes wrong."""

    step: int = 1
    deadline: Deadline = field(default_factory=lambda: Deadline(60))
    verify: bool = True
    ranks: tuple[int, ...] = ()

    def alive(self) -> bool:
        return True

    def started(self) -> None:
        pass

    def check(self) -> None:
        return

    def post(self, *_: object) -> None:
        raise AssertionError("a collective posts nothing within a step")

    pump = wait_bucket = drained = post


class Loop:
    """Takes the wire's place: what the sender's end broadcasts is kept, and is what arrives at the receiver's."""

    def __init__(self) -> None:
        self.under_way: list[torch.Tensor] = []

    def join(self, sender: End, receiver: End) -> None:
        def send(_number: int, call: Call, *_: object) -> None:
            with torch.cuda.stream(sender.communication.stream):
                self.under_way += [bytes_at(pointer, nbytes)[0].clone() for pointer, nbytes in call.broadcasts]

        def receive(_number: int, call: Call, *_: object) -> None:
            with torch.cuda.stream(receiver.communication.stream):
                for pointer, nbytes in call.broadcasts:
                    bytes_at(pointer, nbytes)[0].copy_(self.under_way.pop(0))

        sender.queue = send  # type: ignore[method-assign]
        receiver.queue = receive  # type: ignore[method-assign]


class Pair:
    """Both ends in this process on one GPU."""

    def __init__(
        self, tensors: dict[str, torch.Tensor], target: Any, runtime_dir: str, mode: str = "Packed", **more: Any
    ) -> None:
        manifest: Manifest = more.pop("manifest", None) or describe(tensors)
        plan = SendPlan(
            manifest=manifest,
            tensors=list(tensors.values()),
            mode=mode,  # type: ignore[arg-type]
            bucket_bytes=MIB,
            slots=2,
            runtime_dir=runtime_dir,
            device=GPU,
            **more,
        )
        self.sender = NcclSender(plan)
        welcome = Welcome(
            protocol=1, session="s", transport="NCCL", mode=mode,  # type: ignore[arg-type]
            manifest_hash=manifest.hash, bucket_bytes=MIB, slots=2,
        )  # fmt: skip
        bound = target_for(target)
        bound.bind(manifest)
        self.receiver = NcclReceiver(welcome, manifest, bound, config_for(runtime_dir, Device.CUDA), GPU)
        self.receiver.join(Deadline(60))
        self.sender.connect(self.sender.regroup(1, [0], 60), Deadline(60), lambda: None)
        self.receiver._end.connect(unique_id(), 0, 1, 1, Deadline(60), lambda: None)
        Loop().join(self.sender._end, self.receiver._end)

    def step(self) -> None:
        channel = Channel()
        self.sender.send(channel)
        self.receiver.receive(channel)
        assert self.receiver.digests() == self.sender.digests()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.sender.close()
        self.receiver.close()
