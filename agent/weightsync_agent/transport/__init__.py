"""Transports, and the choice of one. CPU: shared memory for IPC, gloo for NCCL."""

from __future__ import annotations

import torch
from weightsync_api.agent_config import AgentConfig
from weightsync_api.v1alpha1.spec import Transport

from ..manifest import Manifest
from ..protocol import Welcome
from ..targets import Target
from .base import Arena, ReceiverTransport, SenderTransport, SendPlan


def make_arena(device: torch.device, nbytes: int) -> Arena:
    """Memory on `device` that other processes can map."""
    if device.type == "cuda":
        from ..cuda.arena import DeviceArena

        return DeviceArena.create(nbytes, device)
    from ..host_memory import HostMemory

    return HostMemory.create(nbytes, "weightsync-arena")


def sender_transport(transport: Transport, plan: SendPlan) -> SenderTransport:
    """The sender's end of the configured transport on the plan's device. Raises ConfigError."""
    if plan.device.type == "cuda":
        if transport == Transport.IPC:
            from .ipc_sender import IpcSender

            return IpcSender(plan)
        from .nccl_sender import NcclSender

        return NcclSender(plan)
    if transport == Transport.IPC:
        from .shared_memory import SharedMemorySender

        return SharedMemorySender(plan)
    from .gloo import GlooSender

    return GlooSender(plan)


def receiver_transport(
    welcome: Welcome, manifest: Manifest, target: Target, config: AgentConfig, device: torch.device
) -> ReceiverTransport:
    """The receiver's end of what the sender's Welcome says, on this receiver's device."""
    if device.type == "cuda":
        if welcome.transport == "IPC":
            from .ipc_receiver import IpcReceiver

            return IpcReceiver(welcome, manifest, target, config, device)
        from .nccl_receiver import NcclReceiver

        return NcclReceiver(welcome, manifest, target, config, device)
    if welcome.transport == "IPC":
        from .shared_memory import SharedMemoryReceiver

        return SharedMemoryReceiver(welcome, manifest, target, config)
    from .gloo import GlooReceiver

    return GlooReceiver(welcome, manifest, target, config)


__all__ = [
    "Arena",
    "ReceiverTransport",
    "SendPlan",
    "SenderTransport",
    "make_arena",
    "receiver_transport",
    "sender_transport",
]
