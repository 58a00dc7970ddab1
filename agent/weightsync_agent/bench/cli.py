"""The command `weightsync bench`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import psutil
import torch
from weightsync_api.quantity import format_bytes, parse_bytes
from weightsync_api.v1alpha1.spec import TransferMode

from ..errors import ConfigError, SourceError, WeightSyncError
from ..manifest import ALIGNMENT, Manifest
from .baseline import LARGEST_COPY, LARGEST_LIST
from .case import SOAK_WARMUPS, WARMUPS, Case
from .models import manifest_of
from .progress import Progress
from .rows import table
from .run import Plan, run

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

DEVICES = {"shm": "cpu", "gloo": "cpu", "ipc": "cuda", "nccl": "cuda"}
MODES = {
    "direct": [TransferMode.DIRECT],
    "packed": [TransferMode.PACKED],
    "auto": [TransferMode.AUTO],
    "all": [TransferMode.DIRECT, TransferMode.PACKED],
}
DEFAULT_MODELS = ("qwen3-0.6b", "310x1KiB", "18867x1KiB")
PROCESS_BYTES = 400 << 20
"""What a process with torch needs besides its weights."""
CONTEXT_BYTES = 600 << 20
"""What a process's CUDA context takes of its GPU."""


class Quantity(click.ParamType[int]):
    name = "quantity"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            size = value if isinstance(value, int) else parse_bytes(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if size < ALIGNMENT:
            self.fail(f"{value} is below {ALIGNMENT} bytes, the alignment of a tensor in a bucket", param, ctx)
        return -(-size // ALIGNMENT) * ALIGNMENT


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--transport", type=click.Choice(list(DEVICES)), help="Default: ipc with a GPU, shm without.")
@click.option(
    "--model",
    "models",
    multiple=True,
    help="Its tensors are moved, in bfloat16: qwen3-0.6b, qwen3-4b, qwen3-30b-a3b, a Hugging Face config.json, or many "
    f"of one size as 310x1KiB. Repeatable. Default: {', '.join(DEFAULT_MODELS)}.",
)
@click.option("--receivers", type=click.IntRange(1, 64), default=1, show_default=True, help="Processes that receive.")
@click.option(
    "--mode", type=click.Choice(list(MODES)), default="all", show_default=True, help="all: direct and packed."
)
@click.option("--bucket-size", type=Quantity(), default="256Mi", show_default=True, help="Bytes of a staging bucket.")
@click.option("--slots", type=click.IntRange(1, 64), default=2, show_default=True, help="Staging buckets in flight.")
@click.option(
    "--push/--no-push",
    default=True,
    show_default=True,
    help="CUDA IPC on one GPU: the sender may write into the receivers' tensors itself, without buckets.",
)
@click.option("--steps", type=click.IntRange(1, 900_000), default=20, show_default=True, help="Measured steps.")
@click.option("--device", help="The sender's: cpu, cuda or cuda:N. Default: the transport's.")
@click.option("--receiver-device", help="All receivers'. Default: the sender's; for nccl the GPUs after it, one each.")
@click.option(
    "--threads", type=click.IntRange(1, 1024), help="Of torch, in each process. Default: the cores shared out."
)
@click.option("--soak", type=click.IntRange(2, 900_000), help="So many steps instead; tells the slope of memory.")
@click.option(
    "--peers", is_flag=True, help="Also other projects' transfers, in the same run (see benchmarks/peers.py)."
)
@click.option("--verify-cost", is_flag=True, help="Also with digests compared in every step.")
@click.option("--json", "as_json", is_flag=True, help="One object on stdout instead of the table.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Also write that object to a file.")
def command(
    transport: str | None, models: tuple[str, ...], receivers: int, mode: str, bucket_size: int, slots: int, push: bool,
    steps: int, device: str | None, receiver_device: str | None, threads: int | None, soak: int | None, peers: bool,
    verify_cost: bool, as_json: bool, output: Path | None,
) -> None:  # fmt: skip
    """Measure a whole step, sender to receivers, against one copy of the same bytes in the same run.

    The sender is this process, each receiver one of its own. Medians of --steps after a warm-up; every case ends with
    a step in which all bytes are new and compared by digest.

    \b
    Exit codes: 0 done; 1 a transfer failed; 2 bad input, or too little memory; 130 Ctrl-C.

    \b
    Examples:
      weightsync bench
      weightsync bench --transport shm --model qwen3-0.6b --receivers 1
      weightsync bench --model 310x1KiB --mode direct --soak 1000
      weightsync bench --peers --output benchmarks/results/cpu.json
    """  # fmt: skip
    progress = Progress()
    try:
        kind = transport or ("ipc" if torch.cuda.is_available() else "shm")
        ours, theirs = _devices(kind, device, receiver_device, receivers)
        # Sender and receivers copy at the same time: with more threads than cores they would wait for one another.
        torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // (1 + receivers)))
        chosen = models or DEFAULT_MODELS
        if output is not None and not output.resolve().parent.is_dir():
            raise ConfigError(f"--output: there is no directory {output.resolve().parent}")
        for model in chosen:
            _check_memory(model, manifest_of(model), ours, theirs, bucket_size * slots)
        cases = [
            Case(
                model=model, transport=kind, mode=one, device=ours, receiver_devices=theirs, bucket_bytes=bucket_size,
                slots=slots, push=push, steps=soak or steps, threads=torch.get_num_threads(), verify=verify,
                warmups=SOAK_WARMUPS if soak else WARMUPS,
            )
            for model in chosen
            for one in MODES[mode]
            for verify in ([False, True] if verify_cost else [False])
        ]  # fmt: skip
        made = run(Plan(cases=cases, soak=soak is not None, peers=peers), progress)
    except (ConfigError, SourceError) as error:
        progress.end()
        click.echo(str(error), err=True)
        sys.exit(EXIT_BAD_INPUT)
    except WeightSyncError as error:
        progress.end()
        click.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        progress.end()
        click.echo("interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
    progress.end()
    text = made.model_dump_json(indent=2)
    if output is not None:
        output.write_text(text + "\n")
    if as_json:
        click.echo(text)
        return
    click.echo(f"{made.hardware}; torch {torch.__version__}, {torch.get_num_threads()} thread(s) of it a process")
    click.echo(table(made.rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits. `arguments`: without the command's name; None: this process' own."""
    command.main(args=list(arguments) if arguments is not None else None, prog_name="weightsync bench")


def _devices(
    transport: str, ours: str | None, theirs: str | None, receivers: int
) -> tuple[torch.device, tuple[torch.device, ...]]:
    """The sender's device and each receiver's. Raises ConfigError."""
    wanted = DEVICES[transport]
    sender = _device("--device", ours or wanted, transport)
    if theirs is not None:
        return sender, (_device("--receiver-device", theirs, transport),) * receivers
    if transport != "nccl":
        return sender, (sender,) * receivers
    first = (sender.index or 0) + 1
    return sender, tuple(_device("--receiver-device", f"cuda:{n}", transport) for n in range(first, first + receivers))


def _device(option: str, text: str, transport: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ConfigError(f"{option} {text}: write cpu, cuda or cuda:1") from None
    if device.type != DEVICES[transport]:
        raise ConfigError(
            f"{option} {text}: --transport {transport} moves memory of "
            + ("the CPU" if DEVICES[transport] == "cpu" else "GPUs")
            + "; shm and gloo are the CPU's, ipc and nccl the GPUs'"
        )
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise ConfigError(f"--transport {transport} needs a GPU, and torch sees none here; shm and gloo need none")
        if (device.index or 0) >= count:
            raise ConfigError(f"{option} {device}: this machine has {count} GPU(s), and {transport} needs that one")
        return torch.device("cuda", device.index or 0)
    return device


def _check_memory(
    model: str, manifest: Manifest, ours: torch.device, theirs: Sequence[torch.device], staging: int
) -> None:
    """Host memory is given out before it is there: the first write beyond it would get a process killed."""
    size, processes = manifest.arena_bytes, 1 + len(theirs)
    on_ours = 1 + sum(device == ours for device in theirs)
    needed = max(2 * min(size, LARGEST_COPY), 2 * min(size, LARGEST_LIST), on_ours * size + min(staging, size))
    if ours.type == "cpu":
        needed += processes * PROCESS_BYTES
        free = int(psutil.virtual_memory().available)
    else:
        needed += on_ours * CONTEXT_BYTES
        free = torch.cuda.mem_get_info(ours)[0]
    if needed > free:
        raise ConfigError(
            f"{model} takes {format_bytes(needed)} of {'GPU ' if ours.type == 'cuda' else ''}memory in this bench, and "
            f"{format_bytes(free)} is available: choose a smaller --model, or fewer --receivers"
        )
