"""`weightsync bench` as a user runs it: real processes, a few steps, and what is left when it ends early."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from weightsync_agent.bench.scratch import remove_stale, scratch
from weightsync_api.bench_result import BenchResult

BENCH = (sys.executable, "-m", "weightsync_agent.bench", "--transport", "shm", "--threads", "1")
SECONDS = 280
"""Importing torch in many processes takes a slow machine a while; a wait this long only ends early."""


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BENCH, *arguments], capture_output=True, text=True, timeout=SECONDS)


def test_a_run_prints_one_object_of_the_projects_format_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    done = bench(
        "--model", "8x1KiB", "--receivers", "2", "--steps", "3", "--json", "--verify-cost", "--output", str(path)
    )
    assert done.returncode == 0, done.stderr
    made = BenchResult.model_validate_json(done.stdout)
    assert made == BenchResult.model_validate_json(path.read_text())
    ours = [row for row in made.rows if row.peer is None]
    assert [(row.mode, "digests" in row.name) for row in ours] == [
        ("Direct", False), ("Direct", True), ("Packed", False), ("Packed", True),
    ]  # fmt: skip
    assert all((row.bytes, row.tensors, row.receivers, row.repeats) == (8192, 8, 2, 3) for row in ours)
    assert all(row.milliseconds > 0 and row.ratio_to_copy > 0 for row in made.rows)
    copies = [row for row in made.rows if row.peer is not None]
    assert [row.tensors for row in copies] == [1, 8]
    assert all(row.peer and row.peer.startswith("torch ") for row in copies)
    assert "bare ZeroMQ round trips" in ours[0].note


def test_a_soak_prints_the_slope_for_people() -> None:
    done = bench("--model", "4x1KiB", "--mode", "packed", "--soak", "12", "--bucket-size", "512")
    assert done.returncode == 0, done.stderr
    assert "reserved over 12 steps: sender " in done.stdout
    assert "bytes/step" in done.stdout
    assert done.stdout.splitlines()[1].startswith("MODEL")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "no-such-model"], "no-such-model"),
        (["--model", "999x999999999B"], "memory in this bench"),
        (["--device", "cuda"], "shm and gloo are the CPU's"),
        (["--device", "nonsense"], "write cpu, cuda or cuda:1"),
        (["--bucket-size", "many"], "no quantity of bytes"),
        (["--bucket-size", "1"], "alignment of a tensor"),
        (["--receivers", "0"], "--receivers"),
        (["--output", "/no/such/place/result.json"], "there is no directory /no/such/place"),
    ],
)
def test_bad_input_is_a_sentence_and_exit_code_2(arguments: list[str], sentence: str) -> None:
    done = bench("--model", "2x1KiB", *arguments) if "--model" not in arguments else bench(*arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@contextmanager
def running() -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A bench in the midst of endless steps, and its children."""
    process = subprocess.Popen(
        [*BENCH, "--model", "2x1KiB", "--mode", "direct", "--steps", "900000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if ": step " in line:
                break
        else:
            pytest.fail(f"it ended with exit code {process.wait()} before its first step")
        yield process, psutil.Process(process.pid).children()
    finally:
        process.kill()
        process.communicate()


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=SECONDS)[1]


def test_ctrl_c_ends_everything_with_130() -> None:
    with running() as (process, children):
        assert children
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=SECONDS)
        assert process.returncode == 130
        assert "Traceback" not in said
        assert gone(children)


@pytest.fixture
def short_path() -> Iterator[Path]:
    # Not pytest's tmp_path: a Unix socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ws-") as directory:
        yield Path(directory)


def test_a_killed_bench_leaves_no_process_and_the_next_one_takes_its_directories_away(
    monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(short_path))
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    (short_path / "weightsync-bench-of-somebody").mkdir()  # whose it is can't be told
    with running() as (process, children), scratch() as alive:
        (alive / "control").touch()
        remove_stale()
        assert len(list(short_path.iterdir())) == 4  # the run's, its case's, ours and somebody's
        process.kill()
        process.wait(SECONDS)
        assert gone(children)
        remove_stale()
        assert (alive / "control").exists()
        assert {path.name for path in short_path.iterdir()} == {alive.name, "weightsync-bench-of-somebody"}


def test_a_receiver_that_dies_is_named_and_ends_the_bench_with_1() -> None:
    with running() as (process, children):
        receiver = next(child for child in children if any("bench.receiver" in part for part in child.cmdline()))
        receiver.kill()
        _, said = process.communicate(timeout=SECONDS)
        assert process.returncode == 1
        assert "receiver" in said
        assert "Traceback" not in said
        assert gone(children)
