"""verl's and checkpoint-engine's wires over CUDA IPC: ours at both ends, and verl's own where they were fetched."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peer import Here, Peer
from transfer import samples
from weightsync_agent.engines.checkpoint_engine import CheckpointEngineReceiver, CheckpointEngineSender
from weightsync_agent.engines.verl import VerlReceiver, VerlSender
from weightsync_agent.errors import ManifestMismatch

SMALL_BUCKET = 200_000
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load_verl() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    import peers

    return peers.load_verl("cuda")


@pytest.fixture
def verl_is_there() -> None:
    sys.path.insert(0, str(BENCHMARKS))
    import peers

    if not (peers.FOLDER / peers.WHEELS["verl"][1]).exists():
        pytest.skip("verl's file is not there: run `python benchmarks/peers.py fetch`")


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/w.sock"


# --- run by the other process -----------------------------------------------------------------------------------------


def begin(here: Here, function: Callable[..., Any], *arguments: Any) -> None:
    """In a thread there, so that this process can go on."""

    def run() -> None:
        try:
            here.kept["result"] = function(here, *arguments)
        except Exception as error:
            here.kept["result"] = f"{type(error).__name__}: {error}"

    here.kept["thread"] = threading.Thread(target=run)
    here.kept["thread"].start()


def end(here: Here) -> Any:
    here.kept.pop("thread").join(60)
    return here.kept.pop("result")


def verl_receives(here: Here, address: str) -> dict[str, str]:
    receiver = load_verl().BucketedWeightReceiver(address, torch.device("cuda", 0), use_shm=False)
    got: dict[str, torch.Tensor] = {}
    receiver.receive_weights(lambda weights, last: got.update((n, t.clone()) for n, t in weights))
    return samples.fingerprint(got)


def verl_sends(here: Here, address: str, seed: int) -> str:
    import asyncio

    weights = samples.mixed(seed, "cuda")
    weights["beyond"] = torch.arange(3 << 18, dtype=torch.float32, device="cuda")  # 3 MiB, and the bucket has 1
    sender = load_verl().BucketedWeightSender(address, bucket_size_mb=1, use_shm=False)
    asyncio.run(sender.async_send_weights(weights.items()))
    return "ok"


def ours_receives(here: Here, address: str, seed: int) -> dict[str, str]:
    target = here.kept.setdefault("target", samples.blank("cuda"))
    receiver = here.kept.setdefault("receiver", VerlReceiver(address, target, allow_object_wire=True))
    receiver.receive()
    return samples.fingerprint(target)


def ours_receives_by_checkpoint_engine(here: Here, address: str) -> dict[str, str]:
    target = samples.blank("cuda")
    CheckpointEngineReceiver(address, target, allow_object_wire=True).receive()
    return samples.fingerprint(target)


# --- the tests --------------------------------------------------------------------------------------------------------


def put(weights: dict[str, torch.Tensor], seed: int) -> None:
    for name, tensor in samples.mixed(seed, "cuda").items():
        weights[name].copy_(tensor)


def test_ours_to_ours_every_export_is_released_and_nothing_grows(peer: Peer, address: str) -> None:
    weights = samples.mixed(0, "cuda")
    with VerlSender(weights, address, bucket_bytes=SMALL_BUCKET, allow_object_wire=True) as sender:
        reserved = 0
        for seed in range(1, 21):
            put(weights, seed)
            peer.call(begin, ours_receives, address, seed)
            assert sender.step().complete
            assert peer.call(end) == samples.fingerprint(samples.mixed(seed))
            assert sender.stranded_bytes == 0
            if seed == 3:
                reserved = torch.cuda.memory_reserved()
        assert torch.cuda.memory_reserved() == reserved


def test_checkpoint_engines_wire_over_cuda_ipc(peer: Peer) -> None:
    weights = samples.mixed(5, "cuda")
    with CheckpointEngineSender(weights, "GPU-x", bucket_bytes=SMALL_BUCKET, allow_object_wire=True) as sender:
        for seed in (5, 6):
            put(weights, seed)
            sender.step(lambda handles: peer.call(begin, ours_receives_by_checkpoint_engine, handles["GPU-x"]))
            assert peer.call(end) == samples.fingerprint(samples.mixed(seed))
            assert sender.stranded_bytes == 0


@pytest.mark.usefixtures("verl_is_there")
def test_verls_receiver_holds_our_bytes(peer: Peer, address: str) -> None:
    weights = samples.mixed(0, "cuda")
    with VerlSender(weights, address, bucket_bytes=SMALL_BUCKET, allow_object_wire=True) as sender:
        for seed in (1, 2, 3):
            put(weights, seed)
            peer.call(begin, verl_receives, address)
            sender.step()
            assert peer.call(end) == samples.fingerprint(samples.mixed(seed))
            assert sender.stranded_bytes == 0


@pytest.mark.usefixtures("verl_is_there")
def test_our_tensors_are_verls_and_one_beyond_its_bucket_comes_by_a_handle_of_its_own(peer: Peer, address: str) -> None:
    target = samples.blank("cuda") | {"beyond": torch.zeros(3 << 18, device="cuda")}
    receiver = VerlReceiver(address, target, allow_object_wire=True)
    for seed in (1, 2, 3):
        peer.call(begin, verl_sends, address, seed)
        receiver.receive()
        assert peer.call(end) == "ok"
        assert torch.equal(target["beyond"].cpu(), torch.arange(3 << 18, dtype=torch.float32))
        got = samples.fingerprint({name: tensor for name, tensor in target.items() if name != "beyond"})
        assert got == samples.fingerprint(samples.mixed(seed))


@pytest.mark.usefixtures("verl_is_there")
def test_a_mismatch_lets_verls_sender_end_and_releases_its_memory(peer: Peer, address: str) -> None:
    receiver = VerlReceiver(address, {"a": torch.zeros(3, device="cuda")}, allow_object_wire=True)
    peer.call(begin, verl_sends, address, 1)
    with pytest.raises(ManifestMismatch, match="sent, but the receiver has no such tensor"):
        receiver.receive()
    assert peer.call(end) == "ok"
    assert not receiver.ready
