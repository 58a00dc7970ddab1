"""What a trainer holds becomes whole tensors of the dtype that is sent: two real ranks of FSDP2, on the CPU."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from weightsync_agent.errors import ConfigError
from weightsync_agent.sources.computed import Computed
from weightsync_agent.sources.module import gatherer_for


def test_a_module_is_sent_in_place_with_its_ties_and_buffers() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 10, bias=False))
    model[2].weight = model[0].weight
    model[1].register_buffer("passing", torch.ones(3), persistent=False)
    gatherer = gatherer_for(model)
    assert gatherer.plain
    assert gatherer.leads
    assert gatherer.names == list(model.state_dict())
    assert gatherer.tensors[0].data_ptr() == model[0].weight.data_ptr()
    assert gatherer.manifest.tensors[-1].alias == 0
    assert "1.passing" not in gatherer.names
    gatherer.conclude()


def test_a_dict_and_an_iterator_are_taken_in_their_order() -> None:
    tensors = {"b": torch.ones(2), "a": torch.zeros(3)}

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors.items()

    assert gatherer_for(tensors).names == gatherer_for(pairs()).names == ["b", "a"]
    assert gatherer_for(pairs()).manifest.hash == gatherer_for(tensors).manifest.hash
    assert gatherer_for({}).tensors == []


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ([("a", torch.ones(1)), ("a", torch.ones(1))], "two tensors are named 'a'"),
        ({"a": 3}, "'a' comes with a int"),
        ([(7, torch.ones(1))], "7 comes with a Tensor"),
        ({"a": torch.ones(2, device="meta")}, "'a' is meta"),
        ({"a": torch.eye(3).to_sparse()}, "'a' is sparse"),
    ],
)
def test_what_cannot_be_sent_is_named(weights: object, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        gatherer_for(weights)  # type: ignore[arg-type]


def test_float32_masters_are_sent_as_bfloat16_and_all_else_as_it_is() -> None:
    master = torch.randn(5, 7)
    tensors = {
        "w": master,
        "strided": torch.randn(6, 4).t(),
        "half": torch.randn(3, dtype=torch.float16),
        "tied": master,
        "count": torch.arange(4),
        "mask": torch.tensor([True, False]),
        "scaled": torch.randn(4).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(0.1),
    }
    gatherer = gatherer_for(tensors, torch.bfloat16)
    assert not gatherer.plain
    kinds = [entry.dtype for entry in gatherer.manifest.tensors]
    assert kinds == ["bfloat16"] * 4 + ["int64", "bool", "float8_e4m3fn", "bfloat16", "bfloat16"]
    assert gatherer.manifest.tensors[3].alias == 0
    for again in range(3):
        master += again
        found = gatherer.gather(range(len(tensors)))
        for entry, whole, tensor in zip(gatherer.manifest.tensors, found, tensors.values(), strict=True):
            assert whole.is_contiguous()
            assert whole.dtype == entry.torch_dtype
            assert whole.shape == tensor.shape
            assert torch.equal(whole.float(), tensor.to(entry.torch_dtype).float())
        gatherer.conclude()


def test_a_dtype_that_all_have_already_leaves_them_in_place() -> None:
    assert gatherer_for({"w": torch.ones(2, dtype=torch.bfloat16)}, torch.bfloat16).plain


def test_a_tensor_split_over_buckets_is_converted_once_and_stays_right_beside_others() -> None:
    tensors = {name: torch.randn(100) + number for number, name in enumerate("abcd")}
    expected = [tensor.bfloat16() for tensor in tensors.values()]
    gatherer = gatherer_for(tensors, torch.bfloat16)
    split = []
    for indices in ([0, 1], [1], [1], [1, 2], [2, 3], [3, 0]):
        found = gatherer.gather(indices)
        for index, whole in zip(indices, found, strict=True):
            assert torch.equal(whole, expected[index]), indices
        split += [whole.data_ptr() for index, whole in zip(indices, found, strict=True) if index == 1]
    assert len(split) == 4
    assert len(set(split)) == 1


def test_a_new_step_converts_anew() -> None:
    master = torch.zeros(10)
    gatherer = gatherer_for({"w": master}, torch.bfloat16)
    assert gatherer.gather([0])[0].sum() == 0
    gatherer.conclude()
    master.fill_(1)
    assert gatherer.gather([0])[0].sum() == 10


RANK = textwrap.dedent(
    """
    import sys
    import torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from weightsync_agent.sources.module import gatherer_for

    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)

    def build():
        torch.manual_seed(7)
        model = torch.nn.Sequential(
            torch.nn.Embedding(11, 6), torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(6, 11, bias=False)
        )
        model[3].weight = model[0].weight
        model.register_buffer("count", torch.arange(3))
        return model

    whole, model = build(), build()
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[1], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    for dtype in (None, torch.bfloat16):
        gatherer = gatherer_for(model, dtype)
        assert gatherer.leads == (rank == 0)
        assert not gatherer.plain
        expected = whole.state_dict()
        assert gatherer.names == list(expected), gatherer.names
        assert [entry.shape for entry in gatherer.manifest.tensors] == [tuple(t.shape) for t in expected.values()]
        assert gatherer.manifest.tensors[gatherer.names.index("3.weight")].alias == gatherer.names.index("0.weight")
        assert sum(isinstance(t, DTensor) for t in gatherer.tensors) == 6

        for step in range(4):
            if step == 3:  # a checkpoint is loaded, so that other tensors stand in the model's places
                model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()}, assign=True)
                whole.load_state_dict({name: 2 * value for name, value in whole.state_dict().items()})
                model[3].weight = model[0].weight
            gatherer.refresh()
            if rank:
                gatherer.follow()
            else:
                seen = {}
                # Any order, a split tensor in consecutive calls, one that is not sharded, and a step that breaks off.
                for indices in ([1, 2], [2], [2, 3], [0], [5, 4]) if step != 1 else ([2],):
                    seen |= dict(zip(indices, gatherer.gather(indices)))
                gatherer.conclude()
                for index, tensor in seen.items():
                    want = list(expected.values())[index]
                    want = want.to(dtype) if dtype and want.is_floating_point() else want
                    assert type(tensor) is torch.Tensor
                    assert torch.equal(tensor, want), gatherer.names[index]
            # The trainer trains: the shards change in place, alike in the whole model.
            with torch.no_grad():
                for parameter in (*model.parameters(), *whole.parameters()):
                    parameter.add_(1)
        dist.barrier()
    dist.destroy_process_group()
    print("whole")
    """
)


def test_two_ranks_of_fsdp_gather_bucket_by_bucket(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=280)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(told)
    assert all(text.endswith("whole\n") for text in told)


def test_a_gatherer_that_is_done_keeps_no_weights_alive() -> None:
    for dtype in (None, torch.bfloat16):
        tensor = torch.ones(10)
        gatherer = gatherer_for({"w": tensor, "made": Computed(tensor.clone(), lambda kept=tensor: kept)}, dtype)
        gatherer.gather([0, 1])
        seen = weakref.ref(tensor)
        del tensor
        gatherer.let_go()
        gc.collect()
        assert seen() is None
