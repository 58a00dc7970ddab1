"""Proves a run from outside: every engine ended with the trainer's weights, bit for bit, and answers as it does."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

ANSWERS = Path(os.environ.get("QUICKSTART_ANSWERS", Path(__file__).parent / "build" / "answers"))


def main() -> None:
    said = {path.stem: json.loads(path.read_text()) for path in sorted(ANSWERS.glob("*.json"))}
    trainer = said.pop("trainer", None)
    if trainer is None or not said:
        sys.exit(f"There is no trainer's and engines' answer in {ANSWERS}: run examples/quickstart.yaml first.")
    wrong = []
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
