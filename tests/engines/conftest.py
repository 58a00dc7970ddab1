"""Tests with real engines are skipped as a whole where `make test-engines` has not installed them."""

from __future__ import annotations

from pathlib import Path

import pytest
from peer_process import ENVIRONMENTS

HERE = Path(__file__).parent
ENGINE_OF = {"test_checkpoint_engine": "verl", "test_verl": "verl", "test_sglang": "sglang", "test_vllm": "vllm"}
"""What a file's name begins with, and the environment that its engine is in."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent != HERE:
            continue
        for start, name in ENGINE_OF.items():
            python = ENVIRONMENTS / name / "bin" / "python"
            if item.path.name.startswith(start) and not python.exists():
                item.add_marker(pytest.mark.skip(reason=f"there is no {python}: make test-engines installs it"))
