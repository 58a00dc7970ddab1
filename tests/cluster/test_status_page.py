"""docs/status.md shows what kubectl says: each of its commands is run, and its answer compared with the page."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from control_plane import ControlPlane, Tree
from kubectl import WAIT
from operator_process import OperatorProcess, Sender, eventually, manifest, run_pods

PAGE = Path(__file__).parents[2] / "docs" / "status.md"
NAME = "qwen3-grpo"
SHOWN = re.compile(r"^```sh\n(kubectl [^`]*?)\n```\n+```text\n(.*?)^```$", re.M | re.S)
"""A command, and the answer that follows it."""
VARYING = (
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z"), "TIME"),
    (re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), "UID"),
    (re.compile(r"(Resource Version:\s+)\d+"), r"\1N"),
    (re.compile(r"\b(\d+[smh])+(?=$|\s{2,})", re.M), "AGE"),
    (re.compile(r"[ ]+"), " "),
    (re.compile(r"[ ]+$", re.M), ""),
)


@pytest.fixture
def shown(cluster: ControlPlane, namespace: str) -> Iterator[str]:
    """A namespace with the WeightSync of the page: two receivers, two steps."""
    sender = Sender(namespace, NAME, receivers=2)
    try:
        with OperatorProcess(cluster, "-n", namespace, "--status-interval", "0"):
            assert cluster.apply(manifest(NAME, receivers={"replicas": 2}), namespace).returncode == 0
            eventually(lambda: len(cluster.list("pods", namespace)) == 3)
            run_pods(cluster, namespace, sender)
            for number in (1, 2):
                sender.step()
                eventually(lambda n=number: status(cluster, namespace).get("step") == n)  # type: ignore[misc]
            # Every pod is seen as running by then.
            cluster.kubectl("-n", namespace, "wait", "--for=condition=Ready", f"ws/{NAME}", WAIT)
            yield namespace
    finally:
        sender.close()


def status(cluster: ControlPlane, namespace: str) -> Tree:
    tree = cluster.get("weightsync", NAME, namespace)
    found: Tree = (tree or {}).get("status", {})
    return found


def answers(cluster: ControlPlane, namespace: str) -> list[tuple[str, str]]:
    """Each command of the page, and what it says now."""
    found = []
    for command, _ in SHOWN.findall(PAGE.read_text()):
        words = shlex.split(command)[1:]
        text = cluster.kubectl("-n", namespace, *words).replace(namespace, "default")
        found.append((command, "\n".join(line.rstrip() for line in text.splitlines()) + "\n"))
    return found


def masked(text: str) -> str:
    for pattern, instead in VARYING:
        text = pattern.sub(instead, text)
    return text


def test_the_page_shows_what_kubectl_says(cluster: ControlPlane, shown: str) -> None:
    page = SHOWN.findall(PAGE.read_text())
    assert len(page) >= 5
    for (command, said), (_, says) in zip(page, answers(cluster, shown), strict=True):
        if " describe " in command:  # its events come in the order of their seconds
            said, says = said.partition("Events:")[0], says.partition("Events:")[0]
        assert masked(says) == masked(said), command
