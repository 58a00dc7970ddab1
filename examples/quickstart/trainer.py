"""Teaches a small language model one sentence, and sends its weights to the engines after every training step."""

import os

import torch
from model import ANSWER, answer, device, prompt, record, shown, tokenizer, trained_model
from weightsync_agent import Sender, StepFailed

torch.set_num_threads(os.cpu_count() or 1)  # the engines wait while it trains

model = trained_model()
optimizer = torch.optim.SGD(model.parameters(), lr=3e-3)
target = tokenizer(ANSWER + tokenizer.eos_token, add_special_tokens=False, return_tensors="pt").input_ids.to(device)
tokens = torch.cat([prompt, target], dim=1)
labels = tokens.clone()
labels[:, : prompt.shape[1]] = -100  # learn the answer, not the question

first = answer(model)
print(f"before training: {shown(first)}")
with Sender.from_env(source=model, adopt=True) as sender:
    step = 0
    while step < sender.config.steps.count:
        loss = model(tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        try:
            step = sender.step().step  # every engine holds the new weights now
        except StepFailed as failure:
            step = failure.report.step
            print(failure)  # the next step brings them everything again
        if step % 5 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
last = answer(model)
print(f"after step {step}: {shown(last)}")
record("trainer", step, model, first, last)
