"""GPU tests: skipped with a reason where there is no CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peer import Peer

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)


@pytest.fixture
def device() -> torch.device:
    torch.cuda.init()
    return torch.device("cuda", 0)


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    """Another process on the same GPU, shared by the tests of one module."""
    with Peer() as other:
        yield other


@pytest.fixture
def victim() -> Iterator[Peer]:
    """Another process on the same GPU, of this test alone, to be killed."""
    with Peer() as other:
        yield other
