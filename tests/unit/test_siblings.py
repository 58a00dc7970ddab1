"""A pod of several agents is ready when each of them is: one probe asks for all."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator

import pytest
from weightsync_agent import siblings
from weightsync_agent.errors import ConfigError
from weightsync_agent.http import AgentServer
from weightsync_api.reports import AgentReport, AgentState, Report


class Agent:
    """What an agent's server serves; `state` is its own."""

    def __init__(self, rank: int) -> None:
        self.errors: Counter[str] = Counter()
        self.rank = rank
        self.state = AgentState.SYNCED

    def report(self) -> Report:
        step = 1 if self.state == AgentState.SYNCED else 0
        me = AgentReport(rank=self.rank, state=self.state, step=step, message="its engine is broken")
        return Report(namespace="default", name="demo", session="s", agents=[me])


def served_in_a_row(agents: list[Agent]) -> tuple[int, list[AgentServer]]:
    """At the first ports in a row that nobody else has, below those of outgoing connections."""
    for port in range(20_000, 32_000, len(agents)):
        servers: list[AgentServer] = []
        try:
            servers.extend(AgentServer(agent, f"127.0.0.1:{port + agent.rank}", agent.rank) for agent in agents)
            return port, servers
        except ConfigError:  # it is in use
            for server in servers:
                server.close()
    raise AssertionError("no free ports")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long one may take to answer is a kubelet's matter: on a machine that stalls for as long it says nothing."""
    monkeypatch.setattr(siblings, "ANSWER_SECONDS", 60.0)


@pytest.fixture
def pod() -> Iterator[tuple[int, list[Agent], list[AgentServer]]]:
    agents = [Agent(rank) for rank in range(3)]
    port, servers = served_in_a_row(agents)
    yield port, agents, servers
    for server in servers:
        server.close()


def ready(port: int, agents: int) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz?agents={agents}", timeout=90) as answer:
            return answer.status, json.loads(answer.read())["reason"]
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["reason"]


def test_it_is_ready_when_all_are(pod: tuple[int, list[Agent], list[AgentServer]]) -> None:
    port, agents, _ = pod
    assert ready(port, 3) == (200, "")
    agents[2].state = AgentState.TAINTED
    status, why = ready(port, 3)
    assert status == 503
    assert f"the agent at port {port + 2} is not ready" in why
    assert "its engine is broken" in why
    assert ready(port, 2) == (200, ""), "the third is none of these"
    agents[2].state = AgentState.SYNCED
    assert ready(port, 3) == (200, "")


def test_one_that_does_not_answer_is_not_ready(pod: tuple[int, list[Agent], list[AgentServer]]) -> None:
    port, _, servers = pod
    servers[1].close()
    status, why = ready(port, 3)
    assert status == 503
    assert f"the agent at port {port + 1} does not answer yet" in why


def test_its_own_reason_comes_first(pod: tuple[int, list[Agent], list[AgentServer]]) -> None:
    port, agents, servers = pod
    agents[0].state = AgentState.STARTING
    servers[1].close()
    status, why = ready(port, 3)
    assert status == 503
    assert "port" not in why
