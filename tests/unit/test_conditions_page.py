"""docs/conditions.md has every condition and every reason that the code can give, and none that it can't."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from weightsync_api.reports import AgentState
from weightsync_api.v1alpha1 import ConditionType

ROOT = Path(__file__).parents[2]
OPERATOR = ROOT / "operator" / "weightsync_operator"
PAGE = (ROOT / "docs" / "conditions.md").read_text()
KUBERNETES = "Why pods don't run"
"""Where the page lists reasons that are Kubernetes' own: the code takes them as they come."""
JUDGES = {"true", "false", "unknown", "Problem"}


def given() -> set[str]:
    """The first text of every verdict and problem; of `f"Receiver{state}"` one for each state."""
    files = ("conditions.py", "pods.py", "pod_templates.py", "pod_network.py", "cluster.py", "resource_tree.py")
    found = {reason for name in files for reason in reasons(OPERATOR / name)}
    found.remove("Receiver")
    return found | {f"Receiver{state.value}" for state in AgentState if state != AgentState.SYNCED}


def reasons(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in JUDGES and node.args:
            first = node.args[0]
            if isinstance(first, ast.JoinedStr):
                first = first.values[0]
            if isinstance(first, ast.Constant):
                yield str(first.value)


def listed(text: str) -> list[str]:
    """The reasons of its tables' first columns."""
    return [word for row in re.findall(r"^\| (`[^|]*`) \|", text, re.M) for word in re.findall(r"`(\w+)`", row)]


def test_every_reason_that_can_be_given_is_on_the_page_and_no_other() -> None:
    before, _, rest = PAGE.partition(KUBERNETES)
    words, _, after = rest.partition("\n\nWhy nothing")
    ours = {*listed(before), *listed("Why nothing" + after)}
    assert given() - {*ours, *listed(words)} == set()
    # What the API server refuses comes with its own reason; two are usual.
    assert ours - given() == {"Forbidden", "Invalid", "Refused"}


def test_every_condition_has_a_section() -> None:
    assert re.findall(r"^## (.*)$", PAGE, re.M) == [kind.value for kind in ConditionType]


def test_reasons_of_pods_that_the_code_makes_up_are_on_the_page() -> None:
    text = (OPERATOR / "pod_status.py").read_text()
    made_up = set(re.findall(r'return "(\w+)"', text)) | set(re.findall(r'(?:or|reason=) ?"([A-Z]\w+)"', text))
    assert {"OOMKilled", "ProbeFailed", "Unschedulable", "FailedCreate"} <= made_up
    assert made_up - set(listed(PAGE)) == set()
