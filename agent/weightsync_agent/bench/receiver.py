"""A receiver in a process of its own: python -m weightsync_agent.bench.receiver TASK, a ReceiverTask as JSON.

Its weights are tensors of its own, as an engine's are, and it does nothing but take steps in.
"""

from __future__ import annotations

import sys

import torch

from .. import parent
from ..errors import Closed, WeightSyncError
from ..memory import meter_for
from ..receiver import Receiver
from .models import allocate, manifest_of
from .tasks import ReceiverReady, ReceiverTask


def main() -> int:
    parent.end_with_parent()
    task = ReceiverTask.model_validate_json(sys.argv[1])
    torch.set_num_threads(task.threads)
    device = torch.device(task.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    weights = allocate(manifest_of(task.model), device)
    meter = meter_for(device, lambda: 0)
    ready = ReceiverReady(reserved_bytes=meter.after().reserved_after)
    meter.close()
    sys.stdout.write(ready.model_dump_json() + "\n")
    sys.stdout.flush()
    with Receiver(weights, config=task.config, rank=task.rank) as receiver:
        broken = ""
        while True:
            try:
                step = receiver.wait(timeout=60)
            except Closed:
                return 0
            except WeightSyncError as error:
                sys.stderr.write(f"rank {task.rank}: {error}\n")
                return 1
            if step is None and receiver.state.message != broken:
                broken = receiver.state.message
                sys.stderr.write(f"rank {task.rank}: {broken}\n")


if __name__ == "__main__":
    sys.exit(main())
