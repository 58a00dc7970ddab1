"""A trainer that stops in the middle of its first step, for good: CONFIG KIND. It is there to be killed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import vllm_models
from weightsync_agent.copy_plan import CopyPlan
from weightsync_agent.sender import Sender
from weightsync_api.agent_config import AgentConfig

BUCKETS = 5


def main(config: str, kind: str) -> None:
    run, buckets = CopyPlan.run, 0

    def stuck(self: CopyPlan) -> None:
        nonlocal buckets
        run(self)
        buckets += 1
        if buckets == BUCKETS:
            print("within the step", flush=True)
            time.sleep(3600)

    CopyPlan.run = stuck  # type: ignore[method-assign]
    with Sender(
        vllm_models.weights(kind, 7), config=AgentConfig.model_validate_json(Path(config).read_text())
    ) as sender:
        print("ready", flush=True)
        sender.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
