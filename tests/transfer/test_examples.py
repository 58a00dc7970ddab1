"""Every file in examples/ does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from weightsync_api.v1alpha1 import WeightSync

pytestmark = pytest.mark.timeout(300)

EXAMPLES = Path(__file__).parents[2] / "examples"
MANIFESTS = sorted(EXAMPLES.glob("*.yaml"))


def run(manifest: Path, *options: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory(prefix="ws-") as runtime:  # a name is taken once: not the user's own runs'
        return subprocess.run(
            [Path(sys.executable).with_name("weightsync"), "run", manifest, *options],
            env={**os.environ, "XDG_RUNTIME_DIR": runtime},
            capture_output=True,
            text=True,
            timeout=280,
        )


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_it_is_a_weightsync_named_as_its_file(manifest: Path) -> None:
    assert WeightSync.model_validate(yaml.safe_load(manifest.read_text())).metadata.name == manifest.stem


@pytest.mark.parametrize("script", ["trainer.py", "engine.py"])
def test_the_librarys_examples_have_ten_lines_or_so(script: str) -> None:
    code = (EXAMPLES / script).read_text().partition('"""\n\n')[2]
    assert len([line for line in code.splitlines() if line and not line.startswith(("import", "from"))]) <= 10


def test_the_librarys_engines_hold_what_the_trainer_sent_at_each_step() -> None:
    done = run(EXAMPLES / "library.yaml")
    assert done.returncode == 0, done.stderr
    sent = dict(re.findall(r"\[sender\] step (\d+) sent, sum (\S+)", done.stderr))
    assert sorted(sent) == ["1", "2", "3", "4", "5"]
    assert len(set(sent.values())) == 5
    for rank in (1, 2):
        assert dict(re.findall(rf"\[receiver-{rank}\] step (\d+) holds, sum (\S+)", done.stderr)) == sent
        assert f"[receiver-{rank}] the sender has finished" in done.stderr


def test_a_checkpoint_is_sent(tmp_path: Path) -> None:
    save_file({"weight": torch.arange(1000.0)}, tmp_path / "model.safetensors")
    manifest = yaml.safe_load((EXAMPLES / "checkpoint.yaml").read_text())
    manifest["metadata"]["name"] = "checkpoint-test"
    manifest["spec"]["sender"]["source"]["checkpoint"]["path"] = str(tmp_path / "model.safetensors")
    (tmp_path / "checkpoint.yaml").write_text(yaml.safe_dump(manifest))
    done = run(tmp_path / "checkpoint.yaml", "--steps", "1")
    assert done.returncode == 0, done.stderr
    assert "receivers 2/2, verified 1 of 1" in done.stderr + done.stdout


def test_made_up_weights_are_sent(tmp_path: Path) -> None:
    manifest = yaml.safe_load((EXAMPLES / "synthetic.yaml").read_text())
    manifest["metadata"]["name"] = "synthetic-test"
    manifest["spec"]["receivers"]["replicas"] = 1  # 1.2 GB each
    (tmp_path / "synthetic.yaml").write_text(yaml.safe_dump(manifest))
    done = run(tmp_path / "synthetic.yaml", "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert "2 steps, receivers 1/1, verified 1 of 2" in done.stderr + done.stdout
