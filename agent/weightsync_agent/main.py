"""The agent's command: `weightsync-agent` runs one sender or receiver, `weightsync-agent launch` those of a container.

Exit codes: 0 it finished, or was asked to end; 1 it failed; 2 bad configuration or source, one sentence on stderr.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable

import click
from weightsync_api.agent_config import ENV_AGENTS, ENV_RANK, ENV_ROLE

from .errors import ConfigError, SourceError, WeightSyncError
from .launch import Placed, agents_from_env, commands_from_env, launch
from .stop import Stopped, stop_on_signals

log = logging.getLogger("weightsync.agent")

EXIT_DONE, EXIT_FAILED, EXIT_BAD_INPUT = 0, 1, 2
ENV_LOG_LEVEL = "WEIGHTSYNC_LOG_LEVEL"


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def main(context: click.Context) -> None:
    """Runs one agent, as the environment says: WEIGHTSYNC_CONFIG, WEIGHTSYNC_ROLE, WEIGHTSYNC_RANK.

    `weightsync run` and the operator set these. WEIGHTSYNC_LOG_LEVEL is INFO unless set.
    """
    if context.invoked_subcommand is None:
        sys.exit(guarded(_agent))


@main.command(name="launch")
def launch_command() -> None:
    """Runs the agents that WEIGHTSYNC_AGENTS lists, such as sender:0@0,receiver:1@0: a process each.

    Signals go on to all; one that fails ends the others.
    """
    sys.exit(guarded(lambda: launch(agents_from_env(os.environ), commands=commands_from_env(os.environ))))


def guarded(run: Callable[[], int]) -> int:
    """The exit code of an agent's program: `run`'s own, or that of what it raised, which is told in a sentence."""
    _log_to_stderr()
    try:
        return run()
    except (ConfigError, SourceError) as error:
        click.echo(str(error), err=True)
        return EXIT_BAD_INPUT
    except WeightSyncError as error:
        click.echo(f"{type(error).__name__}: {error}", err=True)
        return EXIT_FAILED
    except Stopped:
        return EXIT_DONE


def _agent() -> int:
    role, rank = os.environ.get(ENV_ROLE, ""), os.environ.get(ENV_RANK, "")
    if role not in ("sender", "receiver"):
        raise ConfigError(
            f"{ENV_ROLE} is {role!r}, not sender or receiver: start agents with `weightsync run` or the operator"
        )
    if os.getpid() == 1 and ENV_AGENTS not in os.environ:
        # PID 1 of every pod: torch's handles tell processes apart by PID, and nobody would reap orphans.
        if not rank.isdigit():
            raise ConfigError(f"{ENV_RANK} is {rank!r}, not the rank of a process")
        return launch([Placed(role, int(rank), None)])
    return until_stopped(lambda: _run(role))


def _run(role: str) -> int:
    from . import runtime
    from .agent_receiver import run_receiver
    from .agent_sender import run_sender

    code = run_sender() if role == "sender" else run_receiver()
    runtime.detach()
    return code


def until_stopped(run: Callable[[], int]) -> int:
    """Gives `run`'s exit code. A signal ends it by Stopped; its HTTP does not linger then."""
    stop_on_signals()
    try:
        return run()
    except Stopped:
        from . import runtime

        runtime.detach(linger=False)  # whoever ends this process has what it wants to know
        raise


def _log_to_stderr() -> None:
    name = os.environ.get(ENV_LOG_LEVEL, "INFO").upper()
    level = logging.getLevelNamesMapping().get(name)
    logging.basicConfig(
        level=level if level is not None else logging.INFO,
        format="%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
        stream=sys.stderr,
    )
    logging.Formatter.converter = time.gmtime
    if level is None:
        log.warning("%s is %r: write DEBUG, INFO, WARNING or ERROR", ENV_LOG_LEVEL, name)


if __name__ == "__main__":
    main()
