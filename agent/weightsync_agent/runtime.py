"""What a process that a runner started gets besides its Sender or Receiver: HTTP, and an end with its runner."""

from __future__ import annotations

import atexit
import os
from typing import Protocol

from weightsync_api.agent_config import ENV_HTTP_OFFSET, AgentConfig

from . import parent
from .errors import ConfigError
from .http import AgentServer, Served
from .protocol import Identity


class Agent(Served, Protocol):
    """A Sender or a Receiver."""

    @property
    def config(self) -> AgentConfig: ...

    @property
    def identity(self) -> Identity: ...


_server: AgentServer | None = None


def attach(agent: Agent) -> AgentServer | None:
    """Serves the agent over HTTP where its configuration says so, and ends this process with its runner's.

    A process serves one agent: the last that was attached. Raises ConfigError when the address is in use.
    """
    global _server
    parent.end_with_parent()
    detach(linger=False)
    if not agent.config.http:
        return None
    address = _shifted(agent.config.http, os.environ.get(ENV_HTTP_OFFSET, "0"))
    _server = AgentServer(agent, address, agent.identity.rank)
    return _server


def detach(*, linger: bool = True) -> None:
    """Stops serving; the socket's file goes. `linger`: a reader first gets the last report of a sender that finished.

    Called at the interpreter's end by itself. Idempotent.
    """
    global _server
    if _server is not None:
        if linger:
            _server.linger()
        _server.close()
        _server = None


atexit.register(detach)


def _shifted(address: str, offset: str) -> str:
    """The port plus this agent's place in its container (set by `weightsync-agent launch`)."""
    if address.startswith("unix:") or offset == "0":
        return address
    host, _, port = address.rpartition(":")
    if not (offset.isdigit() and port.isdigit()):
        raise ConfigError(f"{ENV_HTTP_OFFSET} is {offset!r} for the address {address!r}: both must end in a number")
    return f"{host}:{int(port) + int(offset)}"
