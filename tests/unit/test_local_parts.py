"""The parts of a local run: which command an agent gets, which GPU, where its state and its log are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from operator_samples import planned, weightsync
from weightsync_api.v1alpha1 import Device, Placement
from weightsync_operator import local_log, state_dir
from weightsync_operator.local_command import Command, Downward, TemplateError, command_for, expand
from weightsync_operator.local_gpus import NotEnoughGpusError, assign, device_for, visible_gpus
from weightsync_operator.local_log import AgentLog
from weightsync_operator.plan import Key
from weightsync_operator.state_dir import AlreadyRunningError, ProcessId, StateDir, StateError, base_dir, running

# --- commands ---------------------------------------------------------------------------------------------------------

IDENTITY = {"WEIGHTSYNC_RANK": "2", "WEIGHTSYNC_ROLE": "receiver"}


def command(folder: Path, container: dict[str, Any] | None, **pod: Any) -> Command:
    containers = [] if container is None else [container]
    template = {"spec": {"containers": containers, **pod}} if container or pod else {}
    return command_for(template, "spec.receivers.template", folder, Downward("demo-0", "ns", "host"), IDENTITY)


@pytest.mark.parametrize("container", [None, {"name": "agent", "image": "x", "env": [{"name": "A", "value": "1"}]}])
def test_without_a_command_the_agent_itself_runs(tmp_path: Path, container: dict[str, Any] | None) -> None:
    made = command(tmp_path, container)
    assert made.argv == (sys.executable, "-m", "weightsync_agent.main")
    assert (made.cwd, made.user) == (tmp_path, False)
    assert made.env.get("A") == (container and "1")


def test_a_containers_command_runs_in_the_manifests_folder_with_this_python(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    made = command(tmp_path, {"command": ["python3", "train.py"], "args": ["--fast"], "workingDir": "sub"})
    assert (made.argv, made.cwd, made.user) == ((sys.executable, "train.py", "--fast"), tmp_path / "sub", True)


def test_variables_are_filled_in_as_a_cluster_does(tmp_path: Path) -> None:
    container = {
        "command": ["run", "$(WEIGHTSYNC_RANK)/$(POD)", "$$(POD)", "$(UNKNOWN)"],
        "env": [
            {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "TWO", "value": "$(POD)-x"},
            {"name": "WEIGHTSYNC_RANK", "value": "7"},
        ],
    }
    made = command(tmp_path, container)
    assert made.argv == ("run", "2/demo-0", "$(POD)", "$(UNKNOWN)")
    assert (made.env["TWO"], made.env["WEIGHTSYNC_RANK"]) == ("demo-0-x", "2")
    assert expand("a $ b $$ c", {}) == "a $ b $ c"


@pytest.mark.parametrize(
    ("container", "says"),
    [
        ({"name": "x", "args": ["--fast"]}, "containers[0]: args without command"),
        ({"command": ["x"], "envFrom": [{}]}, "containers[0].envFrom"),
        ({"command": ["x"], "env": [{"name": "A", "valueFrom": {"secretKeyRef": {}}}]}, "containers[0].env A"),
        ({"command": ["x"], "workingDir": "/nowhere/at/all"}, "containers[0].workingDir: /nowhere/at/all"),
        ({"command": "x"}, "spec.containers.0.command"),
    ],
)
def test_what_only_a_cluster_can_do_is_refused_with_the_fields_path(
    tmp_path: Path, container: dict[str, Any], says: str
) -> None:
    with pytest.raises(TemplateError) as refused:
        command(tmp_path, container)
    assert str(refused.value).startswith("spec.receivers.template")
    assert says in str(refused.value)


def test_init_containers_are_named_as_not_run(tmp_path: Path) -> None:
    assert "initContainers" in command(tmp_path, {"command": ["x"]}, initContainers=[{"name": "i"}]).notice


# --- GPUs -------------------------------------------------------------------------------------------------------------


def test_gpus_are_counted_by_device_nodes_and_the_users_choice_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(tmp_path) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-abc")
    assert visible_gpus(tmp_path) == ["1", "GPU-abc"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus(tmp_path) == []


def test_a_machine_without_a_gpu_runs_on_cpu_and_says_so() -> None:
    device, notice = device_for(weightsync(device="CUDA"), [])
    assert device == Device.CPU
    assert "CPU" in notice
    assert device_for(weightsync(device="CUDA"), ["0"]) == (Device.CUDA, "")
    assert device_for(weightsync(device="CPU"), []) == (Device.CPU, "")


@pytest.mark.parametrize(
    ("placement", "wanted"),
    [
        (Placement.COLOCATED, {0: "5", 1: "5", 2: "5"}),
        (Placement.NODE, {0: "5", 1: "6", 2: "7"}),
        (Placement.DEDICATED, {0: "5", 1: "6", 2: "7"}),
    ],
)
def test_each_process_gets_its_gpu(placement: Placement, wanted: dict[int, str]) -> None:
    made = planned(weightsync(placement=placement, receivers={"replicas": 2}))
    assert assign(made, ["5", "6", "7"], placement) == wanted


def test_too_few_gpus_is_a_sentence_that_says_what_to_write() -> None:
    made = planned(weightsync(placement="Node", receivers={"replicas": 2}))
    with pytest.raises(NotEnoughGpusError, match=r"needs 3 GPUs and this machine has 1.*Colocated"):
        assign(made, ["0"], Placement.NODE)


# --- state ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return base_dir()


KEY = Key("default", "demo")


def test_the_state_is_for_its_owner_and_leaves_nothing(home: Path) -> None:
    state = StateDir.acquire(KEY)
    state.write_resource(weightsync())
    assert [ws.metadata.name for ws in running()] == ["demo"]
    for path in (home, state.path, state.runtime_dir, state.logs):
        assert path.stat().st_mode & 0o777 == 0o700
    state.release()
    state.release()
    assert not home.exists()
    assert not state.runtime_dir.exists()


def test_a_second_run_of_a_name_is_refused_and_another_name_is_not(home: Path) -> None:
    state = StateDir.acquire(KEY)
    with pytest.raises(AlreadyRunningError, match=rf"default/demo already runs .*process {os.getpid()}\)"):
        StateDir.acquire(KEY)
    other = StateDir.acquire(Key("default", "other"))
    state.release()
    StateDir.acquire(KEY).release()
    other.release()
    assert not home.exists()


def test_a_killed_runners_state_is_swept_with_its_processes(home: Path) -> None:
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        code = (
            "import os, signal, sys; from pathlib import Path\n"
            "from weightsync_operator.plan import Key\n"
            "from weightsync_operator.state_dir import ProcessId, StateDir\n"
            "state = StateDir.acquire(Key('default', 'demo'))\n"
            "(state.runtime_dir / 'control').touch(); (state.logs / 'sender.log').write_text('x')\n"
            f"state.write_processes([ProcessId.of({left.pid})])\n"
            "print(state.runtime_dir, flush=True)\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert killed.returncode == -signal.SIGKILL
        old = Path(killed.stdout.strip())
        assert (old / "control").exists()
        assert list(running()) == []
        state = StateDir.acquire(KEY)
        assert left.wait(timeout=120) == -signal.SIGKILL
        assert list(state.logs.iterdir()) == []
        assert list(state.runtime_dir.iterdir()) == []
        assert old == state.runtime_dir or not old.exists()
        state.release()
    finally:
        left.kill()


def test_a_process_id_that_was_given_anew_is_another_process() -> None:
    me = ProcessId.of(os.getpid())
    assert me.alive()
    assert not ProcessId(me.pid, "1").alive()


def test_a_path_too_long_for_a_socket_moves_the_sockets_to_a_short_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    state = StateDir.acquire(KEY)
    assert len(str(state.runtime_dir / ("x" * state_dir.LONGEST_SOCKET_NAME))) <= state_dir.MAX_SOCKET_PATH
    state.release()
    assert not state.runtime_dir.exists()


def test_a_directory_that_is_somebody_elses_is_not_used(home: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    home.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StateError, match="XDG_RUNTIME_DIR"):
        StateDir.acquire(KEY)


# --- logs -------------------------------------------------------------------------------------------------------------


def test_lines_come_whole_whatever_the_pieces_and_cannot_steer_the_terminal(tmp_path: Path) -> None:
    lines: list[tuple[int, str]] = []
    log = AgentLog(tmp_path / "a.log", lambda stream, text: lines.append((stream, text)))
    log.feed(1, b"on")
    log.feed(2, b"err\n")
    log.feed(1, b"e\ntwo\r 10%\r 20%\n\x1b[31mred\x1b[0m \x07\xff\n\n")
    log.feed(1, b"last")
    log.end(1)
    assert lines == [(2, "err"), (1, "one"), (1, "two"), (1, " 10%"), (1, " 20%"), (1, "red �"), (1, "last")]
    assert list(log.tail)[-1] == "last"
    log.close()


def test_why_a_process_ended_is_its_last_line_and_after_a_launcher_s_summary_the_error_of_what_it_launched(
    tmp_path: Path,
) -> None:
    log = AgentLog(tmp_path / "a.log", lambda stream, text: None)
    assert log.cause == ""
    log.feed(2, b"[rank1]:     return run()\n[rank1]: some.errors.ConfigError: names: a, b all become 'c'\n")
    log.feed(2, b"torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\nrun.py FAILED\n=====\n")
    assert log.cause == "[rank1]: some.errors.ConfigError: names: a, b all become 'c'"
    log.feed(2, b"ended\n")
    assert log.cause == "ended"
    log.begin()
    log.feed(2, b"-----\n")
    assert log.cause == "-----"
    log.close()


def test_a_log_is_bounded_and_so_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_log, "MAX_LOG_BYTES", 10_000)
    longest = 0

    def seen(_: int, text: str) -> None:
        nonlocal longest
        longest = max(longest, len(text))

    log = AgentLog(tmp_path / "a.log", seen)
    for _ in range(100):
        log.feed(1, b"x" * 3000)
    log.end(1)
    log.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log", "a.log.1"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_000
    assert 0 < longest <= local_log.MAX_LINE_BYTES
