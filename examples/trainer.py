"""The sender in ten lines. `weightsync run examples/library.yaml` runs it with two of engine.py."""

import torch
from weightsync_agent import Sender

model = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Sender.from_env(source=model) as sender:
    for _ in range(sender.config.steps.count):
        optimizer.zero_grad()
        model(torch.randn(32, 1024)).square().mean().backward()
        optimizer.step()
        report = sender.step()
        print(f"step {report.step} sent, sum {model.weight.double().sum().item():.9f}")
