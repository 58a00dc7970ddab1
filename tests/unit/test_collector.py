"""Garbage is collected again after a join, as it was before."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from weightsync_agent.collector import held_back


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


def fail_within(seen: list[bool]) -> None:
    with held_back():
        seen.append(gc.isenabled())
        raise KeyError


@pytest.mark.parametrize("before", [True, False])
def test_the_collector_is_off_within_and_as_before_after_it_and_after_an_error(before: bool) -> None:
    (gc.enable if before else gc.disable)()
    seen: list[bool] = []
    with pytest.raises(KeyError):
        fail_within(seen)
    assert seen == [False]
    assert gc.isenabled() is before
