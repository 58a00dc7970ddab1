"""Names: what wrappers put into them is left out by itself, the rest follows the user's rules, and it is said."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable

import pytest
import torch
from weightsync_agent.errors import ConfigError, ManifestMismatch
from weightsync_agent.manifest import Manifest, arena_views, describe
from weightsync_agent.names import renamed, without_wrappers
from weightsync_agent.receiver import Receiver
from weightsync_agent.sender import Sender
from weightsync_agent.sources.module import gatherer_for
from weightsync_agent.targets import TensorTarget
from weightsync_agent.transport import make_arena
from weightsync_api.agent_config import AgentConfig
from weightsync_api.v1alpha1.names import NameRule

PLAIN = ["model.embed.weight", "model.layers.0.up.weight", "lm_head.weight"]


def configured(directory: str, *rules: tuple[str, str]) -> AgentConfig:
    endpoint = f"ipc://{directory}/control"
    return AgentConfig(
        namespace="default", name="names", device="CPU", transport="IPC", receivers=1, bind=endpoint,
        connect=endpoint, runtime_dir=directory,
        names=[NameRule(pattern=pattern, replacement=replacement) for pattern, replacement in rules],
    )  # fmt: skip


def wrapped(change: Callable[[str], str]) -> list[str]:
    return [change(name) for name in PLAIN]


@pytest.mark.parametrize(
    ("names", "left_out"),
    [
        (wrapped(lambda n: f"module.{n}"), ["module."]),
        (wrapped(lambda n: f"_orig_mod.{n}"), ["_orig_mod."]),
        (wrapped(lambda n: n.replace("layers.0.", "layers.0._orig_mod.")), ["_orig_mod."]),
        (wrapped(lambda n: f"module._orig_mod.{n}"), ["_orig_mod.", "module."]),
        (wrapped(lambda n: f"_orig_mod.module.{n}"), ["_orig_mod.", "module."]),
        (wrapped(lambda n: f"base_model.model.{n}".replace("up.", "up.base_layer.")),
         ["base_layer.", "base_model.model."]),
        (wrapped(lambda n: f"module.base_model.model.{n}"), ["module.", "base_model.model."]),
        (wrapped(lambda n: n.replace("layers.0.", "layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.")),
         ["_fsdp_wrapped_module.", "_checkpoint_wrapped_module."]),
    ],
)  # fmt: skip
def test_what_wrappers_put_into_names_is_left_out(names: list[str], left_out: list[str]) -> None:
    assert without_wrappers(names) == (PLAIN, left_out)
    assert renamed(names).names == tuple(PLAIN)


@pytest.mark.parametrize(
    "names",
    [
        PLAIN,
        ["module.a", "b"],  # the model's own: a wrapper's would be before every name
        ["base_model.model.a", "head"],
        ["a.weight", "a.base_layer.weight"],  # two names would become one
        ["module."],
        ["_orig_mod"],
        [],
    ],
)
def test_a_models_own_names_stay(names: list[str]) -> None:
    assert without_wrappers(names) == (names, [])
    assert renamed(names).said == ""


def test_rules_apply_in_order_and_an_empty_name_is_not_sent() -> None:
    rules = [("^model[.]", "transformer."), (r"layers\.(\d+)", r"h.\1"), (r"^v_head\..*$", "")]
    how = renamed([*wrapped(lambda n: f"_orig_mod.{n}"), "_orig_mod.v_head.weight", "_orig_mod.v_head.bias"], rules)
    assert how.names == ("transformer.embed.weight", "transformer.h.0.up.weight", "lm_head.weight", None, None)
    assert how.said == ("'_orig_mod.' left out of 5 names; 2 renamed by names; 2 not sent: v_head.weight, v_head.bias")


def test_a_group_is_one_digit_and_nothing_else_in_a_replacement_is_special() -> None:
    assert renamed(["a.b"], [NameRule(pattern=r"^(\w+)\.b$", replacement=r"\10")]).names == ("a0",)


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        ([("(a", "b")], r"names: \('\(a', 'b'\): pattern: must be a regular expression"),
        ([("a", r"\1")], "replacement names a group that pattern does not have"),
        ([("a", "b c")], "replacement: must be letters"),
        ([("a",)], "is no pair"),
        ([3], "is no pair"),
        ([(3, "a")], "pattern: Input should be a valid string"),
        ([(r"\.\w+\.weight$", ".weight")], "model.embed.weight, model.up.weight all become 'model.weight'"),
    ],
)
def test_a_bad_rule_is_told(rules: list[tuple[str, str]], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        renamed(["model.embed.weight", "model.up.weight"], rules)


def test_a_rule_takes_no_exponential_time() -> None:
    name = "a" * 1000
    assert renamed([name], [("a+a+a+(a+|b)?$", "x")]).names == ("x",)


def test_what_is_sent_has_the_new_names_the_old_memory_and_its_ties() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    trained = torch.nn.Module()
    trained._orig_mod = torch.nn.DataParallel(model)
    gatherer = gatherer_for(trained, names=[(r"^2\.bias$", ""), (r"^(\d)\.", r"h.\1.")])
    assert gatherer.names == ["h.0.weight", "h.1.weight", "h.2.weight"]
    assert gatherer.plain
    assert gatherer.tensors[0].data_ptr() == model[0].weight.data_ptr()
    assert gatherer.manifest.tensors[1].alias == 0
    assert gatherer.dropped == 1
    assert gatherer.renaming == (
        "'_orig_mod.' and 'module.' left out of 4 names; 3 renamed by names; 1 not sent: 2.bias"
    )


@pytest.mark.parametrize("sender", ["", "module.", "_orig_mod."])
@pytest.mark.parametrize("receiver", ["", "module._orig_mod.", "base_model.model."])
def test_either_end_may_be_wrapped(sender: str, receiver: str, caplog: pytest.LogCaptureFixture) -> None:
    tensors = {receiver + name: torch.zeros(number + 1) for number, name in enumerate(PLAIN)}
    target = TensorTarget(tensors)
    with caplog.at_level(logging.INFO):
        target.bind(describe({sender + name: torch.zeros(number + 1) for number, name in enumerate(PLAIN)}))
    assert [tensor.numel() for tensor in target.destinations()] == [1, 2, 3]
    assert ("wrappers" in caplog.text) == (sender != receiver)


def test_a_model_that_differs_is_refused_with_what_differs_besides_wrappers() -> None:
    target = TensorTarget({f"_orig_mod.{name}": torch.zeros(1) for name in PLAIN})
    sent: Manifest = describe({name: torch.zeros(2 if name == PLAIN[0] else 1) for name in PLAIN})
    with pytest.raises(ManifestMismatch) as caught:
        target.bind(sent)
    assert str(caught.value) == "model.embed.weight: the sender's shape is [2], the receiver's [1]"


def test_what_the_agent_reads_from_files_is_renamed_too_and_what_is_left_out_does_not_shift_the_rest() -> None:
    held = {"b": torch.zeros(3), "c": torch.zeros(2)}
    source = {"drop": torch.full((5,), 9.0), "a": torch.ones(3), "c": torch.full((2,), 2.0)}
    manifest = describe(source)
    with tempfile.TemporaryDirectory(prefix="ws-") as directory:
        config = configured(directory, ("^a$", "b"), ("^drop$", ""))
        arena = make_arena(torch.device("cpu"), manifest.arena_bytes)
        views = arena_views(manifest, arena.tensor())
        for name, tensor in source.items():
            views[name].copy_(tensor)
        with (
            Sender(views, config=config, arena=arena) as sender,
            Receiver(held, config=config, rank=1) as receiver,
        ):
            thread = threading.Thread(target=receiver.wait, args=(60,))
            thread.start()
            assert sender.step().complete
            thread.join()
        arena.close()
    assert torch.equal(held["b"], source["a"])
    assert torch.equal(held["c"], source["c"])


def test_the_report_says_what_was_done_to_names() -> None:
    with tempfile.TemporaryDirectory(prefix="ws-") as directory:
        config = configured(directory, ("^a$", "b"))
        held = {"b": torch.zeros(3), "c": torch.zeros(2)}
        with (
            Sender({"module.a": torch.ones(3), "module.c": torch.ones(2)}, config=config) as sender,
            Receiver(held, config=config, rank=1) as receiver,
        ):
            thread = threading.Thread(target=receiver.wait, args=(60,))
            thread.start()
            assert sender.step().complete
            thread.join()
            assert sender.report().names == "'module.' left out of 2 names; 1 renamed by names"
        assert torch.equal(held["b"], torch.ones(3))
