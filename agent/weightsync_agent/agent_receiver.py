"""The agent's own receiver: holds whatever the sender has, for a pod that nobody gave an engine."""

from __future__ import annotations

import logging

from .agent_sender import device_of
from .errors import Closed
from .identity import load_config, rank_from_env
from .receiver import Receiver
from .runtime import attach
from .targets import StoreTarget

log = logging.getLogger("weightsync.agent.receiver")


def run_receiver() -> int:
    """Takes every step in, from one sender and the next, until `Stopped` is raised. Raises ConfigError, and Refused
    where the sender won't have it.
    """
    config = load_config()
    device = device_of(config)
    with Receiver(StoreTarget(device), config=config, rank=rank_from_env(), device=device) as receiver:
        attach(receiver)
        broken = ""
        while True:
            try:
                step = receiver.poll(timeout=1.0)
            except Closed as goodbye:
                log.info("rank %d: %s; it waits for the next sender", receiver.identity.rank, goodbye)
                continue
            state = receiver.state
            if step is not None:
                log.info("rank %d holds step %d", state.rank, step)
                broken = ""
            elif not receiver.ready and state.message != broken and state.step:
                broken = state.message
                log.warning("rank %d is %s: %s", state.rank, state.state.value, broken)
