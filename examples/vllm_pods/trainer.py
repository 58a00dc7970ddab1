"""Trains a model to say one sentence, and sends its weights to the engines after every step, for ever. Of engines it
knows nothing: python trainer.py MODEL
"""

import os
import sys
import time

import torch
from transformers import AutoModelForCausalLM
from weightsync_agent import JoinTimeout, Sender, StepFailed

SENTENCE = [11, 42, 7, 99, 23, 64, 5, 311, 78, 12, 200, 150, 17, 333, 81, 6]

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32  # the engines'
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
tokens = torch.tensor([SENTENCE], device=device)
pause = float(os.environ.get("SECONDS_BETWEEN_STEPS", "2"))
with Sender.from_env(source=model, dtype=dtype) as sender:
    while True:
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
