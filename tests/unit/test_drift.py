"""What was planned is recognised in what the API server made of it, and a change by others is seen."""

from __future__ import annotations

from typing import Any

import pytest
from weightsync_operator.drift import covered


@pytest.mark.parametrize(
    ("planned", "live"),
    [
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"memory": "1024Mi"}, {"memory": "1Gi"}),
        ({"cpu": "1000m"}, {"cpu": "1"}),
        ({"cpu": 2}, {"cpu": "2"}),
        ({"value": "", "readOnly": False, "env": []}, {}),
        ({"emptyDir": {}}, {"emptyDir": {}}),
        ({"volumes": [{"name": "b"}, {"name": "a"}]}, {"volumes": [{"name": "a", "x": 1}, {"name": "b"}]}),
        ({"command": ["a", "b"]}, {"command": ["a", "b"]}),
    ],
)
def test_covered(planned: dict[str, Any], live: dict[str, Any]) -> None:
    assert covered(planned, live)


@pytest.mark.parametrize(
    ("planned", "live"),
    [
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {}),
        ({"a": {"b": "x"}}, {"a": "x"}),
        ({"replicas": 0}, {"replicas": 1}),
        ({"hostIPC": True}, {"hostIPC": False}),
        ({"flag": True}, {"flag": 1}),
        ({"memory": "1Gi"}, {"memory": "1G"}),
        ({"volumes": [{"name": "a"}]}, {"volumes": [{"name": "a"}, {"name": "b"}]}),
        ({"volumes": [{"name": "a"}]}, {"volumes": [{"name": "b"}]}),
        ({"command": ["a", "b"]}, {"command": ["b", "a"]}),
        ({"key": "5e"}, {"key": "5"}),
    ],
)
def test_not_covered(planned: dict[str, Any], live: dict[str, Any]) -> None:
    assert not covered(planned, live)
