"""Descriptors over a Unix socket: for who shows the token, once, whatever others do on that socket."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator

import pytest
from weightsync_agent.deadline import Deadline
from weightsync_agent.errors import TransportError
from weightsync_agent.transport.descriptors import DescriptorServer, fetch_descriptors


@pytest.fixture
def server() -> Iterator[DescriptorServer]:
    with tempfile.TemporaryDirectory(prefix="ws-") as directory:
        made = DescriptorServer(directory)
        yield made
        made.close()


@pytest.fixture
def pipe_end() -> Iterator[int]:
    reader, writer = os.pipe()
    os.write(writer, b"weights")
    os.close(writer)
    yield reader
    os.close(reader)


def test_token_fetches_its_descriptors_once(server: DescriptorServer, pipe_end: int) -> None:
    token = server.lay_out([pipe_end])
    (fetched,) = fetch_descriptors(server.path, token, 1, Deadline(60))
    assert fetched != pipe_end
    assert os.read(fetched, 100) == b"weights"
    os.close(fetched)
    with pytest.raises(TransportError, match="refused"):
        fetch_descriptors(server.path, token, 1, Deadline(60))


@pytest.mark.parametrize("token", ["0" * 64, "short", ""])
def test_wrong_token_fetches_nothing(token: str, server: DescriptorServer, pipe_end: int) -> None:
    server.lay_out([pipe_end])
    with pytest.raises(TransportError):
        fetch_descriptors(server.path, token, 1, Deadline(60))


def test_withdrawn_token_fetches_nothing(server: DescriptorServer, pipe_end: int) -> None:
    token = server.lay_out([pipe_end])
    server.withdraw(token)
    with pytest.raises(TransportError):
        fetch_descriptors(server.path, token, 1, Deadline(60))


def test_silent_and_trickling_peers_hold_nobody_up_for_long(server: DescriptorServer, pipe_end: int) -> None:
    token = server.lay_out([pipe_end])
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as trickling:
        silent.connect(server.path)
        trickling.connect(server.path)
        trickling.sendall(b"0")
        (fetched,) = fetch_descriptors(server.path, token, 1, Deadline(60))
    os.close(fetched)


def test_count_that_differs_is_refused_and_closes_what_came(server: DescriptorServer, pipe_end: int) -> None:
    token = server.lay_out([pipe_end])
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportError, match="passed 1 descriptors"):
        fetch_descriptors(server.path, token, 2, Deadline(60))
    deadline = Deadline(60)
    while len(os.listdir("/proc/self/fd")) > before:  # the server's thread closes its end a moment later
        assert not deadline.passed, "a descriptor was left open"
        time.sleep(0.01)
