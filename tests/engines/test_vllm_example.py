"""docs/engines-vllm.md's "Try it", as it is written: a server of the CPU's vLLM, and a trainer that it follows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from peer_process import interpreter
from ports import reserve_port
from vllm_server import START_SECONDS, environment

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1800)
def test_the_server_of_the_example_ends_with_its_trainers_weights(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "engines-vllm.md").read_text().partition("## Try it")[2]
    port = str(reserve_port())
    script = "".join(re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S)).replace(".venv/bin/python", sys.executable)
    model, serve, train = script.replace("/tmp/model", str(tmp_path / "model")).replace("8000", port).splitlines()
    env = environment(plain=False, VLLM_PYTHON=interpreter("vllm"))
    subprocess.run(model.split(), cwd=ROOT, check=True, timeout=START_SECONDS)
    log = tmp_path / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            serve.split(), cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True
        )
    try:
        await_health(server, port, log)
        done = subprocess.run(train.split(), cwd=ROOT, env=env, capture_output=True, text=True, timeout=START_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait(30)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "the server's answer is the trained model's own"


def await_health(server: subprocess.Popen[bytes], port: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            assert server.poll() is None, log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
            time.sleep(0.5)
