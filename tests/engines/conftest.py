"""Tests with real engines are skipped as a whole where `make test-engines` has not installed them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
ENGINES = Path(os.environ.get("WEIGHTSYNC_ENGINES") or CACHE / "weightsync" / "engines")
ENVIRONMENTS = {"test_checkpoint_engine": "verl", "test_verl": "verl", "test_sglang": "sglang", "test_vllm": "vllm"}
"""What a file's name begins with, and the environment that its engine is in."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent != HERE:
            continue
        for start, name in ENVIRONMENTS.items():
            python = ENGINES / name / "bin" / "python"
            if item.path.name.startswith(start) and not python.exists():
                item.add_marker(pytest.mark.skip(reason=f"there is no {python}: make test-engines installs it"))
