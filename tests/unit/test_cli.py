"""The command line: help that helps, manifests judged before anything starts, output that other tools read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from contract import BAD_MANIFEST_SENTENCES, BAD_MANIFESTS, MANIFESTS
from weightsync_api.crd import render
from weightsync_operator import cli


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments, prog_name="weightsync", catch_exceptions=False)


@pytest.mark.parametrize("name", sorted(BAD_MANIFEST_SENTENCES))
@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_bad_manifest_is_a_sentence_and_exit_code_2(tmp_path: Path, command: str, name: str) -> None:
    result = invoke(command, str(BAD_MANIFESTS / name))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.splitlines()[0].endswith(BAD_MANIFEST_SENTENCES[name])
    assert list(tmp_path.iterdir()) == [], "nothing was started"


def test_a_file_that_is_not_there_and_10_mb_of_noise_are_sentences_too(tmp_path: Path) -> None:
    noise = tmp_path / "noise.yaml"
    noise.write_bytes(bytes(range(256)) * 40_960)
    for path in (tmp_path / "none.yaml", tmp_path, noise):
        result = invoke("run", str(path))
        assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
        assert str(path) in result.stderr


def test_a_plan_is_the_kubernetes_objects_of_every_document() -> None:
    result = invoke("plan", str(MANIFESTS / "several.yaml"))
    assert result.exit_code == 0
    objects = list(yaml.safe_load_all(result.stdout))
    written = [document for document in yaml.safe_load_all((MANIFESTS / "several.yaml").read_text()) if document]
    sets = {tree["metadata"]["name"]: tree for tree in objects if tree["kind"] == "StatefulSet"}
    assert list(sets) == [f"{document['metadata']['name']}-group" for document in written]
    configs = [json.loads(tree["data"]["agent.json"]) for tree in objects if tree["kind"] == "ConfigMap"]
    assert [config["name"] for config in configs] == [document["metadata"]["name"] for document in written]


def test_a_plan_that_can_t_work_is_a_sentence_and_exit_code_2() -> None:
    result = invoke("plan", str(MANIFESTS / "colocated.yaml"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert (
        "spec.sender.template.spec.containers[0]: source trainer: {} needs a container with a command" in result.stderr
    )


def test_the_crd_is_printed_as_it_is_committed() -> None:
    assert invoke("crd").stdout == render()


def test_nothing_runs_is_said_on_stderr_and_is_no_error() -> None:
    for arguments, stdout in ((("get",), ""), (("get", "-o", "yaml"), ""), (("get", "-o", "json"), "[]\n")):
        result = invoke(*arguments)
        assert (result.exit_code, result.stdout) == (0, stdout)
    assert "weightsync run FILE" in invoke("get").stderr
    for command in ("get", "describe"):
        missing = invoke(command, "nobody")
        assert (missing.exit_code, missing.stdout) == (1, "")
        assert "nobody" in missing.stderr


def test_every_command_explains_itself_with_an_example() -> None:
    assert invoke("--version").stdout.startswith("weightsync, version ")
    for command in ("run", "get", "describe", "plan", "crd"):
        text = invoke(command, "--help").stdout
        assert f"weightsync {command}" in text.partition("Example")[2]
    assert "0 done; 1 failed; 2 bad input; 124" in invoke("run", "--help").stdout


@pytest.mark.parametrize(
    "arguments", [("run",), ("run", "x", "--steps", "0"), ("run", "x", "--timeout", "0"), ("fly",)]
)
def test_a_wrong_call_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    assert invoke(*arguments).exit_code == 2


def test_json_of_get_is_a_list_unless_one_is_named() -> None:
    assert json.loads(invoke("get", "-o", "json").stdout) == []
