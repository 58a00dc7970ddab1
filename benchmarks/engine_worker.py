"""What a benchmark asks a vLLM worker for besides steps: `worker_extension_cls="engine_worker.Measures"`."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


class Measures:
    """Methods of a worker. Each answers with text, which every kind of call takes."""

    model_runner: Any
    device: torch.device

    def bench_digest(self) -> str:
        """Over the bytes of all parameters, in the order of their names, by the project's digest."""
        from weightsync_agent.digest import tensor_digests

        named = sorted(self.model_runner.get_model().named_parameters())
        tensors = [parameter.detach() for _, parameter in named]
        if self.device.type == "cuda":
            from weightsync_agent.cuda.digest import DeviceDigest

            found = DeviceDigest.of_tensors(tensors, self.device).bytes()
        else:
            found = tensor_digests(tensors)
        names = "\n".join(name for name, _ in named).encode()
        return hashlib.sha256(names + found).hexdigest()

    def bench_reserved(self) -> str:
        return str(torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0)
