"""A trainer whose running vLLM server follows every step: python trainer.py MODEL [URL]

It trains a model to say one sentence. The server's greedy answers come closer to it from step to step, and at the end
they are those of the trained model itself.
"""

import json
import sys
import tempfile
import urllib.request

import torch
from transformers import AutoModelForCausalLM
from weightsync_agent import Sender
from weightsync_agent.engines.vllm import VllmEngine
from weightsync_api.agent_config import AgentConfig

MODEL, URL = sys.argv[1], (sys.argv[2:] or ["http://127.0.0.1:8000"])[0]
SENTENCE = [11, 42, 7, 99, 23, 64, 5, 311, 78, 12, 200, 150, 17, 333, 81, 6]


def ask(prompt: list[int], count: int) -> list[int]:
    body = {"model": "model", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True}  # fmt: skip
    request = urllib.request.Request(
        f"{URL}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return list(json.load(answer)["choices"][0]["token_ids"])


model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
tokens = torch.tensor([SENTENCE])
with tempfile.TemporaryDirectory(prefix="ws-") as directory:
    socket = f"ipc://{directory}/control"
    config = AgentConfig(
        namespace="default", name="vllm-serve", device="CUDA" if model.device.type == "cuda" else "CPU",
        transport="IPC", receivers=1, bind=socket, connect=socket, runtime_dir=directory,
    )  # fmt: skip
    with Sender(model, config=config, adopt=True) as sender, VllmEngine(URL, config=config) as engine:
        for _ in range(20):
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            report = engine.step(sender)
            said = ask(SENTENCE[:2], len(SENTENCE) - 2)
            right = sum(a == b for a, b in zip(said, SENTENCE[2:], strict=True))
            print(f"step {report.step}: loss {loss.item():.3f}, the server says {right} of {len(said)} tokens right")
        way = "straight into its parameters" if engine.reports[0].in_place else "through its loaders"
        print(f"the server's weights go {way}")
model.eval()
with torch.no_grad():
    own = model.generate(tokens[:, :2], max_new_tokens=len(SENTENCE) - 2, do_sample=False, eos_token_id=None)
assert ask(SENTENCE[:2], len(SENTENCE) - 2) == own[0, 2:].tolist(), "the server does not hold the trained weights"
print("the server's answer is the trained model's own")
