"""What NCCL says about its channels becomes one word; what it says about a failure becomes a sentence."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from weightsync_agent.cuda.nccl_route import LOCAL, UNKNOWN, advice, captured, last_warning, parse_route

PREFIX = "trainer-0:9:31 [0] NCCL INFO "


def log(*messages: str) -> str:
    return "".join(PREFIX + message + "\n" for message in messages)


@pytest.mark.parametrize(
    ("message", "route"),
    [
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", "P2P/CUMEM"),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read", "P2P/CUMEM"),
        ("Channel 15/0 : 0[0] -> 1[1] via P2P/IPC/read/CE", "P2P/IPC"),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/MNNVL", "P2P/MNNVL"),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/direct pointer/read", "P2P/direct"),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/indirect/2[2]", "P2P/indirect"),
        ("Channel 02 : 0[0] -> 1[1] via SHM/direct/direct", "SHM/direct"),
        ("Channel 02 : 0[0] -> 1[1] via SHM/CE/direct", "SHM/CE"),
        ("Channel 02 : 0[c000] -> 1[d000] via SHM/direct", "SHM/direct"),
        ("Channel 01/0 : 0[0] -> 1[0] [send] via NET/Socket/0", "NET/Socket"),
        ("Channel 01/0 : 1[0] -> 0[0] [receive] via NET/Socket/2/Shared", "NET/Socket"),
        ("Channel 01/0 : 0[0] -> 1[0] [send] via NET/IB/0(3)/GDRDMA(PCI)", "NET/IB"),
        ("Channel 01/0 : 0[0] -> 1[0] [send] via NET/AWS Libfabric/0/GDRDMA", "NET/AWS"),
    ],
)
def test_every_form_of_a_channel_line_is_read(message: str, route: str) -> None:
    assert parse_route(log("Using network Socket", message, "Connected all rings"), 2) == route


def test_the_slowest_of_several_routes_is_the_groups() -> None:
    text = log(
        "Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0",
        "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM",
        "Channel 01 : 0[0] -> 1[1] via SHM/direct/direct",
    )
    assert parse_route(text, 3) == "NET/Socket"
    assert parse_route("".join(text.splitlines(True)[1:]), 3) == "SHM/direct"


def test_words_that_are_no_channel_line_say_no_route() -> None:
    text = log("Channel 00/24 : 0 1", "P2P Chunksize set to 524288", "NET/Socket : Using [0]eth0:10.0.0.7<0>")
    assert parse_route(text, 2) == UNKNOWN
    assert parse_route(text, 1) == LOCAL


def test_the_last_warning_is_found_without_its_prefix() -> None:
    text = (
        log("x")
        + "\n[2026-10-01 10:00:00] host:9:31 [0] misc/socket.cc:93 NCCL WARN socketProgressOpt: closed\n"
        + "\n[2026-10-01 10:00:01] host:9:31 [0] transport/p2p.cc:275 NCCL WARN Cuda failure 'invalid device ordinal'\n"
    )
    assert last_warning(text) == "Cuda failure 'invalid device ordinal'"
    assert last_warning(log("x")) == ""


def test_a_host_id_over_pods_with_a_gpu_each_is_named_as_the_cause() -> None:
    said = "unhandled cuda error: Cuda failure 101 'invalid device ordinal'"
    assert "NCCL_P2P_DISABLE=1" in advice(said, {"NCCL_HOSTID": "n1"})
    assert advice(said, {"NCCL_HOSTID": "n1", "NCCL_P2P_DISABLE": "1"}) == ""
    assert advice(said, {}) == ""


def test_two_ranks_on_one_gpu_are_told_to_use_ipc() -> None:
    assert "use IPC" in advice("Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 53000", {})


def test_the_users_log_settings_come_back_and_the_log_is_reset_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.delenv("NCCL_DEBUG_FILE", raising=False)
    seen: list[str | None] = []
    with captured(lambda: seen.append(os.environ.get("NCCL_DEBUG_FILE"))) as capture:
        path = os.environ["NCCL_DEBUG_FILE"]
        with open(path, "w") as file:
            file.write("hello\n")
        assert capture.read() == "hello\n"
    assert capture.text == capture.read() == "hello\n"
    assert seen == [path, None]
    assert os.environ["NCCL_DEBUG"] == "WARN"
    assert "NCCL_DEBUG_FILE" not in os.environ


def test_a_log_file_of_the_users_own_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG_FILE", "/tmp/theirs.%h")
    resets: list[int] = []
    with captured(lambda: resets.append(1)) as capture:
        assert os.environ["NCCL_DEBUG_FILE"] == "/tmp/theirs.%h"
    assert capture.text == ""
    assert not resets


def test_the_real_library_writes_into_the_capture_and_nothing_to_the_terminal() -> None:
    program = """
import torch
from weightsync_agent.errors import TransportError
from weightsync_agent.cuda.nccl import UNIQUE_ID_BYTES, library, unique_id
from weightsync_agent.cuda.nccl_route import captured
try:
    nccl = library()
except TransportError:
    print("skip")
    raise SystemExit
with captured(nccl.reset_log) as capture:
    assert len(unique_id()) == UNIQUE_ID_BYTES
assert "NCCL INFO" in capture.text, capture.text
assert unique_id() != unique_id()
print("done")
"""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ, timeout=280)
    if run.stdout == "skip\n":
        pytest.skip("torch without NCCL")
    assert run.stdout == "done\n", run.stderr
    assert "NCCL" not in run.stderr
