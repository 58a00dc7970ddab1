"""A real SGLang server on the CPU, in the environment that has it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from peer_process import ENVIRONMENTS, interpreter
from ports import reserve_port
from streamed import Streamed

START_SECONDS = 550.0
"""It takes a minute on a machine that does nothing else."""
OPTIONS = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--dtype", "float32", "--mem-fraction-static", "0.1"),
    *("--max-total-tokens", "16384", "--skip-server-warmup", "--grammar-backend", "none", "--log-level", "warning"),
]


class SGLangServer:
    """Killed with all its processes at the end of the `with` block."""

    def __init__(self, model: Path, log: Path) -> None:
        port = reserve_port()
        self.url = f"http://127.0.0.1:{port}"
        tools = ENVIRONMENTS / "vllm" / "bin"  # ninja
        environment = {
            **os.environ,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [interpreter("sglang"), "-m", "sglang.launch_server", "--model-path", str(model), *OPTIONS]
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                stdout=output,
                stderr=output,
                env=environment,
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
                late = time.monotonic() - began > START_SECONDS
                if late or self.process.poll() is not None:
                    self.close()
                    raise AssertionError(f"SGLang did not start: {self._log.read_text()[-3000:]}") from None
                time.sleep(0.5)

    def ask(self, path: str, body: dict[str, object] | None = None, seconds: float = 100) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return json.loads(answer.read() or b"null")

    def tokens(self, prompt: list[int], count: int = 16) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        found: list[int] = self.ask("/generate", {"input_ids": prompt, "sampling_params": sampling})["output_ids"]
        return found

    def stream(self, prompt: list[int], count: int) -> Streamed:
        """A request that runs while the test goes on."""
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        body: dict[str, object] = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        return Streamed(f"{self.url}/generate", body, _read)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def close(self) -> None:
        """Asked first: who is killed leaves shared memory behind."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read(said: dict[str, Any], before: list[int]) -> tuple[list[int], str]:
    del before  # every line has them all
    return said["output_ids"], (said["meta_info"]["finish_reason"] or {"type": ""})["type"]
