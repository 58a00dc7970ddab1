"""Between two GPUs of one node, pods as they really are: the route is the placement's, and the condition says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from pod_namespaces import why_not
from pod_routes import CASES, Case, run

REASON = "needs two GPUs" if torch.cuda.device_count() < 2 else why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "-")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_a_placement_s_pods_take_its_route_or_say_why_they_can_t(case: Case) -> None:
    outcome = run(case, "64x1MiB", 3)
    assert outcome.wrong == []
