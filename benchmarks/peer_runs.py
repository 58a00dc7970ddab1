"""The peers' transfers, measured: their own functions at both ends, weights into the receiver's own parameters.

What is around them is as favourable as it gets: the control messages go through a pipe instead of HTTP or Ray, and the
received tensors are copied into the parameters by one torch._foreach_copy_ a bucket instead of an engine's loader.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import peers
import plain_nccl
import torch
from measure import WARMUPS, Case, Memory, Other, digests, make_weights, repeat, serve
from weightsync_agent.digest import first_differences
from weightsync_api.bench_result import BenchRow


class _Weights:
    """The sender's parameters, and the end of a run."""

    def __init__(self, model: str, device: str) -> None:
        self.device = torch.device(device)
        self.weights = make_weights(model, device, random=True)
        self.memory = Memory(self.device)

    def finish(self, case: Case, other: Other, least_peak: int = 0) -> BenchRow:
        """Checks that the receiver holds every byte, ends it, and makes the row; the note says where it does not."""
        mine, theirs = digests(self.weights), other.ask("digests")
        if mine != theirs:
            # Told, not hidden: whether the peer or this harness around it is at fault was not found out.
            wrong = ", ".join(first_differences(mine, theirs, list(self.weights), limit=3))
            case.note += f"; UNPROVEN: after the last step the receiver's bytes were not the sender's in {wrong}"
        growth, peak = other.ask("memory")
        other.say("stop")
        self.weights.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        growth, peak = max(growth, self.memory.growth), max(peak, self.memory.peak, least_peak)
        return case.row(self.device, growth, peak)


class _Load:
    """The receiver's parameters, and how a bucket gets into them."""

    def __init__(self, model: str, device: str) -> None:
        self.device = torch.device(device)
        self.weights = make_weights(model, device, random=False)
        self.memory = Memory(self.device)

    def load(self, named: Sequence[tuple[str, torch.Tensor]], *_: object) -> None:
        if not named:  # verl's last bucket may be empty
            return
        torch._foreach_copy_([self.weights[name] for name, _ in named], [tensor for _, tensor in named])

    def answers(self) -> dict[str, Any]:
        return {
            "digests": lambda: digests(self.weights),
            "memory": lambda: (self.memory.growth, self.memory.peak),
        }


# --- verl: shared memory on CPUs, CUDA IPC on a GPU -------------------------------------------------------------------


def _verl_receiver(pipe: Connection, path: str, model: str, device: str) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    if device != "cpu":
        torch.cuda.set_device(device)
    verl = peers.load_verl(torch.device(device).type)
    load = _Load(model, device)

    def step(measured: bool) -> bool:
        load.memory.before()
        verl.BucketedWeightReceiver(path, load.device, use_shm=device == "cpu").receive_weights(load.load)
        load.memory.after(measured)
        return True

    pipe.send("ready")
    serve(pipe, {"step": step, **load.answers()})


def verl(model: str, device: str, repeats: int, bucket_mib: int) -> BenchRow:
    """verl's bucketed transfer between two processes: shared memory on `cpu`, CUDA IPC on `cuda:0`."""
    module = peers.load_verl(torch.device(device).type)
    shm = device == "cpu"
    ours = _Weights(model, device)
    case = Case(
        f"verl {'shared memory' if shm else 'CUDA IPC'} {model}", "shm" if shm else "ipc", "bucketed", model,
        peers.label("verl"), f"{bucket_mib} MiB bucket, made anew each step as verl does",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = f"ipc://{folder}/verl.sock"
        with Other(_verl_receiver, path, model, device) as other:
            other.hear()
            for number in range(WARMUPS + repeats):
                other.say("step", number >= WARMUPS)
                ours.memory.before()
                began = time.perf_counter()
                sender = module.BucketedWeightSender(path, bucket_size_mb=bucket_mib, use_shm=shm)
                asyncio.run(sender.async_send_weights(iter(ours.weights.items())))
                if number >= WARMUPS:
                    case.seconds.append(time.perf_counter() - began)
                ours.memory.after(number >= WARMUPS)
                other.hear()  # through our own pipe, so no part of the step: that ended with verl's last ACK
            # Its shared segment is in neither process's own resident memory, and is there all through a step.
            return ours.finish(case, other, (bucket_mib << 20) if shm else 0)


# --- vLLM: packed CUDA IPC on one GPU ---------------------------------------------------------------------------------


def _vllm_ipc_receiver(pipe: Connection, model: str, device: str) -> None:
    torch.cuda.set_device(device)
    vllm = peers.load_vllm()
    load = _Load(model, device)
    importer = vllm.PackedBufferImporter()

    def chunk(fields: dict[str, Any], first: bool) -> bool:
        if first:
            load.memory.before()
        load.load(vllm.packed_ipc_consumer(**fields, device_index=load.device.index, importer=importer))
        torch.cuda.synchronize()
        return True

    def finish(measured: bool) -> bool:
        importer.close()
        load.memory.after(measured)
        return True

    pipe.send("ready")
    serve(pipe, {"chunk": chunk, "finish": finish, **load.answers()})


def vllm_ipc(model: str, device: str, repeats: int) -> BenchRow:
    """vLLM's packed IPC between two processes on one GPU, 1 GiB buffer."""
    vllm = peers.load_vllm()
    torch.cuda.set_device(device)
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    ours = _Weights(model, device)
    case = Case(f"vLLM packed IPC {model}", "ipc", "packed", model, peers.label("vllm"), "1 GiB buffer, its default")
    with Other(_vllm_ipc_receiver, model, device) as other:
        other.hear()

        def step(measured: bool) -> None:
            ours.memory.before()
            chunks = vllm.packed_ipc_producer(iter(ours.weights.items()), uuid, lambda item: item[1])
            for number, chunk in enumerate(chunks):
                other.ask("chunk", vars(chunk), number == 0)
            other.ask("finish", measured)
            del chunks
            torch.cuda.ipc_collect()
            ours.memory.after(measured)

        case.seconds = repeat(step, repeats)
        return ours.finish(case, other)


# --- vLLM: packed NCCL between two GPUs -------------------------------------------------------------------------------


def _vllm_nccl_receiver(pipe: Connection, identity: bytes, model: str, device: str) -> None:
    torch.cuda.set_device(device)
    vllm = peers.load_vllm()
    load = _Load(model, device)
    pipe.send("ready")
    group = plain_nccl.PlainGroup(identity, 1, 2)
    metadata = [(name, (list(tensor.shape), tensor.dtype)) for name, tensor in load.weights.items()]

    def step(measured: bool) -> bool:
        load.memory.before()
        vllm.packed_nccl_broadcast_consumer(iter(metadata), group, 0, load.load, device=load.device)
        torch.cuda.synchronize()
        load.memory.after(measured)
        return True

    serve(pipe, {"step": step, **load.answers()})
    group.close()


def vllm_nccl(model: str, devices: tuple[str, str], repeats: int) -> BenchRow:
    """vLLM's packed NCCL broadcast between two GPUs, 2 buffers of 1 GiB."""
    vllm = peers.load_vllm()
    torch.cuda.set_device(devices[0])
    ours = _Weights(model, devices[0])
    case = Case(f"vLLM packed NCCL {model}", "nccl", "packed", model, peers.label("vllm"), "2 x 1 GiB, its default")
    identity = plain_nccl.new_id()
    with Other(_vllm_nccl_receiver, identity, model, devices[1]) as other:
        other.hear()
        group = plain_nccl.PlainGroup(identity, 0, 2)

        def step(measured: bool) -> None:
            ours.memory.before()
            other.say("step", measured)
            vllm.packed_nccl_broadcast_producer(iter(ours.weights.items()), group, 0, lambda item: item[1])
            other.hear()
            ours.memory.after(measured)

        case.seconds = repeat(step, repeats)
        row = ours.finish(case, other)
        group.close()
        return row
