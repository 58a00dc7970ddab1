"""The examples with TRL and FSDP2 run as docs/trainers.md says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
SHIM = f"#!{sys.executable}\nfrom weightsync_operator.cli import main\nmain()\n"


def commands() -> Iterator[str]:
    page = (ROOT / "docs" / "trainers.md").read_text()
    yield from re.findall(r"^```sh engines\n(.*?)^```$", page, re.M | re.S)


def run(script: str, folder: Path) -> str:
    (folder / "weightsync").write_text(SHIM)
    (folder / "weightsync").chmod(0o755)
    script = script.replace(".venv/bin/python", sys.executable).replace(".venv/bin/weightsync", f"{folder}/weightsync")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=ROOT,
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ws-") as made:  # short: sockets are in it
        yield Path(made)


def test_grpo_says_after_each_step_that_engine_and_trainer_agree(folder: Path) -> None:
    (script,) = (text for text in commands() if "trl-grpo" in text)
    said = re.findall(r"step (\d): the engine says what the trainer says: (\w+)", run(script, folder))
    assert said == [(str(number), "True") for number in range(1, 6)]


def test_two_ranks_of_fsdp2_send_as_one(folder: Path) -> None:
    (script,) = (text for text in commands() if "fsdp2" in text)
    said = run(script, folder)
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+), \d+ bytes sent", said)]
    assert len(losses) == 5
    assert "fsdp2 done: 5 steps, receivers 1/1, verified 1 of 5" in said
