"""A source that can't be read is told in a sentence before anything is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

DATA = Path(__file__).parents[1] / "data" / "bad_manifests"


def run(manifest: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("weightsync")), "run", str(manifest), "--timeout", "280"]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ({"checkpoint": {"path": "nowhere"}}, "checkpoint path nowhere doesn't exist"),
        ({"checkpoint": {"path": "empty"}}, "checkpoint path empty holds no safetensors"),
        ({"checkpoint": {"path": "short.safetensors"}}, "short.safetensors"),
        ({"synthetic": {"model": "no-such-model"}}, "no model has this name"),
    ],
)
def test_unreadable_source_is_refused_before_anything_starts(source, sentence, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    manifest = tmp_path / "manifest.yaml"
    spec = {"device": "CPU", "placement": "Colocated", "sender": {"source": source}}
    resource = {
        "apiVersion": "weightsync.dev/v1alpha1",
        "kind": "WeightSync",
        "metadata": {"name": "bad-source"},
        "spec": spec,
    }
    manifest.write_text(yaml.safe_dump(resource))
    found = run(manifest)
    assert found.returncode == 2
    assert found.stdout == ""
    assert len(found.stderr.splitlines()) == 1
    assert found.stderr.startswith(f'{manifest}: WeightSync "bad-source": spec.sender.source: ')
    assert sentence in found.stderr


def test_every_bad_manifest_is_refused_in_one_sentence() -> None:
    for manifest in sorted(DATA.iterdir()):
        found = run(manifest)
        assert found.returncode == 2, manifest.name
        assert found.stdout == "", manifest.name
        assert found.stderr.strip(), manifest.name
        assert "Traceback" not in found.stderr, manifest.name
