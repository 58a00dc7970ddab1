"""`weightsync run`: real processes carry a manifest out on this machine, and nothing is left when they end.

Most agents here are stubs that speak the real report over a real socket; the last tests run the real agent.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml
from local_runs import LocalRun, alive, manifest, wait_gone
from weightsync_api.v1alpha1 import StepStatus, WeightSync

END_SECONDS = 45.0
"""Ctrl-C takes up to 5 s: 3 s from SIGTERM to SIGKILL, and a moment. The rest is for a machine that has other work."""


def test_it_ends_with_its_sender_says_what_was_done_and_leaves_nothing(tmp_path: Path) -> None:
    with LocalRun(tmp_path, [manifest(count=5)]) as run:
        assert run.exit_code() == 0, run.stderr
        assert run.stdout[0].split() == (
            ["NAME", "READY", "STATUS", "TRANSPORT", "RECEIVERS", "STEP", "RESERVED", "DELTA", "ACK", "RATE", "AGE"]
        )
        last = "demo True Complete IPC 2/2 5 1GiB +0B 0.5ms 1.0GB/s"
        assert " ".join(run.stdout[-2].split()[:10]) == last
        assert run.stdout[-1].startswith("demo done: 5 steps, receivers 2/2, verified 1 of 5, reserved growth +0B")
        assert run.left() == []
        assert list(run.home.iterdir()) == []


def test_json_is_one_object_a_step_and_nothing_else_on_stdout(tmp_path: Path) -> None:
    with LocalRun(tmp_path, [manifest(count=30, sender={"interval": 0.001})], "--output", "json") as run:
        assert run.exit_code() == 0, run.stderr
        steps = [StepStatus.model_validate_json(line) for line in run.stdout]
        assert [step.step for step in steps] == list(range(1, 31))
        assert "durationMicroseconds" in json.loads(run.stdout[0])


def test_steps_on_the_command_line_replaces_the_specs_count(tmp_path: Path) -> None:
    with LocalRun(tmp_path, [manifest(count=0)], "--steps", "3", "-o", "json") as run:
        assert run.exit_code() == 0
        assert len(run.stdout) == 3


def test_what_containers_print_is_shown_and_their_stderr_only_with_verbose(tmp_path: Path) -> None:
    for options, shown in (((), False), (("--verbose",), True)):
        with LocalRun(tmp_path, [manifest()], *options) as run:
            assert run.exit_code() == 0
            assert "[receiver-2] the engine is done" in run.stderr
            assert ("[receiver-1] a word on stderr" in run.stderr) is shown


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_every_process_in_time_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with LocalRun(tmp_path, [manifest(count=0, receiver={"stubborn": True})]) as run:
        run.printed("demo +True")
        pids = [run.pid(name) for name in ("sender", "receiver-1", "receiver-2")]
        asked_at = time.monotonic()
        run.process.send_signal(number)
        assert run.exit_code() == code
        assert time.monotonic() - asked_at < END_SECONDS
        assert [alive(pid) for pid in pids] == [False] * 3
        assert run.left() == []
        assert list(run.home.iterdir()) == []
        assert "demo stopped: " in run.stdout[-1]


def test_the_timeout_ends_it_with_124(tmp_path: Path) -> None:
    with LocalRun(tmp_path, [manifest(count=0)], "--timeout", "2") as run:
        assert run.exit_code() == 124
        assert "--timeout 2 s is over" in run.stderr
        assert run.left() == []


def test_a_second_run_of_the_same_name_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with LocalRun(tmp_path, [manifest(count=0)]) as first:
        first.printed("demo +True")
        second = first.ask("run", str(first.file))
        assert second.returncode == 2
        assert f"default/demo already runs on this machine (process {first.process.pid})" in second.stderr
        assert second.stdout == ""
        assert first.process.poll() is None
        assert alive(first.pid("sender"))
        first.process.send_signal(signal.SIGINT)
        assert first.exit_code() == 130


def test_agents_end_with_a_killed_runner_and_the_next_run_sweeps_its_state(tmp_path: Path) -> None:
    with LocalRun(tmp_path, [manifest(count=0)]) as killed:
        killed.printed("demo +True")
        pids = [killed.pid(name) for name in ("sender", "receiver-1", "receiver-2")]
        killed.process.kill()
        for pid in pids:
            wait_gone(pid)
        assert killed.left() != []
        assert "No WeightSync runs" in killed.ask("get").stderr
    with LocalRun(tmp_path, [manifest(count=2)]) as run:
        assert run.exit_code() == 0, run.stderr
        assert list(run.home.iterdir()) == []


def test_a_killed_receiver_is_named_and_started_again(tmp_path: Path) -> None:
    with LocalRun(tmp_path, [manifest(count=0)]) as run:
        run.printed("demo +True")
        os.kill(run.pid("receiver-2"), signal.SIGKILL)
        run.said(r"^receiver-2: it was killed by signal 9 \(SIGKILL\).*it starts again in 1 s$")
        assert alive(run.pid("receiver-2", start=2))
        assert [alive(run.pid(name)) for name in ("sender", "receiver-1")] == [True, True]
        run.process.send_signal(signal.SIGINT)
        assert run.exit_code() == 130


def test_a_crashed_sender_is_started_again_and_goes_on(tmp_path: Path) -> None:
    with LocalRun(tmp_path, [manifest(count=6, sender={"crash_at": 3})], "-o", "json") as run:
        assert run.exit_code() == 0, run.stderr
        run.said(r"^sender: it exited with code 7: the trainer lost its nerve; it starts again in 1 s$")
        assert [json.loads(line)["step"] for line in run.stdout][-3:] == [4, 5, 6]


def test_a_sender_that_keeps_crashing_ends_the_run_with_its_last_words(tmp_path: Path) -> None:
    broken = manifest(sender={"crash_at": 1})
    broken["spec"]["sender"]["template"]["spec"]["containers"][0]["command"] = ["sh", "-c", "echo no GPU >&2; exit 5"]
    with LocalRun(tmp_path, [broken]) as run:
        assert run.exit_code() == 1
        assert "default/demo: the sender failed: it exited with code 5, 3 times now" in run.stderr
        assert "[sender] no GPU" in run.stderr
        logs = Path(run.said("^logs: (.*)$")[0][1])
        assert (logs / "sender.log").read_text().count("no GPU") == 3
        assert [pid for pid in run.pids() if alive(pid)] == []


def test_a_receiver_that_never_starts_ends_the_run_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The sender waits for it: no step is ever done.
    waiting = manifest(receiver={"crashes": 99}, replicas=1)
    waiting["spec"]["sender"]["template"]["spec"]["containers"][0]["command"] = ["sleep", "600"]
    with LocalRun(tmp_path, [waiting]) as run:
        assert run.exit_code() == 1
        run.said(r"^default/demo: receiver-1 failed 5 times before its first step: it exited with code 7$")
        assert run.stderr.count("[receiver-1] the engine has no weights to start from") >= 1


def test_a_receiver_that_fails_its_own_check_at_the_end_fails_the_run(tmp_path: Path) -> None:
    with LocalRun(tmp_path, [manifest(receiver={"last_exit": 3})]) as run:
        assert run.exit_code() == 1
        run.said("receiver-[12] failed after the last step: it exited with code 3")
        assert "demo failed: 5 steps" in run.stdout[-1]


def test_a_program_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    missing = manifest()
    missing["spec"]["receivers"]["template"]["spec"]["containers"][0]["command"] = ["no-such-program"]
    with LocalRun(tmp_path, [missing]) as run:
        assert run.exit_code() == 2
        run.said("default/demo: a process can't be started: .*no-such-program")
        assert run.left() == []


def test_a_template_for_a_cluster_alone_is_refused_before_anything_starts(tmp_path: Path) -> None:
    secret = manifest()
    secret["spec"]["sender"]["template"]["spec"]["containers"][0]["envFrom"] = [{"secretRef": {"name": "s"}}]
    with LocalRun(tmp_path, [manifest("fine"), secret]) as run:
        assert run.exit_code() == 2
        assert run.stderr == [
            "demo/spec.sender.template.spec.containers[0].envFrom: "
            "ConfigMaps and Secrets are in a cluster only: write env with values"
        ]
        assert run.stdout == []
        assert run.left() == []


def test_documents_run_side_by_side_and_the_worst_decides(tmp_path: Path) -> None:
    with LocalRun(tmp_path, [manifest("one"), manifest("two", receiver={"last_exit": 3})], "-o", "json") as run:
        assert run.exit_code() == 1
        steps = [(step["name"], step["step"]) for step in map(json.loads, run.stdout)]
        assert sorted(steps) == [(name, n) for name in ("one", "two") for n in range(1, 6)]
        run.said(r"^\[one/receiver-1\] pid")
        run.said(r"^one done: 5 steps")
        run.said(r"^two failed: 5 steps")
        assert run.left() == [path for path in run.left() if "/two/logs/" in path]


def test_get_and_describe_show_a_run_from_another_terminal(tmp_path: Path) -> None:
    with LocalRun(tmp_path, [manifest(count=0)]) as run:
        run.printed("demo +True")
        plain = run.ask("get").stdout.splitlines()
        assert plain[0].split()[:3] == ["NAME", "READY", "STATUS"]
        assert plain[1].split()[:5] == ["demo", "True", "Syncing", "IPC", "2/2"]
        wide = run.ask("get", "demo", "-o", "wide").stdout
        assert "SharedMemory" in wide
        resource = WeightSync.model_validate(yaml.safe_load(run.ask("get", "demo", "-o", "yaml").stdout))
        assert resource.status is not None
        assert [agent.state for agent in resource.status.agents] == ["Synced"] * 3
        assert json.loads(run.ask("get", "demo", "-o", "json").stdout)["kind"] == "WeightSync"
        described = run.ask("describe", "demo").stdout
        for word in ("Ready", "MemoryStable", "demo-group-0", "RANK", "ACK-MAX", "SharedMemory"):
            assert word in described
        assert run.ask("get", "other").returncode == 1
        assert run.ask("get", "-n", "elsewhere").stdout == ""
        run.process.send_signal(signal.SIGINT)
        assert run.exit_code() == 130


def test_a_suspended_weightsync_starts_nothing(tmp_path: Path) -> None:
    with LocalRun(tmp_path, [manifest(suspend=True)]) as run:
        assert run.exit_code() == 0
        assert run.stderr == ["demo: spec.suspend is true: nothing to run"]


# --- the real agent ---------------------------------------------------------------------------------------------------

TINY = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}


def real(tmp_path: Path, *, count: int, interval: int, replicas: int = 2) -> dict[str, object]:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return manifest(
        "real",
        sender=None,
        steps={"count": count, "intervalSeconds": interval},
    ) | {
        "spec": {
            "device": "CPU",
            "placement": "Colocated",
            "sender": {"source": {"synthetic": {"model": "config.json"}}},
            "receivers": {"replicas": replicas},
            "steps": {"count": count, "intervalSeconds": interval},
        }
    }


def test_real_agents_move_weights_and_steps_that_are_over_at_once_are_all_told(tmp_path: Path) -> None:
    with LocalRun(tmp_path, [real(tmp_path, count=6, interval=0)], "-o", "json") as run:
        assert run.exit_code() == 0, run.stderr
        steps = [StepStatus.model_validate_json(line) for line in run.stdout]
        assert [(step.step, step.receivers, step.complete) for step in steps] == [(n, 2, True) for n in range(1, 7)]
        assert steps[0].verified
        assert list(run.home.iterdir()) == []


def test_a_real_receiver_that_is_killed_is_whole_again_after_it_came_back(tmp_path: Path) -> None:
    with LocalRun(tmp_path, [real(tmp_path, count=0, interval=1)], "--verbose") as run:
        run.printed("real +True")
        victim = agent_pid(run, rank=2)
        os.kill(victim, signal.SIGKILL)
        run.said(r"^receiver-2: it was killed by signal 9")
        run.printed("real +False +Degraded")
        run.printed(r"real +True +Syncing +\S+ +2/2", after="real +False +Degraded")
        assert agent_pid(run, rank=2) != victim
        run.process.send_signal(signal.SIGINT)
        asked_at = time.monotonic()
        assert run.exit_code() == 130
        assert time.monotonic() - asked_at < END_SECONDS
        assert list(run.home.iterdir()) == []


def agent_pid(run: LocalRun, rank: int) -> int:
    """Process id of a real agent, by its environment."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            env = path.read_bytes().split(b"\0")
        except OSError:
            continue
        config = next((entry for entry in env if entry.startswith(b"WEIGHTSYNC_CONFIG=")), b"").decode()
        if str(run.home) in config and f"WEIGHTSYNC_RANK={rank}".encode() in env:
            return int(path.parent.name)
    raise AssertionError(f"there is no agent of rank {rank}")


def test_a_source_that_is_not_there_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    missing = real(tmp_path, count=1, interval=0)
    missing["spec"]["sender"]["source"] = {"checkpoint": {"path": "nowhere"}}  # type: ignore[index]
    with LocalRun(tmp_path, [missing]) as run:
        assert run.exit_code() == 2
        assert len(run.stderr) == 1
        assert "nowhere" in run.stderr[0]
        assert list(run.home.iterdir()) == []
