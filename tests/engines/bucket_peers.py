"""Real peers, each in a process of its own: verl's sender and receiver, checkpoint-engine's worker and server.

    python bucket_peers.py SOCKET

Run by the interpreter of an environment that has them. It imports torch once (seconds) and forks a process for every
connection to SOCKET, whose first line is its arguments: verl-send|verl-receive|worker|server ADDRESS [options]. The
process says its PID, a JSON line when it is ready, and one with its result. All ends with this process' stdin.
Both projects ask for a GPU or an NPU when they are imported or made; what stands in for one on the CPU is here, and
every line that moves weights is theirs.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import tempfile
import types
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import torch
import zmq

sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))
from samples import mixed

MB = 1 << 20


def judged(weights: dict[str, torch.Tensor]) -> dict[str, list[object]]:
    """Dtype, shape and SHA-256 of every tensor."""
    found: dict[str, list[object]] = {}
    for name, tensor in weights.items():
        raw = tensor.detach().contiguous().reshape(-1)
        data = bytes(raw.view(torch.uint8).numpy()) if raw.numel() else b""
        found[name] = [str(tensor.dtype), list(tensor.shape), hashlib.sha256(data).hexdigest()]
    return found


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


class NoDevice:
    """What both ask of torch.cuda, on a machine without."""

    def device_count(self) -> int:
        return 1

    def set_device(self, index: int) -> None: ...

    def get_device_properties(self, index: int) -> Any:
        return types.SimpleNamespace(uuid=f"none-{os.getpid()}")

    def mem_get_info(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def memory_allocated(self) -> int:
        return 0

    def memory_reserved(self) -> int:
        return 0

    def synchronize(self) -> None: ...

    def empty_cache(self) -> None: ...

    def ipc_collect(self) -> None: ...


# --- verl -----------------------------------------------------------------------------------------------------------


def load_verl() -> Any:
    """Its bucketed_weight_transfer.py, over stand-ins for the two modules of its own that it imports."""
    files = importlib.metadata.files("verl") or []
    path = next(file for file in files if file.name == "bucketed_weight_transfer.py").locate()

    async def ensure_async_iterator(items: Any) -> AsyncIterator[Any]:
        for item in items:
            yield item

    devices = types.ModuleType("verl.utils.device")
    vars(devices).update(
        get_device_id=lambda: 0,
        get_device_name=lambda: "cpu",
        get_torch_device=NoDevice,
        is_support_ipc=lambda: False,
    )
    rollout = types.ModuleType("verl.workers.rollout.utils")
    vars(rollout)["ensure_async_iterator"] = ensure_async_iterator
    for package in ("verl", "verl.utils", "verl.workers", "verl.workers.rollout"):
        sys.modules.setdefault(package, types.ModuleType(package)).__path__ = []
    sys.modules[devices.__name__] = devices
    sys.modules[rollout.__name__] = rollout
    spec = importlib.util.spec_from_file_location("verl_buckets", str(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases(name: str, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    if name == "mixed":
        yield from mixed(seed).items()
    elif name == "large":
        yield "a", torch.ones(3)
        yield "large", torch.zeros(MB + 1, dtype=torch.uint8)
    elif name == "meta":
        yield "a", torch.ones(3)
        yield "meta", torch.empty(3, device="meta")
    elif name == "sparse":
        yield "a", torch.ones(3)
        yield "sparse", torch.eye(3).to_sparse()
    elif name == "twice":
        yield "a", torch.zeros(3)
        yield "a", torch.ones(3)
    elif name == "twice-apart":
        yield "a", torch.zeros(3)
        yield "filling", torch.zeros(MB, dtype=torch.uint8)
        yield "a", torch.ones(3)
    elif name == "nothing":
        return
    elif name == "killed":
        yield "filling", torch.zeros(MB, dtype=torch.uint8)
        yield "more", torch.zeros(MB, dtype=torch.uint8)
        os.kill(os.getpid(), signal.SIGKILL)
    elif name == "silent":
        yield "filling", torch.zeros(MB, dtype=torch.uint8)
        yield "more", torch.zeros(MB, dtype=torch.uint8)
        say(silent=True)
        signal.pause()


def verl_send(options: argparse.Namespace) -> dict[str, object]:
    sender = load_verl().BucketedWeightSender(options.address, bucket_size_mb=options.mb, use_shm=True)
    say(ready=True)
    for step in range(options.steps):
        asyncio.run(sender.async_send_weights(cases(options.case, options.seed + step)))
    return {}


class Loader:
    """A load_weights that keeps copies; or fails, keeps views or dies at one bucket."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.got: dict[str, torch.Tensor] = {}
        self.calls = 0

    def __call__(self, weights: list[tuple[str, torch.Tensor]], last: bool = False) -> None:
        call, self.calls = self.calls, self.calls + 1
        if call == self.options.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if call == self.options.hang_at:
            signal.pause()
        if call == self.options.fail_at or (last and self.options.fail_at == -2):
            raise ValueError("the loader says no")
        for name, tensor in weights:
            self.got[name] = tensor if self.options.keep_views else tensor.clone()


def verl_receive(options: argparse.Namespace) -> dict[str, object]:
    receiver = load_verl().BucketedWeightReceiver(options.address, torch.device("cpu"), use_shm=True)
    load = Loader(options)
    say(ready=True)
    for _ in range(options.steps):
        receiver.receive_weights(load)
    return {"got": judged(load.got), "calls": load.calls}


# --- checkpoint-engine ------------------------------------------------------------------------------------------------


def patch_checkpoint_engine() -> None:
    import checkpoint_engine
    import checkpoint_engine.pin_memory
    import checkpoint_engine.ps
    import checkpoint_engine.worker
    import loguru
    from weightsync_agent.engines.shared_file import open_shared_file

    loguru.logger.remove()

    class Device(checkpoint_engine.DeviceManager):  # type: ignore[name-defined,misc]
        def _detect_device_type(self) -> str:
            return "cpu"

        def _setup_device_module(self) -> None:
            self.device_module = NoDevice()

        @property
        def backend(self) -> str:
            return "gloo"

    def reduce_to_file(tensor: torch.Tensor) -> tuple[object, ...]:
        """In the place of torch's reduce_tensor: moves the storage into a file that another process can open."""
        descriptor, path = tempfile.mkstemp(prefix="test_ce_", dir="/dev/shm")
        os.ftruncate(descriptor, tensor.numel())
        os.close(descriptor)
        tensor.set_(torch.from_file(path, shared=True, size=tensor.numel(), dtype=torch.uint8))  # type: ignore[call-overload]
        return open_shared_file, (Path(path).name, tensor.numel(), None, None, None, None, 0)

    class Unpinned:
        """torch, whose empty() pins no memory."""

        def __getattr__(self, name: str) -> Any:
            if name == "empty":
                return lambda *sizes, pin_memory=False, **rest: torch.empty(*sizes, **rest)
            return getattr(torch, name)

    checkpoint_engine.worker.DeviceManager = checkpoint_engine.ps.DeviceManager = Device
    checkpoint_engine.ps.reduce_tensor = reduce_to_file
    checkpoint_engine.pin_memory.torch = Unpinned()


def worker(options: argparse.Namespace) -> dict[str, object]:
    patch_checkpoint_engine()
    from checkpoint_engine.worker import update_weights_from_ipc

    load, hooks = Loader(options), 0

    def post_hook() -> None:
        nonlocal hooks
        hooks += 1
        if options.fail_at == -3:
            raise ValueError("the post hook says no")

    say(ready=True)
    update_weights_from_ipc(zmq.Context.instance(), options.address, 0, run=load, post_hook=post_hook)
    return {"got": judged(load.got), "calls": load.calls, "hooks": hooks}


def server(options: argparse.Namespace) -> dict[str, object]:
    patch_checkpoint_engine()
    from checkpoint_engine.ps import ParameterServer

    os.environ.update(
        RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(options.port - 1),
        PS_MAX_BUCKET_SIZE_GB=options.gb,
    )
    serving = ParameterServer(rank=0, world_size=1)
    # It refuses what is not contiguous, and tied tensors go as two.
    weights = {name: tensor.contiguous() for name, tensor in mixed(options.seed).items() if tensor.numel()}
    serving.register_checkpoint("test", named_tensors=weights, use_inplace_pin_memory=False)
    serving.gather_metas("test")
    serving.update("test", lambda paths: say(address=paths[0][1]))
    return {}


def serve(connection: socket.socket) -> None:
    """One peer, from its arguments to its result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["verl-send", "verl-receive", "worker", "server"])
    parser.add_argument("address")
    parser.add_argument("--mb", type=int, default=1)
    parser.add_argument("--case", default="mixed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--fail-at", type=int, default=-1, help="call; -2: the last of a verl step, -3: the post hook")
    parser.add_argument("--die-at", type=int, default=-1)
    parser.add_argument("--hang-at", type=int, default=-1)
    parser.add_argument("--keep-views", action="store_true")
    parser.add_argument("--gb", default=str(1 / 1024))
    parser.add_argument("--port", type=int, default=0)
    with connection.makefile("r") as lines:
        arguments = json.loads(lines.readline())
    os.dup2(connection.fileno(), 1)
    connection.close()
    say(pid=os.getpid())
    options = parser.parse_args(arguments)
    roles = {"verl-send": verl_send, "verl-receive": verl_receive, "worker": worker, "server": server}
    try:
        say(result="ok", **roles[options.role](options))
    except Exception as error:
        say(result=f"{type(error).__name__}: {error}")


def main() -> None:
    torch.set_num_threads(1)  # a fork hangs in OpenMP once its parent has used it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.set_inheritable(0, False)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                serve(connection)
                zmq.Context.instance().term()  # verl's last answer may not be out yet
                os._exit(0)
            connection.close()


if __name__ == "__main__":
    main()
