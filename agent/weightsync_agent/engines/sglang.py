"""SGLang's weights, updated through its own HTTP endpoints from a trainer in another process.

Tested with SGLang 0.5.23. It takes a wrong shape with 'Success' and ignores a name that it does not know, so names,
shapes and dtypes are compared before it is asked for anything. Around the bytes: pause, begin, end, the prefix cache
emptied and that checked, the version's label, and on. A step that broke off leaves the engine paused, since its weights
are mixed, until a later step is whole.
"""

from __future__ import annotations

import base64
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

import torch
from weightsync_api.reports import AgentState, ReceiverStep, StepReport
from weightsync_api.v1alpha1.status import MAX_MESSAGE

from ..deadline import Deadline
from ..errors import (
    ConfigError,
    ManifestMismatch,
    SourceError,
    StepFailed,
    StepTimeout,
    TransportError,
    WeightSyncError,
)
from ..manifest import Manifest, TensorEntry, differences, summarize
from ..names import NameRules
from ..sources.checkpoint import CheckpointSource
from ..sources.module import Weights
from .object_wire import dumps_tensors, require_allowed, sharing_by_name
from .sglang_http import PauseMode, ServerInfo, SGLangClient
from .tight_source import TightSource
from .torch_group import TorchGroup

TESTED_VERSION = "0.5.23"
BUCKET_BYTES = 256 << 20

log = logging.getLogger("weightsync.sglang")


class SGLangSender:
    """One SGLang server, a step a call.

    `way="distributed"`: the bytes go by a process group of torch's (gloo from the CPU, NCCL from a GPU other than the
    engine's), and everything else is JSON. `way="tensor"`: by shared memory of one machine, host memory only; its
    handles are objects (`allow_object_wire`). On one GPU with the engine: see docs/engines-sglang.md.
    """

    def __init__(
        self,
        source: Weights,
        url: str,
        *,
        way: Literal["distributed", "tensor"] = "distributed",
        expect: Manifest | Path | None = None,
        pause: PauseMode | None = "retract",
        address: str = "127.0.0.1",
        api_key: str = "",
        allow_object_wire: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: torch.dtype | None = None,
        names: NameRules = (),
        join_timeout_seconds: float = 120.0,
        step_timeout_seconds: float = 300.0,
    ) -> None:
        """`expect`: the engine's tensors, as a manifest or a checkpoint; None: the checkpoint that the server was
        started from, read where it says that it is. `pause`: SGLang's mode around a step; None: requests go on over
        mixed weights. `address`: of this host, for the engine's workers.

        Raises ConfigError, naming the tensor, for weights that can't be sent.
        """
        if way == "tensor":
            require_allowed(allow_object_wire, "SGLang's update_weights_from_tensor")
        self.client = SGLangClient(url, api_key)
        self._way, self._expect, self._pause, self._address = way, expect, pause, address
        self._source = TightSource(source, bucket_bytes, dtype, names)
        if way == "tensor" and self._source.device.type != "cpu":
            raise ConfigError('SGLang takes tensors of a GPU by way="distributed", or by checkpoint-engine\'s protocol')
        self._join_timeout, self._step_timeout = join_timeout_seconds, step_timeout_seconds
        self._pool = ThreadPoolExecutor(1, "weightsync-sglang")
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._group: TorchGroup | None = None
        self._info: ServerInfo | None = None
        self._open = False
        """A begin without its end may stand at the engine."""
        self._halted = False
        """Paused since a step broke off."""
        self._step = 0
        self.tainted = ""
        """Why the engine's weights may be mixed; empty: they are whole."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> ServerInfo:
        """Asks the server who it is and compares the tensors; nothing is changed.

        Raises ManifestMismatch with every difference, ConfigError, TransportError, StepTimeout.
        """
        info = self.client.info(Deadline(self._join_timeout))
        if info.dp_size > 1 or info.pp_size > 1:
            raise ConfigError(
                f"SGLang at {self.client.url} runs with dp_size {info.dp_size} and pp_size {info.pp_size}, and its "
                "weight updates take neither: start one server a replica"
            )
        if info.version and info.version != TESTED_VERSION:
            log.warning("SGLang %s at %s: tested is %s", info.version, self.client.url, TESTED_VERSION)
        if self._info is None or self._info.model_path != info.model_path:
            self._compare(info)
            self._info = info
        return info

    def _compare(self, info: ServerInfo) -> None:
        expected = self._expected(info)
        have = {entry.name for entry in expected.tensors}
        sent = self._source.manifest
        # A tied head that the engine's checkpoint does not name is its embedding there too.
        kept = [i for i, entry in enumerate(sent.tensors) if entry.alias is None or entry.name in have]
        plain = [_plain(sent.tensors[index]) for index in kept]
        if found := differences(Manifest(tensors=tuple(plain)), expected):
            raise ManifestMismatch(f"the weights do not fit SGLang's at {self.client.url}: {summarize(found)}")
        self._source.choose(kept)

    def _expected(self, info: ServerInfo) -> Manifest:
        if isinstance(self._expect, Manifest):
            return self._expect
        path = self._expect or Path(info.model_path)
        try:
            return CheckpointSource(path, watch=False).manifest
        except SourceError as error:
            raise ConfigError(
                f"SGLang at {self.client.url} serves {info.model_path}, whose names and shapes can't be read here "
                f"({error}): pass expect=, a manifest or the path of the same checkpoint"
            ) from None

    # --- a step -------------------------------------------------------------------------------------------------------

    def step(self) -> StepReport:
        """Brings the weights as they are now to the engine; served when it returns.

        Raises ManifestMismatch, ConfigError: nothing was changed. StepFailed: the step broke off; where bytes had
        landed, the engine stays paused (`tainted` says why) until a later step is whole.
        """
        gatherer = self._source.gatherer
        if not gatherer.leads:
            self._source.follow()
            return StepReport(step=0, started_at=datetime.now(UTC), duration_microseconds=0, bytes=0, complete=True)
        try:
            return self._lead()
        finally:
            gatherer.conclude()

    def _lead(self) -> StepReport:
        started_at, began = datetime.now(UTC), time.perf_counter()
        deadline = Deadline(self._step_timeout)
        failure: Exception | None = None
        try:
            info = self.check()
            self._prepare(info)
        except (TransportError, StepTimeout) as error:
            failure = error
        self._step += 1
        if failure is None:
            failure = self._carry(info, deadline)
        report = StepReport(
            step=self._step,
            started_at=started_at,
            duration_microseconds=round((time.perf_counter() - began) * 1e6),
            bytes=self._source.sent_bytes if failure is None else 0,
            receivers=[
                ReceiverStep(
                    rank=1,
                    state=AgentState.SYNCED
                    if failure is None
                    else AgentState.TAINTED
                    if self.tainted
                    else AgentState.LOST,
                    error=str(failure or "")[:MAX_MESSAGE],
                )
            ],
            complete=failure is None,
        )
        if failure is not None:
            raise StepFailed(
                f"step {self._step} to SGLang at {self.client.url} broke off: {failure}", report
            ) from failure
        return report

    def _prepare(self, info: ServerInfo) -> None:
        if self._buffer.numel() != self._source.nbytes:
            self._buffer = torch.empty(self._source.nbytes, dtype=torch.uint8, device=self._source.device)
            if self._way == "tensor":
                with sharing_by_name():
                    self._buffer.share_memory_()  # type: ignore[no-untyped-call]
        self._source.look()
        self._source.attach(self._buffer)
        if self._way == "distributed" and self._group is None:
            self._group = self._join(info)

    def _join(self, info: ServerInfo) -> TorchGroup:
        deadline = Deadline(self._join_timeout)
        backend = "nccl" if self._source.device.type == "cuda" else "gloo"
        group = TorchGroup(self._address, 1 + info.tp_size, backend, deadline, f"weightsync-{secrets.token_hex(6)}")
        asked = self._beside(
            "/init_weights_update_group",
            {
                "master_address": self._address,
                "master_port": group.port,
                "rank_offset": 1,
                "world_size": group.world_size,
                "group_name": group.name,
                "backend": backend,
            },
            deadline,
        )
        try:
            both: list[Future[Any]] = [group.connect(self._source.device), asked]
            wait(both, deadline.remaining, FIRST_COMPLETED)
            if asked.done():
                asked.result()  # a refusal, while the group waits for nobody
            for one in both:
                one.result(max(deadline.remaining, 0.1))
        except BaseException as error:
            group.close()
            if asked.done():
                asked.result()  # its own error tells more
            if isinstance(error, TimeoutError):
                raise StepTimeout(f"the engine did not join the group within {deadline.seconds:.3g} s") from None
            raise
        return group

    def _carry(self, info: ServerInfo, deadline: Deadline) -> Exception | None:
        client = self.client
        paused = False
        try:
            if self._pause is not None:
                client.pause(self._pause, deadline)
                paused = True
            if self._open:
                self._try(lambda: client.post("/end_weight_update", {}, deadline))  # of the step that broke off
                self._open = False
            self._open = True
            client.post("/begin_weight_update", {}, deadline)
            self.tainted = f"step {self._step} is on its way"
            for bucket in range(self._source.buckets):
                self._send(bucket, info, deadline)
            client.post("/end_weight_update", {}, deadline)
            self._open = False
            if self._pause == "in_place":
                log.warning("in_place: requests go on over the old cache, which stays: two policies are mixed in them")
            else:
                client.flush(deadline)
            client.post(
                "/update_weight_version", {"new_version": str(self._step), "abort_all_requests": False}, deadline
            )
            self.tainted = ""
            if paused or self._halted:
                client.resume(deadline)
                self._halted = False
        except Exception as error:  # gathering may raise anything
            self._break_off(error, paused)
            return error
        return None

    def _send(self, bucket: int, info: ServerInfo, deadline: Deadline) -> None:
        self._source.pack(bucket)
        entries = self._source.entries(bucket)
        if not entries:
            return
        if self._way == "tensor":
            with sharing_by_name():
                payload = base64.b64encode(dumps_tensors(self._source.views(bucket))).decode()
            body: dict[str, object] = {"serialized_named_tensors": [payload] * info.tp_size, "flush_cache": False}
            self.client.post("/update_weights_from_tensor", body, deadline)
            return
        assert self._group is not None
        group = self._group
        asked = self._beside(
            "/update_weights_from_distributed",
            {
                "names": [entry.name for entry in entries],
                "dtypes": [entry.dtype for entry in entries],
                "shapes": [list(entry.shape) for entry in entries],
                "group_name": group.name,
                "flush_cache": False,
                "load_format": "flattened_bucket",
            },
            deadline,
        )
        work = group.broadcast(self._source.packed(bucket))
        while not work.is_completed() and not asked.done():
            if deadline.passed:
                raise StepTimeout(f"bucket {bucket}: the engine did not take it within {deadline.seconds:.3g} s")
            time.sleep(0.0005)
        if asked.done():
            asked.result()  # a refusal, while the bytes wait for nobody
        group.finish(work, deadline)
        asked.result(max(deadline.remaining, 0.1))

    def _break_off(self, error: Exception, paused: bool) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        if not self.tainted:
            # Before any byte: the engine serves what it served.
            if paused and not self._halted:
                self._try(lambda: self.client.resume(Deadline(10.0)))
            return
        self.tainted = f"step {self._step} broke off: {type(error).__name__}: {error}"
        self._halted = True
        if not paused:
            self._try(lambda: self.client.pause("retract", Deadline(10.0)))

    @staticmethod
    def _try(action: Callable[[], object]) -> None:
        try:
            action()
        except WeightSyncError as error:
            log.warning("after a step that broke off: %s", error)

    def _beside(self, path: str, body: dict[str, object], deadline: Deadline) -> Future[dict[str, object]]:
        return self._pool.submit(self.client.post, path, body, deadline)

    def close(self) -> None:
        """Leaves the group; the engine keeps its weights. Idempotent."""
        if self._group is not None:
            name = self._group.name
            self._try(lambda: self._destroy(name))
            self._group.close()
            self._group = None
        self._source.detach()
        self._pool.shutdown(wait=False)

    def _destroy(self, name: str) -> None:
        self.client.post("/destroy_weights_update_group", {"group_name": name}, Deadline(10.0))


def _plain(entry: TensorEntry) -> TensorEntry:
    return TensorEntry(name=entry.name, dtype=entry.dtype, shape=entry.shape)
