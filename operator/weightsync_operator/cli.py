"""The command `weightsync`."""

from __future__ import annotations

import asyncio
import os
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import click
from weightsync_api.v1alpha1 import WeightSync
from weightsync_api.validation import ManifestError, read_weightsyncs

from . import cli_show
from .local_run import EXIT_BAD_INPUT, RunOptions, run_documents
from .local_screen import screen_for
from .local_source import source_problem
from .objects import Options, render
from .plan import ClusterAddresses, PlanDefaults, plan

Manifest = click.Path(path_type=Path)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="See `weightsync COMMAND --help` for examples.",
)
@click.version_option(version("weightsync"), prog_name="weightsync")
def main() -> None:
    """Brings a trainer's weights to its inference engines after every step.

    The same WeightSync manifest runs on this machine (`weightsync run`) and on Kubernetes (`kubectl apply`).
    """


@main.command(short_help="Carry out the WeightSyncs of a file on this machine.")
@click.argument("file", type=Manifest)
@click.option("--steps", type=click.IntRange(1, 1_000_000_000), help="Steps to do; instead of spec.steps.count.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), help="Seconds after which the run is ended.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="json: one object a step on stdout (status.lastStep), and nothing else there.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show every line that the agents write.")
def run(file: Path, steps: int | None, timeout: float | None, output: str, verbose: bool) -> None:
    """Carry out the WeightSyncs of FILE on this machine: a process in the place of each agent's container.

    Commands of containers in the templates run here, in FILE's directory; images, volumes and node selectors are the
    cluster's. Without a GPU, device CUDA runs on CPU. The run ends with its sender, or with Ctrl-C, and leaves nothing.

    \b
    Exit codes: 0 done; 1 failed; 2 bad input; 124 --timeout is over; 130 Ctrl-C.

    \b
    Examples:
      weightsync run examples/quickstart.yaml
      weightsync run examples/quickstart.yaml --steps 5 --output json
      weightsync get -w        # in another terminal
    """
    resources = _read(file)
    if steps is not None:
        resources = [_with_steps(ws, steps) for ws in resources]
    awake = [ws for ws in resources if not ws.spec.suspend]
    for ws in resources:
        if ws.spec.suspend:
            click.echo(f"{ws.metadata.name}: spec.suspend is true: nothing to run", err=True)
    if not awake:
        return
    _need_agent()
    problems = [(ws, source_problem(ws, file.resolve().parent)) for ws in awake]
    for ws, problem in problems:
        if problem:
            click.echo(f'{file}: WeightSync "{ws.metadata.name}": spec.sender.source: {problem}', err=True)
    if any(problem for _, problem in problems):
        sys.exit(EXIT_BAD_INPUT)
    screen = screen_for(output, len(resources))
    options = RunOptions(timeout=timeout, verbose=verbose)
    try:
        sys.exit(asyncio.run(run_documents(awake, file.resolve().parent, screen, options)))
    except BrokenPipeError:
        # Who read the output has left: there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


@main.command(name="plan", short_help="Print the Kubernetes objects that a file becomes.")
@click.argument("file", type=Manifest)
@click.option("--image", default=f"weightsync/agent:{version('weightsync')}", show_default=True, help="Agents' image.")
def plan_command(file: Path, image: str) -> None:
    """Print, as YAML, the Kubernetes objects that FILE's WeightSyncs become: StatefulSets, configuration, policies.

    Needs no cluster. The Secret is without its keys, which the operator makes. What stands against a plan (a template
    that contradicts what the agents need) is a sentence on stderr, and exit code 2.

    \b
    Example:
      weightsync plan examples/quickstart.yaml
    """
    found = [(ws, render(plan(ws, PlanDefaults(ClusterAddresses())), Options(image=image))) for ws in _read(file)]
    problems = [f"{file}: {ws.metadata.name}: {problem.message}" for ws, made in found for problem in made.problems]
    if problems:
        click.echo("\n".join(problems), err=True)
        sys.exit(EXIT_BAD_INPUT)
    click.echo("---\n".join(cli_show.tree_as_yaml(tree) for _, made in found for tree in made.objects), nl=False)


@main.command()
def crd() -> None:
    """Print the CustomResourceDefinition of WeightSync.

    \b
    Example:
      weightsync crd | kubectl apply --server-side -f -
    """
    from weightsync_api.crd import render

    click.echo(render(), nl=False)


@main.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Measure transports against one copy of the same bytes. See `weightsync bench --help`."""
    _need_agent()
    # By name, so that neither torch nor the agent's package is needed to check or to run the operator's half.
    sys.exit(import_module("weightsync_agent.bench.cli").main(list(arguments)))


def _read(file: Path) -> list[WeightSync]:
    """The file's WeightSyncs; ends with exit code 2 and a sentence for each fault."""
    try:
        return read_weightsyncs(file)
    except ManifestError as error:
        for sentence in error.sentences:
            click.echo(sentence, err=True)
        sys.exit(EXIT_BAD_INPUT)


def _with_steps(ws: WeightSync, count: int) -> WeightSync:
    steps = ws.spec.steps.model_copy(update={"count": count})
    return ws.model_copy(update={"spec": ws.spec.model_copy(update={"steps": steps})})


def _need_agent() -> None:
    """The agent's half is an extra: torch is not wanted where only the operator runs. Looked for, never imported."""
    missing = [name for name in ("torch", "zmq", "numpy") if find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        click.echo(f"{names} is not installed, which agents need: pip install 'weightsync[agent]'", err=True)
        sys.exit(EXIT_BAD_INPUT)


main.add_command(cli_show.get)
main.add_command(cli_show.describe)
