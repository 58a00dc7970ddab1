"""`.ci/run`, with stand-ins for make and the cluster: what it says of a failure, and what it leaves when it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "run"
WAIT_SECONDS = 120.0
MAKEFILE = """
check:
\t@echo check >>did
cluster:
\t@echo up >>did; $(CLUSTER)
cluster-images:
\t@echo images >>did
test:
\t@echo "test, skips: $${WEIGHTSYNC_NO_SKIP:-yes}" >>did; $(TEST)
test-torch211:
\t@echo oldest >>did
"""
CLUSTER = """#!/bin/sh
case $1 in
  why-not) echo "$WHY_NOT" ;;
  status) exit "${STATUS:-1}" ;;
  *) echo "$1" >>did ;;
esac
"""
STAYS = "echo $$$$ >left; exec sleep 600"


class Run:
    """One run in a folder of its own. `settings`: CLUSTER and TEST, what make does; WHY_NOT and STATUS, cluster.sh."""

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        self.folder = folder
        # Of its own: this test may itself be part of a CI that has told its tests not to skip.
        own = {name: value for name, value in os.environ.items() if not name.startswith("WEIGHTSYNC_")}
        self.process = subprocess.Popen(
            [folder / ".ci" / "run"],
            cwd=folder,
            env={**own, "TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def said(self) -> list[str]:
        output, _ = self.process.communicate(timeout=WAIT_SECONDS)
        return output.splitlines()

    def did(self) -> list[str]:
        return (self.folder / "did").read_text().splitlines()

    def left(self) -> int:
        """Process id of what STAYS has started."""
        return int(until(lambda: (self.folder / "left").read_text() if (self.folder / "left").exists() else ""))


def until(found: Callable[[], str]) -> str:
    deadline = time.monotonic() + WAIT_SECONDS
    while not (text := found()).endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return text


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def ci(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci" / "run")
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / "cache" / "weightsync" / "images").mkdir(parents=True)
    for name, text in (("cluster/cluster.sh", CLUSTER), ("engines/install.sh", "#!/bin/sh\n")):
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    runs: list[Run] = []

    def start(**settings: str) -> Run:
        runs.append(Run(tmp_path, settings))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.terminate()  # it ends what it has started, which a killed one would leave
            run.process.communicate(timeout=WAIT_SECONDS)


def test_all_parts_run_in_order_and_the_cluster_ends(ci: Callable[..., Run]) -> None:
    run = ci()
    said = run.said()
    assert run.process.returncode == 0, said
    assert run.did() == ["check", "up", "images", "test, skips: 1", "oldest", "down"]
    assert said[-1] == "ci: passed"


def test_a_cluster_that_was_up_stays(ci: Callable[..., Run]) -> None:
    run = ci(STATUS="0")
    run.said()
    assert "down" not in run.did()


def test_where_there_can_be_none_the_last_line_says_why(ci: Callable[..., Run]) -> None:
    run = ci(WHY_NOT="pods need root: sudo make cluster")
    said = run.said()
    assert run.did() == ["check", "test, skips: yes", "oldest"]
    assert said[-1] == "ci: passed, WITHOUT the tests with pods: pods need root: sudo make cluster"


def test_a_cluster_that_does_not_come_up_is_told_and_gone_before_tests_look_for_it(
    ci: Callable[..., Run],
) -> None:
    run = ci(CLUSTER="echo etcd ended >&2; exit 1")
    said = run.said()
    assert run.process.returncode == 0, said
    assert run.did() == ["check", "up", "down", "test, skips: yes", "oldest"]
    assert any("etcd ended" in line for line in said)
    assert any("make cluster cluster-images FAILED" in line for line in said)
    assert any(line.startswith("ci: NO CLUSTER CAME UP") for line in said)
    assert said[-1] == "ci: passed, WITHOUT the tests with pods: no cluster came up"


def test_a_part_that_fails_is_named_and_the_cluster_ends(ci: Callable[..., Run]) -> None:
    run = ci(TEST="exit 3")
    said = run.said()
    assert run.process.returncode != 0
    assert run.did() == ["check", "up", "images", "test, skips: 1", "down"]
    assert any(line.startswith("ci: make test FAILED") for line in said)
    assert said[-1] == "ci: FAILED"


def fails(until: str, tests: int = 2) -> str:
    """Tests of make that fail, but for where `until` is true."""
    named = json.dumps({f"tests/a.py::test_{number}[x y]": True for number in range(tests)})
    kept = f"mkdir -p .pytest_cache/v/cache; echo '{named}' >.pytest_cache/v/cache/lastfailed"
    return f'echo "with: $(PYTEST_ARGS)" >>did; {until} || {{ {kept}; exit 1; }}'


def test_tests_that_pass_when_they_run_again_are_named_in_the_last_line(ci: Callable[..., Run]) -> None:
    run = ci(TEST=fails(until='[ "$(PYTEST_ARGS)" = --last-failed ]'))
    said = run.said()
    assert run.process.returncode == 0, said
    assert [line for line in run.did() if line.startswith("with")] == ["with: ", "with: --last-failed"]
    assert said[-1] == ("ci: passed, BUT THESE FAILED AT FIRST: tests/a.py::test_0[x y] tests/a.py::test_1[x y]")


@pytest.mark.parametrize(("tests", "runs"), [(1, 2), (4, 1)], ids=["few: once more", "many: not again"])
def test_tests_that_go_on_failing_fail_it(tests: int, runs: int, ci: Callable[..., Run]) -> None:
    run = ci(TEST=fails(until="false", tests=tests))
    said = run.said()
    assert run.process.returncode != 0
    assert sum(line.startswith("with") for line in run.did()) == runs
    assert "oldest" not in run.did()
    assert said[-1] == "ci: FAILED"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("part", ["CLUSTER", "TEST"])
def test_who_is_asked_to_end_leaves_neither_processes_nor_a_cluster(
    ci: Callable[..., Run], part: str, number: signal.Signals, code: int
) -> None:
    run = ci(**{part: STAYS})
    pid = run.left()
    run.process.send_signal(number)
    said = run.said()
    assert run.process.returncode == code, said
    assert not alive(pid)
    assert run.did()[-1] == "down"
    assert said[-1] == "ci: FAILED"


def test_a_second_run_waits_for_the_first(ci: Callable[..., Run]) -> None:
    first = ci(TEST=STAYS)
    first.left()
    second = ci()
    assert second.process.stdout is not None
    assert "waiting for its end" in second.process.stdout.readline()
    assert first.did().count("check") == 1
    first.process.send_signal(signal.SIGTERM)
    first.said()
    assert second.said()[-1] == "ci: passed"
