"""The documentation says what is so: its commands parse or run, its listings are the files, its names exist."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import pytest
import weightsync_agent
import weightsync_agent.http as agent_http
import yaml
from prometheus_client import Metric
from weightsync_agent import Receiver, Sender
from weightsync_agent.bench.cli import command as bench
from weightsync_agent.engines.checkpoint_engine import CheckpointEngineReceiver, CheckpointEngineSender
from weightsync_agent.engines.sglang import SGLangSender
from weightsync_agent.engines.verl import VerlReceiver, VerlSender
from weightsync_agent.main import main as agent_main
from weightsync_agent.metrics import ERROR_KINDS, AgentMetrics
from weightsync_agent.trainers import EngineRollout, WeightSyncCallback
from weightsync_api.reports import Report
from weightsync_operator.cli import main as cli
from weightsync_operator.metrics import OperatorMetrics

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block: its page and line, what stands behind the fence, its text, and the file it lists."""

    page: Path
    line: int
    info: str
    text: str
    file: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text()
        for found in re.finditer(r"(?:<!-- file: (\S+) -->\n)?^```([^\n]*)\n(.*?)^```$", text, re.M | re.S):
            line = text[: found.start()].count("\n") + 1
            yield Block(page, line, found[2], found[3], found[1] or "")


BLOCKS = list(blocks())
COMMANDS = [block for block in BLOCKS if block.info.startswith("sh")]


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_every_command_that_is_written_exists_as_written(block: Block) -> None:
    for line in block.text.splitlines():
        for part in line.split(" | "):
            words = shlex.split(part)
            match words[0].rsplit("/", 1)[-1]:
                case "make":
                    subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
                case "weightsync":
                    parses(cli, words[1:])
                case "weightsync-agent":
                    parses(agent_main, words[1:])
                case "curl":
                    path = re.fullmatch(r"http://agent(/\w+).*", words[-1])
                    assert path, line
                    assert path[1] in {"/healthz", "/readyz", "/report", "/metrics"}
                case "python":
                    assert words[1] == "-m" or (ROOT / words[1]).is_file(), line
                case "helm":
                    assert {word for word in words if word.startswith("charts/")} <= {"charts/weightsync"}
                    names = [part.partition("=")[0] for part in re.findall(r"--set '?([^' ]+=[^' ]*)", part)]
                    assert {name.partition(".")[0] for name in names} <= chart_values(), part
                case "kubectl":
                    files = [word for flag, word in pairwise(words) if flag == "-f"]
                    assert all((ROOT / file).is_file() for file in files), part
                case "docker":
                    dockerfile = (ROOT / "Dockerfile").read_text()
                    for flag, word in pairwise(words):
                        assert flag != "--target" or re.search(rf"^FROM \S+ AS {word}$", dockerfile, re.M), part
                        named = word.partition("=")[0]
                        assert flag != "--build-arg" or re.search(rf"^ARG {named}\b", dockerfile, re.M), part
                case _ if (ROOT / words[0]).is_file():
                    assert os.access(ROOT / words[0], os.X_OK), part
                case other:
                    pytest.fail(f"{block}: this test does not know the command {other!r}")


def chart_values() -> set[str]:
    return set(yaml.safe_load((ROOT / "charts" / "weightsync" / "values.yaml").read_text()))


def parses(command: click.Command, words: list[str]) -> None:
    """Fails for an unknown command, option or value, and for a file that is not there."""
    context = command.make_context(command.name, list(words), resilient_parsing=False)
    while isinstance(command, click.Group):
        name, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None
        command, context = found, found.make_context(name, rest, parent=context)
    file = context.params.get("file")
    assert file is None or (ROOT / file).is_file(), file


@pytest.mark.parametrize("block", [block for block in COMMANDS if block.info == "sh run"], ids=str)
@pytest.mark.timeout(300)
def test_every_command_that_can_be_run_here_runs(block: Block) -> None:
    here = str(Path(sys.executable).parent)
    script = block.text.replace(".venv/bin/", f"{here}/")
    with tempfile.TemporaryDirectory(prefix="ws-") as runtime:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=ROOT,
            env={**os.environ, "XDG_RUNTIME_DIR": runtime},
            capture_output=True,
            text=True,
            timeout=280,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.file], ids=str)
def test_every_listing_is_the_file(block: Block) -> None:
    assert block.text == (ROOT / block.file).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            path, _, anchor = target.partition("#")
            linked = page if not path else page.parent / path
            assert linked.exists(), target
            if anchor:
                titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.M)
                assert anchor in [title.lower().replace(" ", "-") for title in titles], target


def test_the_metrics_page_lists_what_is_served() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    ours, _, operators = page.partition("## Of the operator")
    agents = AgentMetrics(lambda: Report(namespace="", name="", session=""), Counter())
    lists_all_of(ours, agents.collect())
    metrics = OperatorMetrics(lambda: 0)
    metrics.requested("get", 200, 0.1)
    lists_all_of(operators, metrics.registry.collect())
    assert f"errors by `kind`: {', '.join(ERROR_KINDS)}" in page


def lists_all_of(page: str, families: Iterable[Metric]) -> None:
    listed = set(re.findall(r"^\| `(weightsync_\w+)` \|", page, re.M))
    suffixes = {"counter": "_total", "info": "_info"}
    served = {family.name + suffixes.get(family.type, "") for family in families}
    served = {name + "_info" if name == "weightsync_build" else name for name in served}
    assert listed == served
    for query in re.findall(r"^\| [^|]*\? \| `(.*)` \|$", page, re.M):
        for name in re.findall(r"weightsync_\w+", query):
            assert re.sub(r"_(sum|bucket|count)$", "", name) in served, query


def test_the_agents_page_names_the_environment_that_is_read() -> None:
    page = (ROOT / "docs" / "agent.md").read_text()
    source = "".join(path.read_text() for folder in ("agent", "crds") for path in (ROOT / folder).rglob("*.py"))
    read = set(re.findall(r'^ENV_\w+ = "(WEIGHTSYNC_\w+)"', source, re.M))
    listed = set(re.findall(r"`(WEIGHTSYNC_\w+)`", page))
    assert listed == read
    assert f"waits up to {agent_http.LONG_POLL_SECONDS:g} seconds" in page


def test_the_pages_of_the_commands_name_every_option() -> None:
    docs = ROOT / "docs"
    for page, command in (("benchmarks.md", bench), ("running-locally.md", cli.commands["run"])):
        text = (docs / page).read_text()
        for option in (name for param in command.params for name in param.opts if name.startswith("--")):
            assert re.search(rf"(?<![\w-]){option}\b", text), f"{page} does not name {option}"


@pytest.mark.parametrize(
    ("page", "call"),
    [
        ("library", Sender.from_env),
        ("library", Receiver.from_env),
        ("trainers", WeightSyncCallback),
        ("trainers", EngineRollout),
        ("engines-verl", VerlSender),
        ("engines-verl", VerlReceiver),
        ("engines-checkpoint-engine", CheckpointEngineSender),
        ("engines-checkpoint-engine", CheckpointEngineReceiver),
        ("engines-sglang", SGLangSender),
    ],
)
def test_every_option_of_a_class_is_on_its_page(page: str, call: Callable[..., object]) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    options = [name for name, one in inspect.signature(call).parameters.items() if one.kind == one.KEYWORD_ONLY]
    assert options
    assert [name for name in options if not re.search(rf"`[^`]*\b{name}\b[^`]*`", text)] == []


def test_every_field_of_the_spec_is_on_a_page_or_in_an_example() -> None:
    files = [*PAGES, *(ROOT / "examples").rglob("*.yaml")]
    words = set(re.findall(r"\w+", " ".join(path.read_text() for path in files)))
    assert [path for path in fields(spec_schema(), "spec") if path.rpartition(".")[2] not in words] == []


def spec_schema() -> dict[str, Any]:
    definition = yaml.safe_load((ROOT / "crds" / "weightsync.dev_weightsyncs.yaml").read_text())
    schema: dict[str, Any] = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return schema


def fields(schema: dict[str, Any], path: str) -> Iterator[str]:
    for name, below in schema.get("properties", {}).items():
        yield f"{path}.{name}"
        yield from fields(below, f"{path}.{name}")


def test_every_error_that_the_library_page_names_can_be_caught() -> None:
    page = (ROOT / "docs" / "library.md").read_text()
    for name in re.findall(r"^\| `(\w+)` \|", page, re.M):
        assert issubclass(getattr(weightsync_agent, name), weightsync_agent.WeightSyncError)
    for block in BLOCKS:
        if block.info == "python":
            ast.parse(block.text)
