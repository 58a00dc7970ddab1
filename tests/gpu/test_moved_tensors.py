"""What moved since the Sender was made, on a GPU: each step is of the values that the tensors have by then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from moved_promises import *  # noqa: F403 - the tests of all places
from moved_promises import away_and_back, other_memory
from nccl_pair import Pair
from step_promises import GPU_PLACES, Place
from transfer import samples
from transfer.harness import make_config, run_dir, start  # noqa: F401 - fixtures
from weightsync_agent import addresses
from weightsync_agent.sender import Sender
from weightsync_agent.sources.computed import Computed
from weightsync_api.agent_config import AgentConfig

GPU = {"device": "cuda"}


@pytest.fixture(params=GPU_PLACES, ids=lambda place: place.name)
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.param
    return found


@pytest.fixture(params=["before", "within"], autouse=True)
def looks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """When the sender looks: before the step, or while its receivers copy, as with many tensors."""
    when: str = request.param
    if when == "within":
        monkeypatch.setattr(addresses, "MANY_ON_GPU", 1)
    return when


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path)
    torch.cuda.synchronize()


def test_what_moved_is_exported_anew_and_what_was_exported_is_released_once(
    looks: str, make_config: Callable[..., AgentConfig], start: Callable[..., Any]  # noqa: F811
) -> None:  # fmt: skip
    config = make_config(device="CUDA", mode="Direct", push=False)
    receiver = start(config, 1, **GPU)
    weights = samples.mixed(0, "cuda")
    with Sender(weights, config=config) as sender:
        assert sender._carrier.checks_late == (looks == "within")
        assert sender.step().complete
        exports = list(sender._transport._exports[1].ledger._live)
        count, allocated = sender._transport.exported(1), torch.cuda.memory_allocated()
        assert [made.counter() for made in exports] == [1] * len(exports)
        for seed in (1, 2, 3):
            away_and_back(weights)
            want = samples.change(weights, seed)
            report = sender.step()
            assert report.complete
            assert report.verified
            assert receiver.until("step", report.step)["fingerprint"] == want
            assert all(made.retired for made in exports)
            assert [made.counter() for made in exports] == [0] * len(exports)
            exports = list(sender._transport._exports[1].ledger._live)
            assert sender._transport.exported(1) == len(exports) >= 1
        torch.cuda.ipc_collect()
        assert torch.cuda.memory_allocated() - allocated < 256 << 10, "the old memory came back"
        assert count >= 1


def test_large_tensors_in_memory_of_their_own_are_followed_over_every_way(
    make_config: Callable[..., AgentConfig], start: Callable[..., Any], place: Place  # noqa: F811
) -> None:  # fmt: skip
    """Each allocation of its own: a handle for each tensor, and buckets that split one."""
    config = make_config(device="CUDA", mode=place.mode, bucket_bytes=1 << 20, push=place.push)
    sizes = {f"w{n}": (3 << 20) + n for n in range(4)}
    receiver = start(config, 1, blank=sizes, **GPU)
    weights = {name: torch.randn(size, device="cuda") for name, size in sizes.items()}
    with Sender(weights, config=config, adopt=place.adopt) as sender:
        assert sender.step().verified
        for name in ("w0", "w2"):
            weights[name].data = weights[name].detach() + 1
        weights["w3"] = torch.randn(sizes["w3"], device="cuda")
        for tensor in weights.values():
            tensor.mul_(2)
        before = sender._step
        report = sender.step()
        assert report.complete
        receiver.until("step", report.step)
        assert sender._step - before in (1, 2)
        # The digests of the next one are those of the bytes that lie there.
        sender._lobby.peers[1].verified_once = False
        assert sender.step().verified


@pytest.mark.parametrize("mode", ["Direct", "Packed"])
def test_nccl_sends_what_moved_from_where_it_is(runtime: str, mode: str) -> None:
    weights, target = samples.mixed(0, "cuda"), samples.blank("cuda")
    weights["huge"], target["huge"] = torch.randn(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
    with Pair(weights, target, runtime, mode) as pair:
        pair.step()
        for move in (other_memory, away_and_back):
            move(weights)
            weights["huge"].data = torch.randn(1 << 20, device="cuda")
            pair.sender.replan()
            pair.step()
            assert samples.fingerprint(target) == samples.fingerprint(weights), move.__name__


def as_lora_has_it() -> tuple[dict[str, torch.Tensor | Computed], dict[str, torch.Tensor]]:
    """A tensor whose memory is a base, and not what is sent; and what is."""
    weights = samples.mixed(0, "cuda")
    base = weights["large"]
    return weights | {"large": Computed(base, lambda: base + 1)}, weights | {"large": base + 1}


def test_what_is_computed_is_sent_and_not_its_base_by_ipc(
    make_config: Callable[..., AgentConfig], start: Callable[..., Any]  # noqa: F811
) -> None:  # fmt: skip
    source, want = as_lora_has_it()
    config = make_config(device="CUDA", mode="Auto", bucket_bytes=65536, push=False)
    receiver = start(config, 1, **GPU)
    with Sender(source, config=config) as sender:
        assert sender.step().verified
        assert receiver.until("step", 1)["fingerprint"] == samples.fingerprint(want)
        assert sender.report().mode == "Packed"


def test_what_is_computed_is_sent_and_not_its_base_by_nccl(runtime: str) -> None:
    source, want = as_lora_has_it()
    tensors = {name: given.base if isinstance(given, Computed) else given for name, given in source.items()}
    values, target = [tensor.contiguous() for tensor in want.values()], samples.blank("cuda")

    def gather(indices: Sequence[int]) -> list[torch.Tensor]:
        return [values[index] for index in indices]

    with Pair(tensors, target, runtime, gather=gather, computed=True) as pair:
        pair.step()
        assert samples.fingerprint(target) == samples.fingerprint(want)
