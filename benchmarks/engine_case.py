"""One case of engines_gpu.py or engines_cpu.py, in a process of its own: the trainer; vLLM's processes are the engine.

    engine_case.py ours|theirs|fresh|http-ours|http-theirs|reload MODEL STEPS DEVICE DIRECTORY

Says one line `RESULT {...}` with what was measured. Cases that run beside each other wait until all their engines are
up (BENCH_UP, a directory, and BENCH_PEERS, how many) and then measure one at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
from driver_end import run_driver
from engine_models import fill, manifest_of, write_checkpoint
from engine_server import Server
from weightsync_agent.manifest import arena_views
from weightsync_api.agent_config import AgentConfig

WARMUPS = 5
PROMPTS = 4
TOKENS = 24
BUFFER_BYTES = 1 << 30
LAST_SEED = 3


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Once every engine beside this one is up, and while none of the others measures."""
    up = Path(os.environ.get("BENCH_UP", tempfile.gettempdir()))
    peers = int(os.environ.get("BENCH_PEERS", "1"))
    up.mkdir(parents=True, exist_ok=True)
    (up / f"up-{os.getpid()}").touch()
    deadline = time.monotonic() + 180
    while len(list(up.glob("up-*"))) < peers and time.monotonic() < deadline:
        time.sleep(0.1)
    with (up / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Case:
    def __init__(self, model: str, steps: int, device: str, directory: Path) -> None:
        self.model, self.steps, self.directory = model, steps, directory
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        self.manifest = manifest_of(model)

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def reserved(self) -> int:
        return torch.cuda.memory_reserved() if self.cuda else 0

    def engine_options(self) -> dict[str, Any]:
        given: dict[str, Any] = {
            "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 1024, "enforce_eager": True, "seed": 0,
            # Several engines on one device: without a size of its own each would trip over the others' memory.
            "gpu_memory_utilization": 0.08, "kv_cache_memory_bytes": (256 if self.cuda else 64) << 20,
        }  # fmt: skip
        if self.cuda:
            given["attention_config"] = {"backend": "TRITON_ATTN"}
        return given

    def llm(self, directory: Path, backend: str | None, load_format: str) -> Any:
        from vllm import LLM

        return LLM(
            model=str(directory), load_format=load_format, worker_extension_cls="engine_worker.Measures",
            weight_transfer_config={"backend": backend} if backend else None, **self.engine_options(),
        )  # fmt: skip

    def greedy(self, llm: Any) -> list[list[int]]:
        """One request at a time: which share a batch decides the last bits of bfloat16."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        return [
            list(llm.generate([{"prompt_token_ids": p}], sampling, use_tqdm=False)[0].outputs[0].token_ids)
            for p in prompts()
        ]

    def agent_config(self, folder: str) -> AgentConfig:
        endpoint = f"ipc://{folder}/control"
        return AgentConfig.model_validate(
            {
                "namespace": "default", "name": "engines", "device": "CUDA" if self.cuda else "CPU",
                "transport": "IPC", "mode": "Direct", "receivers": 1, "bind": endpoint, "connect": endpoint,
                "runtimeDir": folder, "joinTimeoutSeconds": 240, "ackTimeoutSeconds": 240, "stepTimeoutSeconds": 240,
            }
        )  # fmt: skip

    # --- ours ---------------------------------------------------------------------------------------------------

    def ours(self) -> dict[str, Any]:
        directory = write_checkpoint(self.model, self.directory / self.model, None)
        llm = self.llm(directory, "weightsync", "dummy")
        with alone():
            found = self._ours(llm)
        found["digest"] = llm.collective_rpc("bench_digest")[0]
        found["greedy"] = self.greedy(llm)
        return found

    def http_ours(self) -> dict[str, Any]:
        directory = write_checkpoint(self.model, self.directory / self.model, None)
        with Server(directory, "weightsync", self.engine_options()) as server, alone():
            found = self._ours(server.url)
            found["greedy"] = server.greedy(prompts(), TOKENS)
            return found

    def _ours(self, target: Any) -> dict[str, Any]:
        from weightsync_agent.engines.vllm import VllmEngine
        from weightsync_agent.sender import Sender
        from weightsync_agent.transport import make_arena

        arena = make_arena(self.device, self.manifest.arena_bytes)
        tensors = arena_views(self.manifest, arena.tensor())
        fill(tensors, 1)
        with tempfile.TemporaryDirectory(prefix="ws-") as folder:
            config = self.agent_config(folder)
            sender = Sender(tensors, config=config, arena=arena)
            engine = VllmEngine(target, config=config)
            engine.join()
            self.sync()
            began = time.perf_counter()
            engine.step(sender)
            first = time.perf_counter() - began
            report = engine.reports[0]
            fill(tensors, 2)
            self.sync()
            seconds, inside, trainer, there = [], [], [], []
            for number in range(WARMUPS + self.steps):
                began = time.perf_counter()
                engine.step(sender)
                took = time.perf_counter() - began
                if number >= WARMUPS:
                    seconds.append(took)
                    inside.append(engine.reports[0].seconds)
                    trainer.append(self.reserved())
                    there.append(engine.reports[0].reserved_bytes)
            fill(tensors, LAST_SEED)
            self.sync()
            engine.step(sender)
            route = sender.report().route
            engine.close()
            sender.close()
        return {
            "seconds": seconds, "first_seconds": first, "inside_seconds": inside, "trainer_reserved": trainer,
            "engine_reserved": there, "in_place": report.in_place, "proven": report.proven, "reason": report.reason,
            "route": route,
        }  # fmt: skip

    # --- vLLM's own ---------------------------------------------------------------------------------------------

    def theirs(self) -> dict[str, Any]:
        directory = write_checkpoint(self.model, self.directory / self.model, None)
        llm = self.llm(directory, "ipc", "dummy")
        llm.init_weight_transfer_engine({"init_info": {}})

        def send(info: Any) -> None:
            llm.update_weights({"update_info": _given(info)})

        def step(weights: dict[str, torch.Tensor]) -> None:
            llm.start_weight_update()
            _their_sender().trainer_send_weights(
                iter(weights.items()), {"send_mode": send, "packed": True, "packed_buffer_size_bytes": BUFFER_BYTES}
            )
            llm.finish_weight_update()

        with alone():
            found = self._theirs(step, lambda: int(llm.collective_rpc("bench_reserved")[0]))
        llm.reset_prefix_cache()
        found["digest"] = llm.collective_rpc("bench_digest")[0]
        found["greedy"] = self.greedy(llm)
        return found

    def http_theirs(self) -> dict[str, Any]:
        directory = write_checkpoint(self.model, self.directory / self.model, None)
        with Server(directory, "ipc", self.engine_options()) as server, alone():
            from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

            client = HTTPVLLMWeightSyncClient(server.url)
            client.init_weight_transfer_engine({})

            def step(weights: dict[str, torch.Tensor]) -> None:
                server.post("/pause?mode=keep")
                client.start_weight_update()
                _their_sender().trainer_send_weights(
                    iter(weights.items()),
                    {"send_mode": "http", "url": server.url, "packed": True, "packed_buffer_size_bytes": BUFFER_BYTES},
                )
                client.finish_weight_update()
                server.post("/reset_prefix_cache")
                server.post("/resume")

            found = self._theirs(step, lambda: 0)
            found["greedy"] = server.greedy(prompts(), TOKENS)
            return found

    def _theirs(self, step: Callable[[dict[str, torch.Tensor]], None], reserved: Callable[[], int]) -> dict[str, Any]:
        weights = {
            entry.name: torch.empty(entry.shape, dtype=entry.torch_dtype, device=self.device)
            for entry in self.manifest.tensors
        }
        fill(weights, 2)
        self.sync()
        seconds, trainer, there = [], [], []
        for number in range(1 + self.steps):
            began = time.perf_counter()
            step(weights)
            took = time.perf_counter() - began
            if number:
                seconds.append(took)
            trainer.append(self.reserved())
            there.append(reserved())
        fill(weights, LAST_SEED)
        self.sync()
        step(weights)
        return {"seconds": seconds, "trainer_reserved": trainer, "engine_reserved": there}

    # --- a fresh engine -----------------------------------------------------------------------------------------

    def fresh(self) -> dict[str, Any]:
        weights = {
            entry.name: torch.empty(entry.shape, dtype=entry.torch_dtype, device=self.device)
            for entry in self.manifest.tensors
        }
        fill(weights, LAST_SEED)
        directory = write_checkpoint(
            self.model, self.directory / f"{self.model}-fresh", {n: t.cpu() for n, t in weights.items()}
        )
        weights.clear()
        if self.cuda:
            torch.cuda.empty_cache()
        llm = self.llm(directory, None, "auto")
        with alone():
            pass
        found = {"digest": llm.collective_rpc("bench_digest")[0], "greedy": self.greedy(llm)}
        (directory / "model.safetensors").unlink()
        return found

    # --- ours and the engine's own reload, in turns ----------------------------------------------------------------

    def reload(self) -> dict[str, Any]:
        """Both into one engine, a step each in turn. The file is in the page cache: nothing waits for a disk."""
        from weightsync_agent.engines.vllm import VllmEngine
        from weightsync_agent.sender import Sender
        from weightsync_agent.transport import make_arena

        arena = make_arena(self.device, self.manifest.arena_bytes)
        tensors = arena_views(self.manifest, arena.tensor())
        fill(tensors, LAST_SEED)
        directory = write_checkpoint(self.model, self.directory / self.model, tensors)
        llm = self.llm(directory, "weightsync", "auto")
        fresh = self.greedy(llm)
        seconds: dict[str, list[float]] = {"ours": [], "reload": []}
        held: dict[str, list[int]] = {"ours": [], "reload": []}
        right: dict[str, bool] = {}

        def reload() -> None:
            llm.collective_rpc("reload_weights")
            llm.reset_prefix_cache()

        with tempfile.TemporaryDirectory(prefix="ws-") as folder:
            config = self.agent_config(folder)
            with Sender(tensors, config=config, arena=arena) as sender, VllmEngine(llm, config=config) as engine:
                engine.step(sender)
                report = engine.reports[0]
                fill(tensors, LAST_SEED + 1)
                for number in range(turns := WARMUPS + self.steps):
                    last = number == turns - 1
                    if last:
                        fill(tensors, LAST_SEED)  # what the file holds, and the engine did not until now
                    for kind, update in (("reload", reload), ("ours", lambda: engine.step(sender))):
                        began = time.perf_counter()
                        update()
                        took = time.perf_counter() - began
                        if number >= WARMUPS:
                            seconds[kind].append(took)
                            held[kind].append(resident())
                        if last:
                            right[kind] = self.greedy(llm) == fresh
        return {
            "seconds": seconds, "held": held, "right": right, "in_place": report.in_place, "proven": report.proven,
            "reason": report.reason,
        }  # fmt: skip


def resident() -> int:
    """Bytes of anonymous memory in this process and the engine's."""
    pages = 0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{process.pid}/statm").read_text().split()
            pages += int(words[1]) - int(words[2])
    return pages * os.sysconf("SC_PAGE_SIZE")


def prompts() -> list[list[int]]:
    """They begin alike, so that the prefix cache has something to keep."""
    return [
        [4 + (7 * i) % 450 for i in range(40)] + [4 + (11 * i + n) % 450 for i in range(3 + n)] for n in range(PROMPTS)
    ]


def _their_sender() -> Any:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    return IPCWeightTransferEngine


def _given(info: Any) -> dict[str, Any]:
    return {key: value for key, value in asdict(info).items() if value is not None}


def main(kind: str, model: str, steps: str, device: str, directory: str) -> None:
    case = Case(model, int(steps), device, Path(directory))
    found = getattr(case, kind.replace("-", "_"))()
    import vllm

    found |= {
        "vllm": vllm.__version__,
        "kind": kind,
        "model": model,
        "bytes": case.manifest.nbytes,
        "tensors": len(case.manifest.tensors),
    }
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    run_driver(main)
