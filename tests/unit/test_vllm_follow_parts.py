"""What of a vLLM server's follower needs no vLLM: its refusals, the server's end, and the guard of its routes."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from loopback import addresses
from weightsync_agent.engines.vllm_follow import follow
from weightsync_agent.engines.vllm_guard import GUARD, GUARD_PATH, LocalOnly
from weightsync_agent.engines.vllm_worker import WorkerReport, checked
from weightsync_agent.errors import ConfigError, TransportError
from weightsync_api.agent_config import ENV_CONFIG, ENV_RANK, AgentConfig

PORT = 8000
UNGUARDED = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An address with nobody else at it; this process is rank 1 of 3."""
    config = AgentConfig.model_validate(
        {"namespace": "n", "name": "w", "device": "CPU", "transport": "IPC", "receivers": 3, "bucketBytes": 4096}
        | {"bind": f"ipc://{tmp_path}/c", "connect": f"ipc://{tmp_path}/c", "runtimeDir": str(tmp_path)}
    )
    (tmp_path / "agent.json").write_text(config.model_dump_json())
    monkeypatch.setenv(ENV_CONFIG, str(tmp_path / "agent.json"))
    monkeypatch.setenv(ENV_RANK, "1")
    return next(addresses)


def refused(
    kind: type[Exception], said: str, command: list[str], host: str, workers: int = 1, start: float = 120
) -> None:
    with pytest.raises(kind, match=said):
        follow(command, f"http://{host}:{PORT}", workers, start)


def test_a_senders_rank_and_workers_that_do_not_divide_are_refused(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(ConfigError, "3 receivers, which engines of 2 workers can't share out", [], host, workers=2)
    monkeypatch.setenv(ENV_RANK, "0")
    refused(ConfigError, "rank 0 is the sender's", [], host)


def test_a_server_that_does_not_start_is_told_at_once(host: str) -> None:
    refused(ConfigError, "'no-such-program' can't be started: No such file", ["no-such-program"], host)
    refused(TransportError, "the engine has ended with exit code 3", [sys.executable, "-c", "exit(3)"], host)


def test_a_server_that_never_answers_is_given_up_at_the_deadline(host: str) -> None:
    refused(TransportError, f"no engine answers at http://{host}:{PORT} within 0.2 s", [], host, start=0.2)


def test_a_server_that_was_not_given_the_guard_is_not_followed_and_ends(host: str) -> None:
    refused(ConfigError, f"--middleware {GUARD}", [sys.executable, "-c", UNGUARDED, host, str(PORT)], host)
    with socket.socket() as probe:
        assert probe.connect_ex((host, PORT)) != 0


def status(path: str, client: tuple[str, int] | None, **more: Any) -> int:
    """Through the guard; 299: the server's own answer."""
    found: list[int] = []

    async def app(*_: Any) -> None:
        found.append(299)

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    async def send(message: Any) -> None:
        found.extend(message[key] for key in ("status", "code") if key in message)

    scope = {"type": "http", "path": path, "client": client, **more}
    asyncio.run(LocalOnly(app)(scope, receive, send))
    return found[0]


ELSEWHERE = ("10.0.0.7", 4000)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/health", "/metrics"])
def test_from_elsewhere_what_a_server_is_for_is_let_through(path: str) -> None:
    assert status(path, ELSEWHERE) == 299


@pytest.mark.parametrize("path", ["/collective_rpc", "/pause", "/v1", "/health/../pause", "//pause", "/", GUARD_PATH])
def test_from_elsewhere_all_else_is_refused(path: str) -> None:
    assert status(path, ELSEWHERE) == 403
    assert status(path, None) == status(path, ("127.0.0.6", 1)) == 403  # of a proxy in the pod
    assert status(f"/root{path}", ELSEWHERE, root_path="/root") == 403
    assert status(path, ELSEWHERE, type="websocket") == 1008


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_from_here_everything_is_let_through(host: str) -> None:
    assert status("/collective_rpc", (host, 1)) == 299
    assert status(GUARD_PATH, (host, 1)) == 200


def test_the_servers_log_has_the_calls_of_users_and_those_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    status("/health", None)  # a guard is made
    log = logging.getLogger("uvicorn.access")
    with caplog.at_level(logging.INFO, log.name):
        for path, code in (("/collective_rpc", 200), ("/collective_rpc", 500), ("/v1/completions", 200)):
            log.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:4000", "POST", path, "1.1", code)
        log.info("without arguments")
    said = [record.getMessage().partition('"POST ')[2] for record in caplog.records]
    assert said == ['/collective_rpc HTTP/1.1" 500', '/v1/completions HTTP/1.1" 200', ""]


def test_one_worker_that_failed_fails_the_call_once_all_have_answered() -> None:
    fine, failed = WorkerReport(rank=1, state="Synced"), WorkerReport(rank=0, state="", error="rank 2: it broke off")
    assert checked([fine.model_dump()]) == [fine.model_dump()]
    with pytest.raises(TransportError, match="rank 2: it broke off"):
        checked([fine.model_dump(), failed.model_dump()])
