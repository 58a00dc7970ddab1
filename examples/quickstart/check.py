"""Proves a run from outside: every engine ended with the trainer's weights, bit for bit, and answers as it does."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import yaml

ANSWERS = Path(os.environ.get("QUICKSTART_ANSWERS", Path(__file__).parent / "build" / "answers"))
MANIFEST = Path(__file__).parent.parent / "quickstart.yaml"


def main() -> None:
    manifest = yaml.safe_load(MANIFEST.read_text())
    engines = [f"engine-{rank}" for rank in range(1, manifest["spec"]["receivers"]["replicas"] + 1)]
    said = {path.stem: json.loads(path.read_text()) for path in sorted(ANSWERS.glob("*.json"))}
    trainer = said.pop("trainer", None)
    if trainer is None:
        sys.exit(f"There is no trainer's answer in {ANSWERS}: run examples/quickstart.yaml first.")
    wrong = [f"{name} did not answer" for name in engines if name not in said]
    if trainer["first"] == trainer["last"]:
        wrong.append("the trainer learned nothing")
    for name, engine in said.items():
        if engine["step"] != trainer["step"]:
            wrong.append(f"{name} holds step {engine['step']}, the trainer did {trainer['step']}")
        if engine["weights"] != trainer["weights"]:
            wrong.append(f"{name} holds other weights than the trainer")
        if engine["last"] != trainer["last"]:
            wrong.append(f"{name} answers {engine['last']!r}, the trainer {trainer['last']!r}")
        if engine["first"] == engine["last"]:
            wrong.append(f"{name} knew the answer before the first step")
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"checked: {len(said)} engines hold the trainer's weights of step {trainer['step']}, bit for bit, and answer")
    print(f"  {trainer['last']}")


if __name__ == "__main__":
    main()
