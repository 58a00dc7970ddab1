"""The processes of test_storm.py: a sender that never rests, and receivers that check what they hold at every moment.

Each appends what became of it to a log of its own, a JSON object a line. Weights prove themselves: every element of
every tensor follows from one number, the version, which no two steps share.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from weightsync_agent.errors import Closed, JoinTimeout, StepFailed, WeightSyncError
from weightsync_agent.receiver import Receiver
from weightsync_agent.sender import Sender
from weightsync_api.agent_config import AgentConfig

SIZES = {"version": 1, "odd": 7, "large": 150_000, "larger": 200_003, "small": 1_000}
END, CALM = "end", "calm"
"""A file of this name in the runtime directory ends the sender, and its goodbye the receivers; or says that nothing
befalls anybody, so that whatever a step waits for comes, however slow the machine."""
CALM_SECONDS = 200.0
"""How long it may take until a step reaches all again: only a deadlock takes this long."""


def patient(config: AgentConfig) -> AgentConfig:
    """With deadlines that only a deadlock reaches."""
    waits = ("join_timeout_seconds", "ack_timeout_seconds", "step_timeout_seconds")
    return config.model_copy(update=dict.fromkeys(waits, CALM_SECONDS))


def weights_of(version: int) -> dict[str, torch.Tensor]:
    made = {name: torch.arange(size, dtype=torch.int64) * 2654435761 + version for name, size in SIZES.items()}
    made["version"].fill_(version)
    return made


def is_whole(weights: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors are of one version."""
    wanted = weights_of(int(weights["version"]))
    return all(torch.equal(weights[name], wanted[name]) for name in SIZES)


class Log:
    def __init__(self, directory: str, who: str) -> None:
        self._file = (Path(directory) / f"{who}-{os.getpid()}.log").open("a", buffering=1)

    def say(self, **what: object) -> None:
        self._file.write(json.dumps(what) + "\n")


def run_sender(config_json: str, adopt: bool, first_version: int) -> None:
    torch.set_num_threads(1)
    config = AgentConfig.model_validate_json(config_json)
    log, end, calm = Log(config.runtime_dir, "sender"), Path(config.runtime_dir) / END, Path(config.runtime_dir) / CALM
    version = first_version
    weights = weights_of(version)
    with Sender(weights, config=config, adopt=adopt) as sender:
        while not end.exists():
            version += 1
            for name, tensor in weights_of(version).items():
                weights[name].copy_(tensor)  # the moment that step() is over, whatever became of it
            waits = patient(config) if (is_calm := calm.exists()) else config
            sender.config = sender._carrier._config = waits
            began = time.monotonic()
            outcome = "whole"
            ranks: list[int] = []
            try:
                ranks = [part.rank for part in sender.step().receivers]
            except (StepFailed, JoinTimeout) as error:
                outcome = type(error).__name__
                time.sleep(0.02)  # with nobody there it comes at once
            log.say(outcome=outcome, seconds=time.monotonic() - began, ranks=ranks, calm=is_calm)


def run_receiver(config_json: str, rank: int) -> None:
    torch.set_num_threads(1)
    config = patient(AgentConfig.model_validate_json(config_json))
    log = Log(config.runtime_dir, f"receiver-{rank}")
    weights = weights_of(0)
    with Receiver(weights, config=config, rank=rank) as receiver:
        try:
            while True:
                step = receiver.poll(timeout=0.02)
                if receiver.ready and not is_whole(weights):
                    log.say(torn=receiver.step)
                elif step is not None:
                    log.say(whole=step)
        except Closed:
            log.say(closed=True)
        except WeightSyncError as error:
            log.say(error=str(error))  # such as a rank that seems to be taken: it is started anew
