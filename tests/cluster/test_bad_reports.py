"""A pod that answers nonsense, for another WeightSync, or without end: it is not believed, and a condition says why."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil
import pytest
from control_plane import ControlPlane, Tree
from loopback import addresses
from operator_process import MEMORY, OperatorProcess, eventually, manifest, run_pods
from weightsync_api.reports import AgentReport, AgentState, ReceiverStep, Report, StepReport
from weightsync_operator.plan import HTTP_PORT

ENDLESS = b"endless"
EARLIER = "00000000-0000-0000-0000-000000000000"
"""UID of a WeightSync of the same name that is gone."""


class Liar:
    """What listens where the sender's pod should be; `body` is what it answers."""

    def __init__(self) -> None:
        self.address = next(addresses)
        self.body = b""
        liar = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                try:
                    self.wfile.write(liar.body)
                    while liar.body is ENDLESS:
                        self.wfile.write(b"[" * (1 << 16))
                except OSError:
                    pass  # it has had enough

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((self.address, HTTP_PORT), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.body = b""
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def liar() -> Iterator[Liar]:
    made = Liar()
    yield made
    made.close()


def honest(namespace: str, uid: str = "", **changed: Any) -> Report:
    row = ReceiverStep(rank=1, state=AgentState.SYNCED, ack_microseconds=800, memory=MEMORY)
    step = StepReport(
        step=1, started_at=datetime.now(UTC), duration_microseconds=1, bytes=1, receivers=[row], complete=True
    )
    agents = [AgentReport(rank=rank, state=AgentState.SYNCED, step=1, memory=MEMORY) for rank in (0, 1)]
    fields: Tree = {"namespace": namespace, "name": "demo", "uid": uid, "session": "s", "agents": agents}
    return Report(**(fields | {"steps": [step]} | changed))


def test_what_is_no_report_of_this_weightsync_is_told_and_changes_nothing(
    cluster: ControlPlane, namespace: str, liar: Liar
) -> None:
    def ready(name: str = "demo") -> tuple[str, str, str]:
        tree = cluster.get("weightsync", name, namespace)
        found = (tree or {}).get("status", {}).get("conditions", [])
        return next(((c["status"], c["reason"], c["message"]) for c in found if c["type"] == "Ready"), ("", "", ""))

    def until(says: str) -> Callable[[], bool]:
        return lambda: ready()[1] == "ReportRefused" and says in ready()[2]

    text = honest(namespace).model_dump_json(by_alias=True)
    with OperatorProcess(cluster, "-n", namespace, "--status-interval", "0") as operator:
        assert cluster.apply(manifest(), namespace).returncode == 0
        eventually(lambda: len(cluster.list("pods", namespace)) == 2)
        liar.body = honest(namespace, name="other").model_dump_json(by_alias=True).encode()
        run_pods(cluster, namespace, liar)
        eventually(until(f"it reports for WeightSync {namespace}/other"))
        liar.body = (
            honest(namespace, uid="00000000-0000-0000-0000-000000000000").model_dump_json(by_alias=True).encode()
        )
        eventually(until("(UID 00000000-0000-0000-0000-000000000000), not for this one"))
        liar.body = b"<html>a web page</html>"
        eventually(until("answered no report"))
        liar.body = json.dumps(json.loads(text) | {"steps": [{"step": 10**30}]}).encode()
        eventually(until("answered no report: steps.0.step"))
        liar.body = text.replace('"agents":[', '"agents":[' + '{"rank":1},' * 200_000).encode()
        eventually(until("answered with more than"))
        liar.body = ENDLESS
        eventually(until("too many for its receivers"))
        tree = cluster.get("weightsync", "demo", namespace)
        assert tree is not None
        assert tree["status"]["step"] == 0
        assert psutil.Process(operator.process.pid).memory_info().rss < 250 << 20
        # The others don't notice, and neither does it once its sender tells the truth.
        assert cluster.apply(manifest("other"), namespace).returncode == 0
        eventually(lambda: ready("other")[0] == "False")
        liar.body = text.encode()
        eventually(lambda: ready()[:2] == ("True", "Synced"))
