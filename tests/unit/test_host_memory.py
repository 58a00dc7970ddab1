"""Shared host memory: two processes see the same bytes, nothing has a name, and a kept view is always found."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator

import pytest
import torch
from weightsync_agent.errors import TransportError, ViewsRetained
from weightsync_agent.host_memory import ControlPage, HostMemory


def test_new_memory_is_zero_and_holds_what_is_written() -> None:
    with HostMemory.create(10_000) as memory:
        assert memory.tensor().shape == (10_000,)
        assert not memory.tensor().any()
        memory.tensor()[9_999] = 7
        assert memory.tensor()[9_999] == 7


def test_another_process_reads_and_writes_the_same_bytes() -> None:
    program = textwrap.dedent(
        """
        import socket, sys
        from weightsync_agent.host_memory import ControlPage, HostMemory
        ours = socket.socket(fileno=int(sys.argv[1]))
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
        memory = HostMemory.map(fds[0], 1 << 20)
        tensor = memory.tensor()
        assert tensor[:4].tolist() == [1, 2, 3, 4]
        tensor[-4:] = 9
        ControlPage(memory)[10] = 0
        memory.close()
        """
    )
    ours, theirs = socket.socketpair()
    with ours, theirs, HostMemory.create(1 << 20) as memory:
        memory.tensor()[:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
        page = ControlPage(memory)
        page[10] = 1
        socket.send_fds(ours, [b"x"], [memory.fd])
        arguments = [sys.executable, "-c", program, str(theirs.fileno())]
        subprocess.run(arguments, pass_fds=[theirs.fileno()], check=True, timeout=280)
        assert memory.tensor()[-4:].tolist() == [9, 9, 9, 9]
        assert page[10] == 0


def test_a_killed_process_leaves_nothing_in_the_file_system() -> None:
    program = textwrap.dedent(
        """
        from weightsync_agent.host_memory import HostMemory
        memory = HostMemory.create(1 << 20, "left-behind")
        print("ready", flush=True)
        input()
        """
    )

    def named() -> set[str]:
        found = {os.path.join("/dev/shm", name) for name in os.listdir("/dev/shm")}
        return {path for path in found if "left-behind" in path}

    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    target = os.readlink(next(_memfds(child.pid, "left-behind")))
    assert target.endswith("(deleted)")  # even while it lives
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=60)
    assert not named()


def _memfds(pid: int | str, name: str) -> Iterator[str]:
    for fd in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{fd}"
        with contextlib.suppress(FileNotFoundError):  # another thread's, or that of the listing itself
            if f"memfd:{name}" in os.readlink(path):
                yield path


def test_a_window_that_was_dropped_ends_well() -> None:
    with HostMemory.create(4096) as memory:
        window = memory.window()
        assert memory.views_alive()
        del window
        assert not memory.views_alive()
        memory.end_window()


@pytest.mark.parametrize(
    "keep",
    [
        lambda t: t,
        lambda t: t[3:5],
        lambda t: t.view(torch.bfloat16).view(32, 64)[3:, :5],
        lambda t: torch.nn.Parameter(t.view(torch.float32)),
        lambda t: t.detach(),
        lambda t: t.view(torch.int32)[::2].t().numpy(),
        lambda t: t.untyped_storage(),
        lambda t: memoryview(t.numpy()),
        lambda t: [{"deep": (t.unbind(0)[17],)}],
        lambda t: torch.utils.dlpack.to_dlpack(t),
        lambda t: t.view(torch.float32).requires_grad_().view(-1)[::2].pow(2),  # autograd saved it
    ],
)
def test_a_kept_view_of_any_kind_is_found(keep) -> None:  # type: ignore[no-untyped-def]
    with HostMemory.create(4096) as memory:
        kept = keep(memory.window())
        with pytest.raises(ViewsRetained, match="outlived the load"):
            memory.end_window()
        with pytest.raises(ViewsRetained):  # not forgotten at the next step
            memory.end_window()
        del kept
        memory.end_window()


def test_a_clone_is_no_view() -> None:
    with HostMemory.create(4096) as memory:
        kept = [memory.window().clone(), memory.window().view(torch.float32) + 1, memory.window().sum()]
        memory.end_window()
        assert len(kept) == 3


def test_a_part_is_handed_out_at_its_place() -> None:
    with HostMemory.create(4096) as memory:
        memory.window(256, 3)[:] = 5
        memory.end_window()
        assert memory.tensor().nonzero().flatten().tolist() == [256, 257, 258]
        for start, nbytes in ((-1, 4), (0, 0), (4000, 97), (5000, 1)):
            with pytest.raises(ValueError, match="not within"):
                memory.window(start, nbytes)


def test_closing_under_a_living_view_leaves_it_readable() -> None:
    memory = HostMemory.create(1 << 16)
    kept = memory.window()
    kept[:] = 3
    memory.close()
    memory.close()
    assert int(kept.sum()) == 3 * (1 << 16)
    with pytest.raises(TransportError, match="closed"):
        memory.tensor()
    with pytest.raises(TransportError, match="closed"):
        _ = memory.fd


def test_descriptors_and_mappings_come_back() -> None:
    def held() -> tuple[int, int]:
        with open("/proc/self/maps") as maps:
            return len(list(_memfds("self", "back"))), sum("memfd:back" in line for line in maps)

    for _ in range(10):
        memory = HostMemory.create(1 << 16, "back")
        other = HostMemory.map(os.dup(memory.fd), 1 << 16)
        other.tensor()[0] = 1
        memory.close()
        other.close()
    assert held() == (0, 0)


def test_a_descriptor_smaller_than_offered_is_refused_and_closed() -> None:
    with HostMemory.create(4096) as memory:
        fd = os.dup(memory.fd)
        with pytest.raises(TransportError, match=r"has 4096 bytes, and its offer says 8192"):
            HostMemory.map(fd, 8192)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_memory_that_its_owner_could_shrink_is_refused() -> None:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(TransportError, match="not sealed"):
        HostMemory.map(fd, 4096)
    with tempfile.TemporaryFile() as file:
        file.truncate(4096)
        with pytest.raises(TransportError, match="no shared host memory"):
            HostMemory.map(os.dup(file.fileno()), 4096)


def test_our_own_memory_cannot_be_shrunk() -> None:
    with HostMemory.create(4096) as memory, pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 1)


def test_a_size_of_nothing_is_refused() -> None:
    with pytest.raises(TransportError, match="above 0"):
        HostMemory.create(0)


def test_more_than_the_machine_has_is_an_error_and_not_a_signal() -> None:
    with pytest.raises(TransportError, match="can't make"):
        HostMemory.create(1 << 62)


def test_pages_are_resident_before_the_first_step() -> None:
    size = 8 << 20
    with HostMemory.create(size, "resident") as memory:
        assert _resident_kib("memfd:resident") >= size >> 10
        with HostMemory.map(os.dup(memory.fd), size):
            assert _resident_kib("memfd:resident") >= 2 * size >> 10


def _resident_kib(name: str) -> int:
    found, inside = 0, False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            if "-" in line.split(" ", 1)[0]:
                inside = name in line
            elif inside and line.startswith("Rss:"):
                found += int(line.split()[1])
    return found


def _release(fd: int, counted: multiprocessing.connection.Connection) -> None:
    memory = HostMemory.map(fd, 4096)
    page = ControlPage(memory)
    counted.send(page[3])
    page[3] = 0
    memory.close()


def test_an_export_counter_returns_to_zero_when_the_importer_releases() -> None:
    with HostMemory.create(4096) as memory:
        page = ControlPage(memory)
        assert len(page) == 1024
        page.fill(0)
        page[3] = 1
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        child = context.Process(target=_release, args=(os.dup(memory.fd), theirs))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert ours.recv() == 1
        assert page[3] == 0
        assert page[2] == 0
        page[3] = 0xFFFFFFFF
        assert page[3] == 0xFFFFFFFF
