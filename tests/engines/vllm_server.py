"""A real vLLM server on the CPU, in the environment that has it, and the trainers that feed it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

from peer_process import interpreter
from ports import reserve_port
from streamed import Streamed

START_SECONDS = 550.0
"""It takes 40 seconds on a machine that does nothing else."""
HERE = Path(__file__).parent
PLAIN = HERE / "plain_cpu"
OPTIONS = [
    *("--enforce-eager", "--dtype", "float32", "--max-model-len", "8192", "--max-num-seqs", "4"),
    *("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(64 << 20), "--served-model-name", "m"),
]
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "INFO", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
    "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip

ASKED = {"model": "m", "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def environment(plain: bool, **more: str) -> dict[str, str]:
    """Of an engine's processes. `plain`: linear weights stay as they are, as on a GPU."""
    path = {"PYTHONPATH": str(PLAIN)} if plain else {}
    return {**os.environ, **ENVIRONMENT, **path, **more}


class VllmServer:
    """Killed with all its processes at the end of the `with` block."""

    def __init__(self, model: Path, log: Path, *options: str, plain: bool = False, **env: str) -> None:
        port = reserve_port()
        self.url = f"http://127.0.0.1:{port}"
        self.model = model
        self._log = log
        # `vllm serve` asks for the metadata of a distribution named vllm, which vllm-cpu is not.
        words = [interpreter("vllm"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *OPTIONS]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*words, "--host", "127.0.0.1", "--port", str(port), *options],
                stdout=output,
                stderr=output,
                env=environment(plain, **env),
                start_new_session=True,
            )
        self._await_start()

    def _await_start(self) -> None:
        began = time.monotonic()
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                if time.monotonic() - began > START_SECONDS or self.process.poll() is not None:
                    self.close()
                    raise AssertionError(f"vLLM did not start: {self.said()[-3000:]}") from None
                time.sleep(0.5)

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def ask(self, path: str, body: object | None = None, seconds: float = 120, method: str = "POST") -> Any:
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data if method == "POST" else None, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            text = answer.read()
        return json.loads(text) if text.strip() else None

    def ask_text(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return str(answer.read().decode())

    def complete(self, prompt: list[int], count: int, seconds: float = 120) -> dict[str, Any]:
        """The first choice of an answer: `token_ids`, `finish_reason`."""
        answer = self.ask("/v1/completions", {**ASKED, "prompt": prompt, "max_tokens": count}, seconds)
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    def stream(self, prompt: list[int], count: int) -> Streamed:
        """A request that runs while the test goes on."""
        body = {**ASKED, "prompt": prompt, "max_tokens": count, "stream": True}
        return Streamed(f"{self.url}/v1/completions", body, _read)

    def tokens(self, prompt: list[int], count: int = 16) -> list[int]:
        return list(self.complete(prompt, count)["token_ids"])

    def paused(self) -> bool:
        return bool(self.ask("/is_paused", method="GET")["is_paused"])

    def label(self) -> str:
        return str(self.ask("/weight_info", method="GET")["weight_version"])

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read(said: dict[str, Any], before: list[int]) -> tuple[list[int], str]:
    (choice,) = said["choices"]
    return before + list(choice["token_ids"] or ()), choice["finish_reason"] or ""
