"""A process group of our own beside the engine's, as SGLang makes it: rank 0 here, the engine's workers from rank 1.

The recipe (torch's rendezvous at tcp://, a PrefixStore of the group's name, then torch's own maker of groups) is that
of SGLang 0.5.23's `init_custom_process_group` (srt/utils/common.py), which many trainers use; both ends must agree on
it, so torch's private function is called here, in one place.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from ..deadline import Deadline
from ..errors import StepTimeout, TransportError


class TorchGroup:
    """Made once for its members, thrown away when a step breaks off in it."""

    def __init__(self, address: str, world_size: int, backend: str, deadline: Deadline, name: str) -> None:
        """`address`: of this host, that the engine reaches. Raises TransportError where it can't be listened on."""
        self.name, self.backend, self.world_size = name, backend, world_size
        self._group: Any = None
        self._closed = False
        self._lock = threading.Lock()
        self._timeout = timedelta(seconds=max(deadline.remaining, 1.0))
        try:
            self._server: Any = self._store(address, 0, is_master=True)
            self.port = int(self._server.port)
            # A store of its own for the group: when the server goes, torch's wait for the members ends at once.
            self._client: Any = self._store(address, self.port, is_master=False)
        except RuntimeError as error:
            raise TransportError(f"can't listen on {address} for the engine's workers: {_first(error)}") from None

    def _store(self, address: str, port: int, is_master: bool) -> TCPStore:
        return TCPStore(address, port, self.world_size, is_master, timeout=self._timeout, wait_for_workers=False)

    def connect(self, device: torch.device) -> Future[None]:
        """Begins, in a thread: torch waits until all are in, or `close`. The Future raises TransportError."""
        connected: Future[None] = Future()
        threading.Thread(target=self._connect, args=(device, connected), name="weightsync-group", daemon=True).start()
        return connected

    def _connect(self, device: torch.device, connected: Future[None]) -> None:
        make: Any = c10d._new_process_group_helper
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a thread begins on GPU 0
            group, _ = make(
                self.world_size,
                0,
                [],
                c10d.Backend(self.backend),
                PrefixStore(self.name, self._client),
                group_name=self.name,
                backend_options=None,
                timeout=self._timeout,
                device_id=device if device.type == "cuda" else None,
            )
            c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(self.world_size)}
        except Exception as error:
            cause = TransportError(f"the group of trainer and engine was not made: {_first(error)}")
            connected.set_exception(cause)
            return
        with self._lock:
            self._group = group
        if self._closed:
            self.close()
        connected.set_result(None)

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Begins; gives torch's Work."""
        return dist.broadcast(tensor, 0, group=self._group, async_op=True)

    def finish(self, work: Any, deadline: Deadline) -> None:
        """Raises TransportError, StepTimeout."""
        while not work.is_completed():
            if deadline.passed:
                raise StepTimeout(f"the engine's workers did not take the bytes within {deadline.seconds:.3g} s")
            time.sleep(0.0005)
        try:
            work.wait()
        except RuntimeError as error:
            raise TransportError(f"the bytes did not reach the engine's workers: {_first(error)}") from None

    def close(self) -> None:
        """In a thread: where a member is gone, torch may take its time. Idempotent."""
        with self._lock:
            self._closed = True
            group, server = self._group, self._server
            self._group = self._server = self._client = None
        if group is not None:
            threading.Thread(target=_destroy, args=(group, server), name="weightsync-group-end", daemon=True).start()


def _destroy(group: Any, server: Any) -> None:
    try:
        dist.destroy_process_group(group)
    except Exception:  # the group is given up either way
        return
    finally:
        del server  # NCCL's own threads look into it until here


def _first(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
