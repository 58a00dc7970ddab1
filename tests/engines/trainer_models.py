"""Tiny models, and the proof that all these tests end with: a fresh model on the new weights says the same tokens."""

from __future__ import annotations

import copy
import importlib.util
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from weightsync_agent.receiver import Receiver
from weightsync_agent.sender import Sender
from weightsync_api.reports import StepReport

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = torch.tensor([[7, 80, 81, 99, 120, 33]])
UPDATES = 5
WAIT_SECONDS = 120


def load(path: Path) -> ModuleType:
    """A script of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tiny = load(EXAMPLES / "tiny_model.py")


def greedy(model: Any, count: int = 12) -> list[int]:
    """The likeliest tokens after PROMPT."""
    with torch.no_grad():
        out = model.generate(PROMPT, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    found: list[int] = out[0, PROMPT.shape[1] :].tolist()
    return found


def fresh(model: Any, dtype: torch.dtype | None = None) -> Any:
    """Another model, made anew from the config, with a copy of this one's weights: what a new engine would load."""
    # Not `.to(dtype)`, which would round the rotary frequencies too: no checkpoint holds them.
    made = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype or torch.float32).eval()
    made.load_state_dict({name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
    return made


def update(model: torch.nn.Module, number: int) -> None:
    """As an optimizer would, only further: every tensor changes, in place, so much that the tokens do."""
    generator = torch.Generator().manual_seed(1000 + number)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter.dtype)
            parameter.add_(noise * (0.2 if parameter.dim() > 1 else 0.05))


def step(sender: Sender, receiver: Receiver) -> StepReport:
    """One step, between two ends in this process: the receiver takes it in, in the calling thread."""
    reports: list[StepReport] = []
    failures: list[BaseException] = []

    def send() -> None:
        try:
            reports.append(sender.step())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    receiver.wait(WAIT_SECONDS)
    thread.join(WAIT_SECONDS)
    if failures:
        raise failures[0]
    return reports[0]
