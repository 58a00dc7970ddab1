"""Answers with the trainer's weights. It starts with random ones, so that all it knows came from the sender."""

from model import answer, blank_model, record, shown
from weightsync_agent import Closed, Receiver

model = blank_model()
first = answer(model)
print(f"before the first step: {shown(first)}")
with Receiver.from_env(target=model) as receiver:
    try:
        while True:
            receiver.wait()  # the weights are in place when it returns; a real engine serves in between
    except Closed:
        step, rank = receiver.step, receiver.identity.rank  # the trainer has finished
last = answer(model)
print(f"after step {step}: {shown(last)}")
record(f"engine-{rank}", step, model, first, last)
