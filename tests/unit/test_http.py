"""The agent's HTTP and metrics, served for a real sender and real receivers."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from weightsync_agent import runtime
from weightsync_agent.errors import Closed, ConfigError, StepFailed
from weightsync_agent.http import MAX_SOCKET_PATH, AgentServer
from weightsync_agent.receiver import Receiver
from weightsync_agent.sender import Sender
from weightsync_api.agent_config import AgentConfig
from weightsync_api.reports import AgentState, Report

WAIT_SECONDS = 60
"""Deadline of everything that must happen; nothing waits this long unless it is broken."""


class Engine:
    """A receiver and its loop in a thread, whose `load_weights` can be told to fail."""

    def __init__(self, config: AgentConfig, rank: int) -> None:
        self.fail = threading.Event()
        self.receiver = Receiver(self._load, config=config, rank=rank)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()

    def _load(self, named: list[tuple[str, torch.Tensor]]) -> None:
        if self.fail.is_set():
            raise RuntimeError("the loader is broken")

    def _loop(self) -> None:
        while not self._end.is_set():
            try:
                self.receiver.poll(timeout=0.05)
            except Closed:
                break
        self.receiver.close()

    def close(self) -> None:
        self._end.set()
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()


class Group:
    """A sender and one receiver of one WeightSync, in this process, each served over HTTP."""

    def __init__(self, directory: Path) -> None:
        endpoint = f"ipc://{directory}/control"
        config = AgentConfig.model_validate(
            {
                "namespace": "default", "name": "sample", "uid": "17", "device": "CPU", "transport": "IPC",
                "receivers": 1, "joinTimeoutSeconds": WAIT_SECONDS, "bind": endpoint, "connect": endpoint,
                "runtimeDir": str(directory),
            }
        )  # fmt: skip
        self.sender = Sender({"weight": torch.ones(1000), "bias": torch.ones(10)}, config=config)
        self.engine = Engine(config, 1)
        self.sending = AgentServer(self.sender, "127.0.0.1:0", 0)
        self.receiving = AgentServer(self.engine.receiver, f"unix:{directory}", 1)
        until(lambda: self.engine.receiver.state.state == AgentState.JOINED)

    def close(self) -> None:
        self.sender.close()
        self.engine.close()
        self.sending.close()
        self.receiving.close()


@pytest.fixture
def directory() -> Iterator[Path]:
    # Not pytest's tmp_path: a Unix socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ws-") as name:
        yield Path(name)


@pytest.fixture
def group(directory: Path) -> Iterator[Group]:
    made = Group(directory)
    yield made
    made.close()


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=WAIT_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(WAIT_SECONDS)
        self.sock.connect(self._path)


def ask(server: AgentServer, path: str, method: str = "GET", **options: Any) -> tuple[int, str]:
    """Status and body."""
    if server.address.startswith("/"):
        connection: http.client.HTTPConnection = UnixConnection(server.address)
    else:
        host, _, port = server.address.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_SECONDS)
    try:
        connection.request(method, path, **options)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def report(server: AgentServer, query: str) -> Report:
    status, body = ask(server, f"/report?{query}")
    assert status == 200, body
    return Report.model_validate_json(body)


def samples(server: AgentServer) -> dict[str, float]:
    """Metrics by name and labels, as Prometheus reads them."""
    status, body = ask(server, "/metrics")
    assert status == 200
    found = {}
    for family in text_string_to_metric_families(body):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not reached():
        assert time.monotonic() < deadline, "it did not come to this in time"
        time.sleep(0.01)


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
    server = AgentServer(group.sender, "127.0.0.1:0", 0)
    address = server.address
    reader = http.client.HTTPConnection(address, timeout=WAIT_SECONDS)
    reader.request("GET", "/healthz")
    assert reader.getresponse().read() == b"ok\n"
    stays, ends = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ends)
        os.read(stays, 1)  # as a worker that is forked and never executes anything
        os._exit(0)
    try:
        reader.request("GET", "/healthz")  # the same connection: the parent's is untouched
        assert reader.getresponse().read() == b"ok\n"
        assert ask(server, "/healthz")[0] == 200
        server.close()
        assert reader.sock.recv(1) == b""
        again = AgentServer(group.sender, address, 0)
        assert ask(again, "/healthz")[0] == 200
        again.close()
    finally:
        reader.close()
        os.close(ends)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.close(stays)


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


# --- metrics --------------------------------------------------------------------------------------------------------


def test_metrics_count_each_step_once_however_often_they_are_read(group: Group) -> None:
    for _ in range(3):
        group.sender.step()
        samples(group.sending)
    found = samples(group.sending)
    assert found["weightsync_steps_total{result=complete}"] == 3
    assert found["weightsync_steps_total{result=failed}"] == 0
    assert found["weightsync_step_duration_seconds_count"] == 3
    assert 0 < found["weightsync_step_duration_seconds_sum"] < WAIT_SECONDS
    assert found["weightsync_ack_latency_seconds_count"] == 3
    assert found["weightsync_step_bytes_total"] == 3 * 4040
    assert found["weightsync_last_step"] == 3
    assert found["weightsync_ready"] == 1
    assert found["weightsync_receivers"] == 1


def test_metrics_tell_more_steps_than_a_report_keeps(group: Group) -> None:
    for number in range(150):
        group.sender.step()
        if number % 50 == 0:  # nobody does 64 steps within a look at them
            until(lambda told=number + 1: group.sending.metrics._seen == told)
    assert samples(group.sending)["weightsync_steps_total{result=complete}"] == 150


def test_a_failed_step_and_its_error_are_counted_on_both_sides(group: Group) -> None:
    group.sender.step()
    group.engine.fail.set()
    with pytest.raises(StepFailed):
        group.sender.step()
    sender, receiver = samples(group.sending), samples(group.receiving)
    assert sender["weightsync_steps_total{result=failed}"] == 1
    assert sender["weightsync_errors_total{kind=receiver}"] == 1
    assert receiver["weightsync_errors_total{kind=load}"] == 1
    assert receiver["weightsync_ready"] == 0
    assert receiver["weightsync_last_step"] == 1


def test_memory_metrics_are_those_of_the_report(group: Group) -> None:
    group.sender.step()
    me, found = group.sender.report().agents[0].memory, samples(group.sending)
    assert found["weightsync_reserved_bytes"] == me.reserved_after > 0
    assert found["weightsync_allocated_bytes"] == me.allocated_after
    assert found["weightsync_reserved_growth_bytes"] == me.reserved_after - me.reserved_before
    assert samples(group.receiving)["weightsync_reserved_bytes"] > 0


def test_build_info_names_the_versions(group: Group) -> None:
    info = next(name for name in samples(group.sending) if name.startswith("weightsync_build_info{"))
    assert f"torch={torch.__version__}" in info
    assert "protocol=1" in info
    assert "version=" in info


def test_metrics_follow_the_conventions_and_their_number_is_bounded(group: Group) -> None:
    group.sender.step()
    text = ask(group.sending, "/metrics")[1]
    names = set()
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("weightsync_")
        assert family.documentation.endswith(".")
        for unit in ("bytes", "seconds"):
            if unit in family.name:
                assert f"in {unit}" in family.documentation, f"{family.name}: the help text has no unit"
        for sample in family.samples:
            assert not sample.name.endswith("_created")
            names |= set(sample.labels)
    assert names == {"result", "kind", "le", "version", "torch", "protocol"}


def test_a_trainers_own_metrics_stay_its_own(group: Group) -> None:
    assert not any("weightsync" in family.name for family in prometheus_client.REGISTRY.collect())


def test_metrics_come_in_the_format_that_is_asked_for(group: Group) -> None:
    text = ask(group.sending, "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})[1]
    assert text.endswith("# EOF\n")
