"""A receiver in a process of its own, which tells its parent on stdout, a JSON object a line, what became of it.

Run as a script: CONFIG_PATH RANK OPTIONS_JSON. Options: target (dict | module | loader), and faults to play:
raise_in_load, keep_views, sleep_in_load (seconds), raise_at_commit, starts_after (a file's path), steps it is played
in (fault_steps); leaves_after (a step): it lives on without the sender, and uses its memory for other things.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import samples
import torch
from weightsync_agent import receive_step
from weightsync_agent.errors import Closed, WeightSyncError
from weightsync_agent.protocol import Commit
from weightsync_agent.receiver import Receiver
from weightsync_api.agent_config import AgentConfig


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


class LoadingEngine:
    """As engines have it: `load_weights` copies by name into weights of its own."""

    def __init__(self, options: dict[str, object]) -> None:
        device = options.get("device", "cpu")
        sizes = options.get("blank")
        self.weights = (
            {name: torch.zeros(size, device=device) for name, size in sizes.items()} if sizes else samples.blank(device)
        )
        if "only" in options:
            self.weights = {n: t for n, t in self.weights.items() if str(t.dtype) == f"torch.{options['only']}"}
        self.options = options
        self.kept: list[torch.Tensor] = []
        self.receiver: Receiver | None = None

    @property
    def step(self) -> int:
        """The step that is on its way, as the receiver says itself."""
        assert self.receiver is not None
        return int(self.receiver.state.message.split()[1])

    def load_weights(self, named: list[tuple[str, torch.Tensor]]) -> None:
        if self.step in self.options.get("fault_steps", []):
            if self.options.get("raise_in_load"):
                raise RuntimeError("the engine's loader is broken")
            if self.options.get("keep_views"):
                self.kept += [tensor for _, tensor in named]
            if "sleep_in_load" in self.options:
                say(loading=self.step)
                time.sleep(self.options["sleep_in_load"])
        for name, tensor in named:
            self.weights[name].copy_(tensor)


def play_around_the_transfer(options: dict[str, Any]) -> None:
    """Faults that are none of the engine's loader: before the step's first byte, and after its last."""

    class Faulty(receive_step.ReceiverStepChannel):
        def started(self) -> None:
            if self.step in options["fault_steps"] and "starts_after" in options:
                while not Path(options["starts_after"]).exists():
                    time.sleep(0.001)
            super().started()

        def wait_commit(self) -> Commit:
            if self.step in options["fault_steps"] and options.get("raise_at_commit"):
                raise RuntimeError("it can't be taken in")
            return super().wait_commit()

    receive_step.ReceiverStepChannel = Faulty  # type: ignore[misc]


def keep_allocating(device: torch.device) -> None:
    """An engine's other thread: allocates, frees and launches kernels of ever new shapes, all the time."""
    for size in range(1, 1_000_000):
        block = torch.empty((1 << 20) + size, device=device)
        block.mul_(2).add_(size).sum().item()
        del block
        if size % 16 == 0:
            torch.cuda.empty_cache()


def main() -> None:
    torch.set_num_threads(1)
    config = AgentConfig.model_validate_json(Path(sys.argv[1]).read_text())
    options = json.loads(sys.argv[3])
    engine = LoadingEngine(options)
    weights = engine.weights
    if "names" in options:
        weights = {options["names"].get(name, name): tensor for name, tensor in weights.items()}
    target = weights if options.get("target", "dict") == "dict" else engine.load_weights
    device = torch.device(options.get("device", "cpu"))
    if options.get("raise_at_commit") or "starts_after" in options:
        play_around_the_transfer(options)
    if options.get("busy"):
        threading.Thread(target=keep_allocating, args=(device,), daemon=True).start()
    with Receiver(target, config=config, rank=int(sys.argv[2]), device=device) as receiver:
        engine.receiver = receiver
        say(started=True)
        tainted = ""
        while True:
            try:
                step = receiver.poll(timeout=0.05)
            except Closed as closed:
                say(closed=str(closed))
                return
            except WeightSyncError as error:
                say(error=type(error).__name__, message=str(error))
                return
            if step is not None:
                say(
                    step=step,
                    ready=receiver.ready,
                    fingerprint=samples.fingerprint(weights) if "blank" not in options else {},
                )
                tainted = ""
                if step == options.get("leaves_after"):
                    receiver.close()
                    others = [torch.ones(1, dtype=torch.int32, device=device) for _ in range(5_000)]
                    torch.cuda.synchronize()
                    say(left=len(others))
                    threading.Event().wait(300)
            elif receiver.state.state == "Tainted" and receiver.state.message != tainted:
                tainted = receiver.state.message
                engine.kept.clear()
                say(tainted=tainted, ready=receiver.ready)


if __name__ == "__main__":
    main()
