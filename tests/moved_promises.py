"""What becomes of tensors that moved since the Sender was made, on the CPU and on a GPU: the same tests everywhere.

A module of tests imports them all, and has a fixture `place`, as those of step_promises.py.
"""

from __future__ import annotations

import torch
from step_promises import Group, group
from transfer import samples

__all__ = ["group", "test_tensors_that_moved_are_sent_as_they_are_now_and_memory_stays_flat"]

Weights = dict[str, torch.Tensor]


def other_memory(weights: Weights) -> None:
    """As `param.data = ...` does: some, of each kind."""
    for name in ("scalar", "float8_e5m2.odd", "large", "large_strided", "empty"):
        weights[name].data = weights[name].detach().clone()


def tied(weights: Weights) -> None:
    weights["head"].data = weights["head"].detach().clone()


def other_objects(weights: Weights) -> None:
    """As `load_state_dict(assign=True)` does: all of them, with their ties."""
    made: dict[int, torch.Tensor] = {}
    for name, tensor in weights.items():
        weights[name] = made.setdefault(id(tensor), tensor.detach().clone())


def away_and_back(weights: Weights) -> None:
    """As an optimizer or a model that is offloaded and reloaded."""
    for tensor in {id(tensor): tensor for tensor in weights.values()}.values():
        device = tensor.device
        kept = tensor.detach().clone().to("cpu")
        tensor.data = torch.empty(0, dtype=tensor.dtype)
        tensor.data = kept.to(device).clone()


def test_tensors_that_moved_are_sent_as_they_are_now_and_memory_stays_flat(group: Group) -> None:
    place = group.place
    group.configure(receivers=2)
    receivers = [group.receiver(rank) for rank in (1, 2)]
    weights = place.weights()
    reports = []
    with group.sender(weights) as sender:

        def step(seed: int) -> None:
            want = place.change(weights, seed)
            reports.append(sender.step())
            assert reports[-1].complete
            assert [part.rank for part in reports[-1].receivers] == [1, 2]
            assert samples.fingerprint(weights) == want, "the trainer's values are its own"
            for receiver in receivers:
                assert receiver.until("step", reports[-1].step)["fingerprint"] == want

        places = {name: tensor.data_ptr() for name, tensor in weights.items()}
        step(0)
        for number, move in enumerate([other_memory, tied, other_objects, away_and_back], 1):
            move(weights)
            step(number)
            assert weights["head"] is weights["embedding"]
            if place.adopt:
                assert {name: tensor.data_ptr() for name, tensor in weights.items()} == places, move.__name__
            step(10 + number)  # from then on it is as if nothing had been
        assert not sender.errors
        assert (sender.report().mode, sender.report().route) == (place.mode, place.route)
        for number in range(20, 32):
            away_and_back(weights)
            step(number)
    # What receivers map of torch's own memory comes back a little after they let it go.
    allowed = place.flat_bytes if place.adopt or place.mode == "Packed" else 64 << 20
    for of in (lambda r: r.memory, lambda r: r.receivers[0].memory):
        after = [of(report).reserved_after for report in reports[-10:]]
        assert after[0] > 0
        assert max(after) - after[0] <= allowed
    for receiver in receivers:
        receiver.until("closed")
