"""The agent's HTTP, served for a real sender and real receivers."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import stat
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from forked_child import idle_child
from http_group import *  # noqa: F403 - the fixtures
from http_group import WAIT_SECONDS, Group, ask, report, until
from loopback import addresses
from weightsync_agent import runtime
from weightsync_agent.errors import ConfigError, StepFailed
from weightsync_agent.http import MAX_SOCKET_PATH, AgentServer
from weightsync_api.reports import AgentState, Report

# --- health and readiness -------------------------------------------------------------------------------------------


def test_agents_are_healthy_from_the_start_and_ready_after_the_first_whole_step(group: Group) -> None:
    for server in (group.sending, group.receiving):
        assert ask(server, "/healthz") == (200, "ok\n")
        status, body = ask(server, "/readyz")
        assert status == 503
        assert json.loads(body)["reason"]
    group.sender.step()
    for server in (group.sending, group.receiving):
        status, body = ask(server, "/readyz")
        assert (status, json.loads(body)) == (200, {"ready": True, "reason": "", "step": 1})


def test_a_tainted_receiver_is_not_ready_and_says_why_until_a_step_is_whole_again(group: Group) -> None:
    group.sender.step()
    group.engine.fail.set()
    with pytest.raises(StepFailed):
        group.sender.step()
    assert ask(group.receiving, "/readyz")[0] == 503
    until(lambda: "the loader is broken" in ask(group.receiving, "/readyz")[1])
    status, body = ask(group.receiving, "/readyz")
    assert (status, json.loads(body)["step"]) == (503, 1)
    assert "Tainted" in json.loads(body)["reason"]
    group.engine.fail.clear()
    group.sender.step()
    assert ask(group.receiving, "/readyz")[0] == 200


# --- reports --------------------------------------------------------------------------------------------------------


def test_a_report_has_every_kept_step_above_the_one_asked_for(group: Group) -> None:
    for _ in range(3):
        group.sender.step()
    found = report(group.sending, "after=1")
    assert (found.namespace, found.name, found.uid) == ("default", "sample", "17")
    assert [step.step for step in found.steps] == [2, 3]
    assert [agent.rank for agent in found.agents] == [0, 1]
    assert [step.step for step in report(group.sending, "").steps] == [1, 2, 3]


def test_a_report_is_waited_for_until_the_step_is_done(group: Group) -> None:
    group.sender.step()
    found: list[Report] = []
    asking = threading.Thread(target=lambda: found.append(report(group.sending, "after=1")))
    asking.start()
    until(lambda: group.sending._polls == 1)
    group.sender.step()
    asking.join(WAIT_SECONDS)
    assert [step.step for step in found[0].steps] == [2]


def test_a_report_without_news_comes_after_the_time_that_was_asked_for(group: Group) -> None:
    group.sender.step()
    began = time.monotonic()
    assert report(group.sending, "after=1&timeout=0.3").steps == []
    assert time.monotonic() - began >= 0.3


def test_a_report_is_answered_as_soon_as_an_agent_changes_its_state(group: Group) -> None:
    group.sender.step()
    found: list[Report] = []
    asking = threading.Thread(target=lambda: found.append(report(group.sending, "after=1")))
    asking.start()
    until(lambda: group.sending._polls == 1)
    group.engine.close()
    asking.join(WAIT_SECONDS)
    assert found[0].steps == []
    assert found[0].agents[1].state == AgentState.LOST


def test_a_receiver_reports_itself(group: Group) -> None:
    group.sender.step()
    found = report(group.receiving, "after=0")
    assert [(agent.rank, agent.state, agent.step) for agent in found.agents] == [(1, AgentState.SYNCED, 1)]
    assert found.steps == []


def test_the_last_report_says_that_there_will_be_no_more(group: Group) -> None:
    group.sender.step()
    group.sender.close()
    found = report(group.sending, "after=0")
    assert found.finished
    assert [step.step for step in found.steps] == [1]
    assert report(group.sending, "after=1").finished  # at once: nothing is waited for any more


@pytest.mark.parametrize("query", ["after=-1", "after=one", "after=1.5", "after=", "after=" + "9" * 30, "timeout=soon"])
def test_a_bad_query_is_refused_with_a_sentence(group: Group, query: str) -> None:
    status, body = ask(group.sending, f"/report?{query}")
    assert status == 400
    assert query.partition("=")[0] in body
    assert "write" in body


def test_other_paths_methods_and_huge_requests_are_refused_and_serving_goes_on(group: Group) -> None:
    assert ask(group.sending, "/")[0] == 404
    assert "/report?after=STEP" in ask(group.sending, "/reports")[1]
    assert ask(group.sending, "/report", method="POST", body=b"x" * 10_000)[0] == 405
    assert ask(group.sending, "/report?after=" + "1" * 100_000)[0] == 400
    assert ask(group.sending, "/healthz", headers={"X-Long": "x" * 100_000})[0] == 400
    assert ask(group.sending, "/healthz")[0] == 200


def test_a_step_does_not_wait_for_those_who_ask(group: Group) -> None:
    group.sender.step()
    connections = [socket.create_connection(("127.0.0.1", int(group.sending.address.split(":")[1]))) for _ in range(20)]
    for connection in connections:  # half a request each, and never the rest
        connection.sendall(b"GET /report?after=1 HTTP/1.1\r\n")
    assert group.sender.step().complete
    assert ask(group.sending, "/healthz")[0] == 200
    for connection in connections:
        connection.close()


# --- the address ----------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_said_in_a_sentence(group: Group) -> None:
    with pytest.raises(ConfigError, match=rf"{group.sending.address} is in use"):
        AgentServer(group.sender, group.sending.address, 0)


def test_a_socket_in_use_is_said_in_a_sentence_and_stays(group: Group, directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"rank-1.http is in use, perhaps by another agent of the same rank"):
        AgentServer(group.engine.receiver, f"unix:{directory}", 1)
    assert ask(group.receiving, "/healthz")[0] == 200


def test_the_socket_of_a_killed_agent_is_taken_over(group: Group, directory: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(directory / "rank-5.http"))
    server = AgentServer(group.sender, f"unix:{directory}", 5)
    assert ask(server, "/healthz")[0] == 200
    server.close()


def test_a_forked_child_that_ends_takes_nothing_of_its_parents_away(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_server", group.receiving)  # what `attach` keeps until the interpreter's end
    child = os.fork()
    if child == 0:
        signal.alarm(WAIT_SECONDS)  # a child that hangs ends, and not well
        code = 1
        try:
            runtime.detach()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ask(group.receiving, "/healthz")[0] == 200


def test_a_forked_child_holds_neither_the_port_nor_a_reader_beyond_its_parents_server(group: Group) -> None:
    # Where no other process takes the port in the moment in which it is free.
    server = AgentServer(group.sender, f"{next(addresses)}:0", 0)
    address = server.address
    reader = http.client.HTTPConnection(address, timeout=WAIT_SECONDS)
    reader.request("GET", "/healthz")
    assert reader.getresponse().read() == b"ok\n"
    with closing(reader), idle_child():
        reader.request("GET", "/healthz")  # the same connection: the parent's is untouched
        assert reader.getresponse().read() == b"ok\n"
        assert ask(server, "/healthz")[0] == 200
        server.close()
        assert reader.sock.recv(1) == b""
        again = AgentServer(group.sender, address, 0)
        assert ask(again, "/healthz")[0] == 200
        again.close()


def test_a_socket_is_for_its_user_alone_and_goes_with_the_server(group: Group, directory: Path) -> None:
    path = directory / "rank-7.http"
    server = AgentServer(group.sender, f"unix:{directory}", 7)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    server.close()
    server.close()
    assert not path.exists()


@pytest.mark.parametrize("address", ["8080", "host:port", "0.0.0.0:99999", "http://0.0.0.0:8080", ""])
def test_an_address_that_is_none_is_refused_with_the_right_form(group: Group, address: str) -> None:
    with pytest.raises(ConfigError, match=r"write HOST:PORT, such as 0\.0\.0\.0:8080, or unix:DIRECTORY"):
        AgentServer(group.sender, address, 0)


def test_a_socket_path_that_is_too_long_is_refused(group: Group, directory: Path) -> None:
    with pytest.raises(ConfigError, match=f"longer than {MAX_SOCKET_PATH} bytes"):
        AgentServer(group.sender, f"unix:{directory / ('x' * MAX_SOCKET_PATH)}", 0)


# --- the end --------------------------------------------------------------------------------------------------------


def test_the_end_waits_for_a_reader_until_it_has_the_last_report(group: Group) -> None:
    group.sender.step()
    report(group.sending, "after=0")
    group.sender.close()
    lingering = threading.Thread(target=group.sending.linger, args=(WAIT_SECONDS,))
    lingering.start()
    assert report(group.sending, "after=1").finished
    lingering.join(WAIT_SECONDS / 2)
    assert not lingering.is_alive()


def test_the_end_waits_for_nobody_where_nobody_reads(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEIGHTSYNC_EXIT_ON_STDIN_EOF", raising=False)
    group.sender.step()
    group.sender.close()
    began = time.monotonic()
    group.sending.linger(WAIT_SECONDS)
    assert time.monotonic() - began < WAIT_SECONDS / 2
