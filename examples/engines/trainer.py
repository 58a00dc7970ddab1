"""Teaches a tiny model to count, and sends its weights to the engines after every step, for ever."""

import logging
import os
import time

import tiny_model
import torch
from weightsync_agent import JoinTimeout, Sender, StepFailed

logging.basicConfig(level=logging.INFO, format="%(message)s")
model = tiny_model.model(seed=1).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
pause = float(os.environ.get("SECONDS_BETWEEN_STEPS", "2"))
with Sender.from_env(source=model) as sender:
    while True:
        tokens = torch.randint(2, 200, (4, 1)) + torch.arange(32)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        try:
            report = sender.step()
            print(f"step {report.step}: loss {loss.item():.3f}", flush=True)
        except (StepFailed, JoinTimeout) as failure:
            print(failure, flush=True)  # the next step brings everything again
        time.sleep(pause)
