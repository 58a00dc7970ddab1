"""Runs vLLM's server as a receiver whose weights follow a WeightSync, without a word of the trainer's:

    python -m weightsync_agent.engines.vllm_follow -- vllm serve MODEL --port 8000

It starts the server, joins its workers to the sender, and has it take each step. The pod's agent is this process: it
serves the agent's HTTP, and ends with the server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import click
import psutil
from weightsync_api.agent_config import AgentConfig

from .. import parent, runtime
from ..deadline import Deadline
from ..errors import ConfigError, TransportError
from ..http import AgentServer
from ..identity import load_config, rank_from_env
from ..main import guarded, until_stopped
from .vllm_follower import FollowedWorker, Follower
from .vllm_guard import GUARD, GUARD_PATH
from .vllm_http import HttpEngine

log = logging.getLogger("weightsync.follow")

TELL_SECONDS = 30.0
LOOK_SECONDS = 0.5
ANSWER_SECONDS = 5.0
LAST_WORD_SECONDS = 10.0
"""A server whose engine died answers with errors for a moment before it ends with the reason."""
TERM_SECONDS = 0.8
"""From SIGTERM to SIGKILL: this process itself is to be gone in two."""


class Server:
    """The server that is followed: a child of this process, or somebody else's.

    Args:
        command: what starts it; empty: it is there, or will be.
        url: where it answers.
        workers: GPUs that it needs, from this agent's own on.
    """

    def __init__(self, command: Sequence[str], url: str, workers: int) -> None:
        self.url = url
        self._child: subprocess.Popen[bytes] | None = None
        if command:
            argv = [*command, "--middleware", GUARD]
            env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", **_devices(workers)}
            try:
                # In this process' group: a runner that kills it gets all of it.
                self._child = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL)
            except OSError as error:
                raise ConfigError(f"the server's command {command[0]!r} can't be started: {error.strerror}") from None

    def check(self) -> None:
        """Raises TransportError once it has ended. One that is not this process' own is found out by asking it."""
        if self._child is not None and (code := self._child.poll()) is not None:
            how = f"exit code {code}" if code >= 0 else f"signal {-code}"
            raise TransportError(f"the engine has ended with {how}: its last lines say why")

    def wait(self, seconds: float) -> None:
        """Until it answers. Raises TransportError where it ends or the time does; ConfigError where it is unguarded."""
        deadline, tell_at = Deadline(seconds), time.monotonic() + TELL_SECONDS
        http, why = HttpEngine(self.url), ""
        while True:
            self.check()
            try:
                status = http.get("/health", ANSWER_SECONDS)
                if status == 200:
                    break
                why = f"it answers {status}"
            except TransportError as error:
                why = str(error)
            if deadline.passed:
                raise TransportError(f"no engine answers at {self.url} within {seconds:g} s ({why})")
            if time.monotonic() >= tell_at:
                tell_at += TELL_SECONDS
                log.info("waiting for the engine, %.0f s of %g s left (%s)", deadline.remaining, seconds, why)
            time.sleep(min(LOOK_SECONDS, deadline.remaining))
        if self._child is not None and http.get(GUARD_PATH, ANSWER_SECONDS) != 200:
            raise ConfigError(
                f"the engine's development routes are open to everybody: `--middleware {GUARD}` was put at the end of "
                "its command and did not reach it. Write vLLM's own command instead of a shell's, or start the server "
                "with this option by itself and give --url alone"
            )

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """An error that its end explains becomes that."""
        try:
            yield
        except TransportError:
            deadline = Deadline(LAST_WORD_SECONDS if self._child is not None else 0)
            while not deadline.passed:
                self.check()
                time.sleep(0.1)
            raise

    def close(self) -> None:
        """Ends it with all that it started."""
        if self._child is None:
            return
        found: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            found = psutil.Process(self._child.pid).children(recursive=True)
        self._child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(TERM_SECONDS)
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(TERM_SECONDS)  # its port is free from then on


def follow(command: Sequence[str], url: str, workers: int, start_seconds: float) -> int:
    """Runs until `Stopped` is raised, or the engine ends. Raises ConfigError, and what `Follower.run` raises."""
    config, rank = load_config(), rank_from_env()
    _check_ranks(config, rank, workers)
    if (rank - 1) % workers:
        return _idle(rank, rank - (rank - 1) % workers)
    parts = [FollowedWorker(config, rank + index) for index in range(workers)]
    with contextlib.ExitStack() as stack:
        for served in _served(parts):
            stack.callback(served.close)
        server = Server(command, url, workers)
        stack.callback(server.close)
        server.wait(start_seconds)
        follower = Follower(url, config, parts, server.check)
        stack.callback(follower.close)
        with server.explaining():
            follower.run()
    return 0


def _check_ranks(config: AgentConfig, rank: int, workers: int) -> None:
    if rank < 1:
        raise ConfigError("rank 0 is the sender's: an engine is a receiver, so its command goes into spec.receivers")
    if config.receivers % workers:
        raise ConfigError(
            f"this WeightSync has {config.receivers} receivers, which engines of {workers} workers can't share out: "
            "receivers.gpusPerPod is the number of an engine's workers, with placement Dedicated"
        )


def _served(parts: Sequence[FollowedWorker]) -> Iterator[AgentServer]:
    """Serves each worker as the agent that stands for its rank would be."""
    first = runtime.attach(parts[0])
    if first is None:
        return
    address = parts[0].config.http
    for index, part in enumerate(parts[1:], 1):
        if not address.startswith("unix:"):
            host, _, port = first.address.rpartition(":")
            address = f"{host}:{int(port) + index}"
        yield AgentServer(part, address, part.identity.rank)


def _idle(rank: int, first: int) -> int:
    """This agent's GPU is a worker's of another agent's engine, which speaks for it too."""
    log.info("rank %d is a worker of the engine of rank %d", rank, first)
    parent.end_with_parent()
    while True:
        time.sleep(3600)  # until a signal raises Stopped


def _devices(workers: int) -> dict[str, str]:
    """The launcher shows each agent its own GPU: the engine needs those of the agents that it stands for too."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if workers == 1 or not own:
        return {}
    if not own.isdigit():
        raise ConfigError(f"CUDA_VISIBLE_DEVICES is {own!r}: an engine of {workers} workers needs GPUs by number")
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(int(own) + index) for index in range(workers))}


def _url(url: str, command: Sequence[str]) -> str:
    if url:
        return url
    words = " ".join(command)
    found = re.search(r"(?:^|\s)--port[= ]([0-9]+)", words)
    return f"http://127.0.0.1:{found[1] if found else 8000}"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--url", default="", help="Where the server answers; empty: here, at the --port of COMMAND, or at 8000.")
@click.option(
    "--workers",
    type=click.IntRange(1),
    default=1,
    help="The engine's workers (--tensor-parallel-size). It takes so many ranks, and GPUs, from the first on.",
)
@click.option(
    "--start-seconds", type=click.FloatRange(1), default=1800.0, help="How long the server may take until it answers."
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def main(command: tuple[str, ...], url: str, workers: int, start_seconds: float) -> None:
    """Has a vLLM server follow a WeightSync, as one of its receivers.

    COMMAND, after --, starts the server: vllm serve MODEL. Its development routes, by which it is driven, are open to
    this pod alone. Without a COMMAND it follows a server that somebody else starts, with VLLM_SERVER_DEV_MODE=1.
    """

    def run() -> int:
        return follow(command, _url(url, command), workers, start_seconds)

    sys.exit(guarded(lambda: until_stopped(run)))


if __name__ == "__main__":
    main()
