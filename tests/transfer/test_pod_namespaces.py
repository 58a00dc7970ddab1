"""Pods in namespaces of their own, planned by the operator: sender and receiver find each other and move weights."""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from pod_namespaces import Pod, Running, connect, why_not
from pod_routes import CASES, run

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


MEET = """
import os, socket, sys, time
mine, other, scratch = sys.argv[1:]
print(os.getpid(), socket.gethostname(), os.listdir("/dev/shm"), os.listdir(scratch), flush=True)
for place in ("/dev/shm", scratch):
    open(os.path.join(place, "mine"), "w").close()
print(sorted(name for _, name in socket.if_nameindex()), flush=True)
with socket.create_server((mine, 4444)) as server:
    for _ in range(1200):
        try:
            talk = socket.create_connection((other, 4444), timeout=5)
            break
        except OSError:
            time.sleep(0.1)
    talk.send(socket.gethostname().encode())
    heard = server.accept()[0]
    print(heard.recv(100).decode(), flush=True)
    # A veth pair goes with the first of its ends: stay until told.
    sys.stdin.read()
"""


def pod(name: str, command: list[str], address: str = "", scratch: str = "") -> Pod:
    return Pod(name=name, command=tuple(command), env=dict(os.environ), address=address, scratch=scratch)


def lines_of(running: Running, count: int) -> list[str]:
    deadline = time.monotonic() + 120
    while len(lines := running.out.read_text().splitlines()) < count:
        assert running.process.poll() is None, running.tail()
        assert time.monotonic() < deadline, running.tail()
        time.sleep(0.02)
    return lines


def test_pods_have_their_own_memory_names_and_network_and_reach_each_other(tmp_path: Path) -> None:
    scratch = tmp_path / "run"
    scratch.mkdir()
    places = {"one": ("10.213.8.1", "10.213.8.2"), "two": ("10.213.8.2", "10.213.8.1")}
    with ExitStack() as ends:
        pods = {
            name: ends.enter_context(
                Running(pod(name, [sys.executable, "-c", MEET, *ips, str(scratch)], ips[0], str(scratch)), tmp_path)
            )
            for name, ips in places.items()
        }
        connect(*pods.values())
        for running in pods.values():
            running.go()
        assert lines_of(pods["one"], 3) == ["1 one [] []", "['eth0', 'lo']", "two"]
        assert lines_of(pods["two"], 3) == ["1 two [] []", "['eth0', 'lo']", "one"]
    assert list(scratch.iterdir()) == []


def held(reader: int) -> bool:
    try:
        return os.read(reader, 1) != b""
    except BlockingIOError:
        return True


def test_the_end_of_a_pod_ends_all_that_it_started(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with Running(pod("one", ["sh", "-c", f"setsid sleep 600 >{pipe} & echo started; sleep 600"]), tmp_path) as running:
        running.go()
        lines_of(running, 1)
        # Without a writer a pipe reads as ended; with one it has nothing yet.
        deadline = time.monotonic() + 120
        while not held(reader):
            assert time.monotonic() < deadline, running.tail()
    os.set_blocking(reader, True)
    assert select.select([reader], [], [], 120)[0], "a process of the pod is still there"
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_weights_go_between_two_pods_as_the_operator_plans_them() -> None:
    case = next(case for case in CASES if case.key == "dedicated")
    outcome = run(case, "8x64KiB", 2, cpu=True)
    assert outcome.wrong == []
    assert outcome.row.repeats == 2
    assert "a network each" in outcome.row.note
    assert "NCCL_SOCKET_NTHREADS=4" in outcome.row.note
