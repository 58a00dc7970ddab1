"""Members of a collective transport as real processes, driven without the state machines.

The sender end lives in the test's own process, each receiver end in one of its own. A pipe a receiver carries what the
control wire would: invitation, step, outcome.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import psutil
import torch
from weightsync_agent.deadline import Deadline
from weightsync_agent.errors import Closed
from weightsync_agent.manifest import Manifest, describe
from weightsync_agent.protocol import Message, Regroup, Welcome
from weightsync_agent.targets import Target, target_for
from weightsync_agent.transport import receiver_transport, sender_transport
from weightsync_agent.transport.base import SendPlan
from weightsync_api.agent_config import AgentConfig
from weightsync_api.v1alpha1.spec import Device, Transport

JOIN_SECONDS = 120.0

TargetMaker = Callable[[], Any]
"""Makes what a user passes to Receiver; a module-level function, since it runs in the receiver's process."""
Check = Callable[[Any], Any]
"""Judges the target in the receiver's process; gives something small."""


def config_for(runtime_dir: str, device: Device = Device.CPU) -> AgentConfig:
    return AgentConfig(
        namespace="test",
        name="test",
        device=device,
        transport=Transport.NCCL,
        receivers=1,
        bind="ipc:///unused",
        connect="ipc:///unused",
        runtime_dir=runtime_dir,
    )


@dataclass
class SenderSide:
    """A SendChannel over the receivers' processes and pipes."""

    members: Sequence[Member]
    step: int
    deadline: Deadline
    verify: bool = False

    @property
    def ranks(self) -> list[int]:
        return [m.rank for m in self.members if m.process.is_alive()]

    def post(self, message: Message, rank: int | None = None) -> None:
        raise AssertionError("a collective posts nothing within a step")

    def pump(self, until_drained: int | None = None) -> None:
        raise AssertionError("a collective waits for no Drained")

    def alive(self) -> bool:
        return all(m.process.is_alive() and not m.has_failed() for m in self.members)


@dataclass
class ReceiverSide:
    """A ReceiveChannel over the test's pipe."""

    pipe: Connection
    step: int
    deadline: Deadline
    verify: bool

    def wait_bucket(self, bucket: int) -> int:
        raise AssertionError("a collective waits for no Bucket")

    def started(self) -> None:
        pass

    def drained(self, bucket: int) -> None:
        raise AssertionError("a collective drains no slot")

    def check(self) -> None:
        if self.pipe.poll():
            raise Closed("the sender broke the step off")


@dataclass
class Member:
    """A receiver's process, seen from the test."""

    rank: int
    process: BaseProcess
    pipe: Connection
    inbox: deque[tuple[Any, ...]] = field(default_factory=deque)

    def has_failed(self) -> bool:
        self._take_in(0)
        return bool(self.inbox) and self.inbox[0][0] in ("error", "gone")

    def ask(self, *what: Any) -> None:
        self.pipe.send(what)

    def answer(self, seconds: float = JOIN_SECONDS) -> tuple[Any, ...]:
        """What it did last: `("gone",)` where its process has ended."""
        if not self.inbox:
            self._take_in(seconds)
        assert self.inbox, f"rank {self.rank} said nothing within {seconds} s"
        return self.inbox.popleft()

    def _take_in(self, seconds: float) -> None:
        try:
            while self.pipe.poll(seconds):
                self.inbox.append(self.pipe.recv())
                seconds = 0
        except (EOFError, ConnectionResetError):
            self.inbox.append(("gone",))

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class Members:
    """A sender end and its receivers."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        runtime_dir: str,
        *,
        mode: str = "Packed",
        bucket_bytes: int = 1 << 20,
        slots: int = 2,
        device: torch.device | None = None,
        gather: Any = None,
        manifest: Manifest | None = None,
    ) -> None:
        self.device = device or torch.device("cpu")
        self.manifest = manifest or describe(tensors)
        self.runtime_dir = runtime_dir
        self.sender = sender_transport(
            Transport.NCCL,
            SendPlan(
                manifest=self.manifest,
                tensors=list(tensors.values()),
                mode="Direct" if mode == "Direct" else "Packed",
                bucket_bytes=bucket_bytes,
                slots=slots,
                runtime_dir=runtime_dir,
                device=self.device,
                gather=gather,
            ),
        )
        self.members: list[Member] = []
        self.epoch = 0

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            with contextlib.suppress(OSError):
                member.ask("close")
        for member in self.members:
            member.process.join(10)
            member.kill()
        self.sender.close()

    def join(self, make: TargetMaker, rank: int, device: str = "") -> Member:
        plan = self.sender.plan
        welcome = Welcome(
            protocol=1,
            session="s",
            transport="NCCL",
            mode=plan.mode,
            manifest_hash=self.manifest.hash,
            manifest=self.manifest,
            bucket_bytes=plan.bucket_bytes,
            slots=plan.slots,
        )
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(
            target=_receiver,
            args=(there, welcome.model_dump_json(), make, rank, self.runtime_dir, device or str(self.device)),
        )
        process.start()
        there.close()
        member = Member(rank, process, here)
        assert member.answer()[0] == "joined"
        self.members.append(member)
        return member

    def regroup(self, seconds: float = JOIN_SECONDS) -> None:
        """All members into a new group; raises what the sender's connect raises."""
        self.epoch += 1
        invitation = self.sender.regroup(self.epoch, [0, *(m.rank for m in self.members)], seconds)
        for member in self.members:
            member.ask("regroup", invitation.model_dump_json())
        self.sender.connect(invitation, Deadline(seconds), lambda: None)
        for member in self.members:
            assert member.answer()[0] == "regrouped"

    def begin(self, step: int, seconds: float = 60.0, verify: bool = False) -> SenderSide:
        deadline = Deadline(seconds)  # as in a real step, the sender's begins first
        for member in self.members:
            member.inbox.clear()
            member.ask("step", step, seconds, verify)
        return SenderSide(self.members, step, deadline, verify)

    def step(self, step: int = 1, verify: bool = False) -> None:
        """One whole step. Raises AssertionError where a receiver failed."""
        channel = self.begin(step, verify=verify)
        self.sender.fence()
        self.sender.send(channel)
        for member in self.members:
            answer = member.answer()
            assert answer[0] == "acknowledged", answer
            if verify:
                assert answer[1] == self.sender.digests(), f"rank {member.rank} holds other bytes"

    def ask_all(self, check: Check, *args: Any) -> list[Any]:
        for member in self.members:
            member.ask("check", check, args)
        return [member.answer()[1] for member in self.members]


def anonymous_bytes(_target: Any = None) -> int:
    """Private memory of the calling process, in bytes: what a leak of staging memory would grow."""
    return int(psutil.Process().memory_full_info().uss)


def _receiver(pipe: Connection, welcome_json: str, make: TargetMaker, rank: int, runtime_dir: str, device: str) -> None:
    torch.set_num_threads(1)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    welcome = Welcome.model_validate_json(welcome_json)
    assert welcome.manifest is not None
    made = make()
    target: Target = target_for(made)
    target.bind(welcome.manifest)
    kind = Device.CUDA if device.startswith("cuda") else Device.CPU
    end = receiver_transport(welcome, welcome.manifest, target, config_for(runtime_dir, kind), torch.device(device))
    end.join(Deadline(JOIN_SECONDS))
    pipe.send(("joined",))
    while True:
        try:
            what, *rest = pipe.recv()
        except EOFError:
            os._exit(1)  # the test is gone
        if what == "close":
            end.close()
            return
        if what == "abort":
            continue
        try:
            if what == "regroup":
                regroup = Regroup.model_validate_json(rest[0])
                deadline = Deadline(regroup.timeout_seconds)
                pipe.send(("regrouped", end.regroup(regroup, rank, deadline, lambda: None).route))
            elif what == "step":
                channel = ReceiverSide(pipe, rest[0], Deadline(rest[1]), rest[2])
                end.receive(channel)
                pipe.send(("acknowledged", end.digests() if channel.verify else b""))
            elif what == "check":
                pipe.send(("checked", rest[0](made, *rest[1])))
            elif what == "owned":
                pipe.send(("owned", end.owned_bytes))
        except Exception as error:  # the test judges it
            pipe.send(("error", type(error).__name__, str(error)))
