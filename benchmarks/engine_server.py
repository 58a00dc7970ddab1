"""vLLM's own HTTP server, for the engines' benchmarks."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any


class Server:
    """`options`: those of the engine, as `LLM` takes them."""

    def __init__(self, directory: Path, backend: str, options: dict[str, Any]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        words = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory), "--host",
            "127.0.0.1", "--port", str(port), "--served-model-name", "m", "--load-format", "dummy",
            "--weight-transfer-config", json.dumps({"backend": backend}), "--enforce-eager", "--max-model-len", "512",
            "--max-num-seqs", "8", "--max-num-batched-tokens", "1024",
            "--gpu-memory-utilization", str(options["gpu_memory_utilization"]),
            "--kv-cache-memory-bytes", str(options["kv_cache_memory_bytes"]),
        ]  # fmt: skip
        if "attention_config" in options:
            words += ["--attention-config", json.dumps(options["attention_config"])]
        self._process = subprocess.Popen(words, stdout=sys.stderr, stderr=sys.stderr)

    def __enter__(self) -> Server:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}")
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=2) as answer:
                    if answer.status == 200:
                        return self
            except OSError:
                time.sleep(0.2)
        raise RuntimeError("the server did not come up within 240 s")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def post(self, path: str, body: object | None = None) -> Any:
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, method="POST", headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=240) as answer:
            text = answer.read()
        return json.loads(text) if text.strip() else None

    def greedy(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """The first `count` token ids after each prompt."""
        asked = {"model": "m", "temperature": 0, "max_tokens": count, "ignore_eos": True, "return_token_ids": True}
        return [
            list(self.post("/v1/completions", {**asked, "prompt": prompt})["choices"][0]["token_ids"])
            for prompt in prompts
        ]
