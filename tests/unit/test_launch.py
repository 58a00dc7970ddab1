"""Which agents a container runs, and how they live and end together; small commands run in the agents' place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from weightsync_agent.errors import ConfigError
from weightsync_agent.launch import Placed, agents_from_env, commands_from_env, expand

WAIT_SECONDS = 120


def test_agents_are_read_with_rank_and_gpu() -> None:
    found = agents_from_env({"WEIGHTSYNC_AGENTS": "sender:0@0, receiver:1@0,receiver:2"})
    assert found == [Placed("sender", 0, 0), Placed("receiver", 1, 0), Placed("receiver", 2, None)]


def test_the_ranks_of_a_statefulsets_pod_are_shifted_by_its_ordinal() -> None:
    env = {"WEIGHTSYNC_AGENTS": "receiver:1@0,receiver:2@1", "WEIGHTSYNC_RANK_STRIDE": "2"}
    assert [a.rank for a in agents_from_env(env | {"WEIGHTSYNC_POD": "x-receivers-0"})] == [1, 2]
    assert [a.rank for a in agents_from_env(env | {"WEIGHTSYNC_POD": "x-receivers-13"})] == [27, 28]


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({}, "write ROLE:RANK or ROLE:RANK@GPU"),
        ({"WEIGHTSYNC_AGENTS": "sender"}, "write ROLE:RANK or ROLE:RANK@GPU"),
        ({"WEIGHTSYNC_AGENTS": "trainer:0"}, "write ROLE:RANK or ROLE:RANK@GPU"),
        ({"WEIGHTSYNC_AGENTS": "sender:1"}, "the sender's rank is 0"),
        ({"WEIGHTSYNC_AGENTS": "receiver:0"}, "receivers' are 1 and up"),
        ({"WEIGHTSYNC_AGENTS": "receiver:1,receiver:1"}, "a rank comes twice"),
        ({"WEIGHTSYNC_AGENTS": "receiver:1", "WEIGHTSYNC_RANK_STRIDE": "two"}, "WEIGHTSYNC_RANK_STRIDE is 'two'"),
        (
            {"WEIGHTSYNC_AGENTS": "receiver:1", "WEIGHTSYNC_RANK_STRIDE": "1", "WEIGHTSYNC_POD": "trainer"},
            "'trainer' ends in no number",
        ),
    ],
)
def test_a_wrong_list_is_refused_with_a_sentence(env: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        agents_from_env(env)
    assert sentence in str(caught.value)


def test_each_agent_sees_its_own_gpu_of_those_that_the_container_has() -> None:
    agent = Placed("receiver", 1, 1)
    assert agent.environment(1, "")["CUDA_VISIBLE_DEVICES"] == "1"
    assert agent.environment(1, "GPU-a,GPU-b")["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    assert "CUDA_VISIBLE_DEVICES" not in Placed("receiver", 1, None).environment(1, "GPU-a,GPU-b")
    with pytest.raises(ConfigError, match="wants GPU 1, but the container sees 1"):
        agent.environment(1, "GPU-a")


def test_a_role_can_have_a_program_of_its_own() -> None:
    text = '{"sender": ["python", "trainer.py"]}'
    assert commands_from_env({"WEIGHTSYNC_COMMANDS": text}) == {"sender": ("python", "trainer.py")}
    assert commands_from_env({}) == {}
    for bad in ("trainer.py", "[]", '{"trainer": ["x"]}', '{"sender": []}', '{"sender": [1]}', '{"sender": "x"}'):
        with pytest.raises(ConfigError, match="WEIGHTSYNC_COMMANDS is"):
            commands_from_env({"WEIGHTSYNC_COMMANDS": bad})


def test_a_program_s_words_are_expanded_as_in_a_container_s_command() -> None:
    assert expand("--rank=$(WEIGHTSYNC_RANK) $(NONE) $$(X) $HOME", {"WEIGHTSYNC_RANK": "3"}) == (
        "--rank=3 $(NONE) $(X) $HOME"
    )


# --- processes ------------------------------------------------------------------------------------------------------


def start(agents: str, script: str, directory: Path) -> subprocess.Popen[str]:
    """The launcher in a process of its own, with a shell script in the agents' place."""
    code = (
        "import os, sys; from weightsync_agent.launch import agents_from_env, launch;"
        "sys.exit(launch(agents_from_env(os.environ), ['sh', '-c', sys.argv[1]]))"
    )
    env = {**os.environ, "WEIGHTSYNC_AGENTS": agents}
    return subprocess.Popen(
        [sys.executable, "-c", code, script], env=env, cwd=directory, text=True, stderr=subprocess.PIPE
    )


def until_exists(*paths: Path) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"{paths} did not come"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_each_agent_gets_its_place_by_environment_and_all_done_is_0(tmp_path: Path) -> None:
    process = start(
        "sender:0@0,receiver:1@1",
        'echo "$WEIGHTSYNC_RANK $CUDA_VISIBLE_DEVICES $WEIGHTSYNC_HTTP_OFFSET" > $WEIGHTSYNC_ROLE',
        tmp_path,
    )
    assert process.wait(WAIT_SECONDS) == 0
    assert (tmp_path / "sender").read_text() == "0 0 0\n"
    assert (tmp_path / "receiver").read_text() == "1 1 1\n"


def test_the_sender_and_the_receivers_of_one_container_run_their_own_programs(tmp_path: Path) -> None:
    write = '["sh", "-c", "echo {} $(WEIGHTSYNC_RANK) $WEIGHTSYNC_HTTP_OFFSET > $WEIGHTSYNC_ROLE"]'
    commands = f'{{"sender": {write.format("trainer")}, "receiver": {write.format("engine")}}}'
    env = {
        **os.environ,
        "WEIGHTSYNC_AGENTS": "sender:0,receiver:1",
        "WEIGHTSYNC_COMMANDS": commands,
        "WEIGHTSYNC_HTTP_OFFSET": "4",
    }
    command = [sys.executable, "-m", "weightsync_agent.main", "launch"]
    assert subprocess.run(command, env=env, cwd=tmp_path, timeout=WAIT_SECONDS).returncode == 0
    assert (tmp_path / "sender").read_text() == "trainer 0 4\n"
    assert (tmp_path / "receiver").read_text() == "engine 1 5\n"


def test_an_agent_that_fails_ends_the_others_and_gives_its_code(tmp_path: Path) -> None:
    script = "if [ $WEIGHTSYNC_RANK = 1 ]; then until [ -e pid-0 ]; do sleep 0.01; done; exit 7; fi;"
    process = start("sender:0,receiver:1", script + "echo $$ > tmp-0; mv tmp-0 pid-0; exec sleep 600", tmp_path)
    assert process.wait(WAIT_SECONDS) == 7
    assert gone(int((tmp_path / "pid-0").read_text()))
    assert process.stderr is not None
    assert "receiver (rank 1) ended with exit code 7: the others end too" in process.stderr.read()


def test_an_agent_that_is_killed_counts_as_failed(tmp_path: Path) -> None:
    script = "if [ $WEIGHTSYNC_RANK = 1 ]; then kill -9 $$; fi; exec sleep 600"
    assert start("sender:0,receiver:1", script, tmp_path).wait(WAIT_SECONDS) == 128 + signal.SIGKILL


def test_sigterm_goes_on_to_every_agent(tmp_path: Path) -> None:
    told = "trap 'echo told > told-$WEIGHTSYNC_RANK; exit 0' TERM"
    script = f"{told}; echo > up-$WEIGHTSYNC_RANK; while :; do sleep 0.05; done"
    process = start("sender:0,receiver:1", script, tmp_path)
    until_exists(tmp_path / "up-0", tmp_path / "up-1")
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_SECONDS) == 0
    assert (tmp_path / "told-0").exists()
    assert (tmp_path / "told-1").exists()


def test_an_agent_that_does_not_heed_sigterm_is_killed(tmp_path: Path) -> None:
    process = start("sender:0", "trap '' TERM; echo $$ > tmp; mv tmp pid; while :; do sleep 0.05; done", tmp_path)
    until_exists(tmp_path / "pid")
    process.send_signal(signal.SIGTERM)
    process.wait(WAIT_SECONDS)
    assert gone(int((tmp_path / "pid").read_text()))
