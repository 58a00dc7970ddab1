"""One recorded launch, replayed by one call of the driver: no look-up, no packing of arguments, whatever was cold."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from .driver import bind, bindings, call, check, function, on

log = logging.getLogger(__name__)


class RecordedLaunch:
    """What `queue` puts on a stream, recorded once as a CUDA graph. Everything that it uses must stay."""

    def __init__(self, queue: Callable[[torch.cuda.Stream], None], device: torch.device) -> None:
        """Records; nothing runs. `queue` must neither wait nor allocate. Raises DriverError, and what that raises."""
        driver = bindings()
        self._device = device
        self._launch = function("cuGraphLaunch")
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with on(device):
            # Relaxed, and on a stream of its own: other threads and streams go on as ever.
            mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            call("cuStreamBeginCapture", stream.cuda_stream, mode)
            try:
                queue(stream)
            finally:
                graph = call("cuStreamEndCapture", stream.cuda_stream)
            try:
                self._graph = call("cuGraphInstantiate", graph, 0)
            finally:
                call("cuGraphDestroy", graph)
            # The first launch would do this, and allocate.
            call("cuGraphUpload", self._graph, stream.cuda_stream)
            stream.synchronize()

    def run(self, stream: torch.cuda.Stream) -> None:
        """Queues it on `stream`. Raises DriverError."""
        bind(self._device)
        check(self._launch(self._graph, stream.cuda_stream), "cuGraphLaunch")

    def __del__(self) -> None:
        graph = getattr(self, "_graph", None)
        if graph is not None:
            try:
                call("cuGraphExecDestroy", graph)
            except Exception as error:  # at the interpreter's end the driver may be gone already
                log.debug("a recorded launch was not given back: %s", error)
