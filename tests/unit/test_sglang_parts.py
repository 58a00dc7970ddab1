"""SGLang's buckets as it cuts them, and what its HTTP client says of a server that refuses, hangs or is none."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
import torch
from moved_promises import other_objects
from transfer import samples
from weightsync_agent.deadline import Deadline
from weightsync_agent.engines.sglang import SGLangSender
from weightsync_agent.engines.sglang_http import SGLangClient
from weightsync_agent.engines.tight_source import TightSource
from weightsync_agent.errors import ConfigError, StepFailed, StepTimeout, TransportError
from weightsync_agent.manifest import Manifest, describe


@pytest.mark.parametrize("bucket_bytes", [1, 5000, 100_000, 1 << 30])
def test_a_bucket_has_no_gaps_and_every_tensor_is_aligned(bucket_bytes: int) -> None:
    weights = samples.mixed(7)
    source = TightSource(weights, bucket_bytes)
    source.attach(torch.empty(source.nbytes, dtype=torch.uint8))
    seen: list[str] = []
    for bucket in range(source.buckets):
        source.pack(bucket)
        packed, place = source.packed(bucket), 0
        for entry in source.entries(bucket):  # as SGLang does it
            assert place % entry.torch_dtype.itemsize == 0
            raw = packed[place : place + entry.nbytes]
            assert bytes(raw.numpy()) == samples.raw_bytes(weights[entry.name])
            place += entry.nbytes
            seen.append(entry.name)
        assert place == packed.numel()
        for name, view in source.views(bucket):
            assert samples.raw_bytes(view) == samples.raw_bytes(weights[name])
    assert sorted(seen) == sorted(set(weights) - {"head"})  # tied to the embedding
    assert source.sent_bytes == source.manifest.nbytes


def test_a_tied_tensor_goes_twice_where_the_engine_has_both_names() -> None:
    weights = samples.mixed(7)
    source = TightSource(weights, 1 << 30)
    source.choose(range(len(weights)))
    source.attach(torch.empty(source.nbytes, dtype=torch.uint8))
    source.pack(0)
    views = dict(source.views(0))
    assert torch.equal(views["head"], views["embedding"])
    assert views["head"].data_ptr() != views["embedding"].data_ptr()


def test_the_buffer_is_large_enough_for_what_is_chosen_later() -> None:
    tied = torch.randn(1000)
    source = TightSource({"a": tied, "b": tied}, 1 << 30)
    source.choose([0, 1])
    used = [sum(entry.nbytes for entry in source.entries(bucket)) for bucket in range(source.buckets)]
    assert sum(used) == 8000
    assert max(used) <= source.nbytes


class Stub(BaseHTTPRequestHandler):
    """A server that is not SGLang, to hear what is said of it."""

    given_up: ClassVar[threading.Event]

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        body = json.loads(self.rfile.read(length))
        if self.path == "/slow":
            self.given_up.wait(120)
        status = int(body.get("status", 200))
        answer = (
            {"success": False, "message": "not today"} if "refuse" in body else {"key": self.headers["Authorization"]}
        )
        self._answer(status, json.dumps(answer).encode())

    def do_GET(self) -> None:
        self._answer(200, b"hello")

    def _answer(self, status: int, text: bytes) -> None:
        with suppress(ConnectionError):  # who asked may have given up
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


class Refusing(Stub):
    """Says what SGLang says of itself, and takes no key for anything else, as one with an --admin-api-key does."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self._answer(200, b'{"model_path": "none"}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append(self.path)
        self._answer(401, b'{"error": "Unauthorized"}')


@contextmanager
def serving(kind: type[Stub]) -> Iterator[str]:
    kind.given_up = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        kind.given_up.set()
        server.shutdown()


@pytest.fixture
def url() -> Iterator[str]:
    with serving(Stub) as found:
        yield found


def test_a_refusal_is_told_in_the_servers_words(url: str) -> None:
    client = SGLangClient(url, api_key="secret")
    for body in ({"refuse": True}, {"refuse": True, "status": 400}):
        with pytest.raises(TransportError, match=r"/begin_weight_update.*not today"):
            client.post("/begin_weight_update", body, Deadline(30))
    assert client.post("/x", {}, Deadline(30)) == {"key": "Bearer secret"}


def test_a_server_that_hangs_is_a_timeout(url: str) -> None:
    with pytest.raises(StepTimeout, match=r"did not answer /slow within 0.2 s"):
        SGLangClient(url).post("/slow", {}, Deadline(0.2))


def test_a_server_that_is_no_sglang_is_told(url: str) -> None:
    with pytest.raises(ConfigError, match="answers like no SGLang server"):
        SGLangSender({"a": torch.ones(3)}, url, expect=Manifest(tensors=())).check()
    with pytest.raises(StepFailed, match="is it running"):
        SGLangSender({"a": torch.ones(3)}, "http://127.0.0.1:9").step()


def test_a_server_that_refuses_its_group_fails_the_step_at_once_in_its_words() -> None:
    weights = {"a": torch.ones(3)}
    with serving(Refusing) as url:
        # Hours: who waited for the server's workers would wait longer than a test may.
        with SGLangSender(weights, url, expect=describe(weights), join_timeout_seconds=36_000) as sender:
            for step in (1, 2):
                with pytest.raises(StepFailed, match=f"step {step} .*_update_group with 401: Unauthorized"):
                    sender.step()
                assert not sender.tainted
        assert Refusing.asked == ["/init_weights_update_group"] * 2
    waiting = [thread for thread in threading.enumerate() if thread.name == "weightsync-group"]
    for thread in waiting:
        thread.join(60)
    assert not any(thread.is_alive() for thread in waiting), "nobody waits for the server's workers any more"


def test_tensors_that_moved_are_packed_from_where_they_are_by_then() -> None:
    weights = samples.mixed(7)
    source = TightSource(weights, 1 << 30)
    other_objects(weights)
    for tensor in weights.values():
        tensor.zero_()
    source.look()
    source.attach(torch.empty(source.nbytes, dtype=torch.uint8))
    source.pack(0)
    assert source.packed(0).numel() == source.sent_bytes
    assert not source.packed(0).any()
