"""The receiver in ten lines: its weights are those of trainer.py whenever `wait` returns."""

import torch
from weightsync_agent import Closed, Receiver

model = torch.nn.Linear(1024, 1024)
with Receiver.from_env(target=model) as receiver:
    try:
        while step := receiver.wait():
            print(f"step {step} holds, sum {model.weight.double().sum().item():.9f}")
    except Closed as goodbye:
        print(goodbye)
