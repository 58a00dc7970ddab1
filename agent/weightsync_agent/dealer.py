"""The receiver's end of the control wire: one DEALER socket, which connects again and again, and a Hello on each new
connection. No thread: who calls `take` drives it.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping

import zmq
from weightsync_api.agent_config import AgentConfig
from zmq.utils.monitor import recv_monitor_message

from . import protocol, wire
from .errors import Closed

HELLO_SECONDS = 0.01
"""How soon a Hello that did not go out is tried again."""


class Dealer:
    """Connects in the background from the start.

    Args:
        errors: counts words that were not understood, under `protocol`.
        hello: makes the Hello of a connection that begins.
        lost: called when the sender's connection is gone; may raise, which then ends the wait at work.

    Raises:
        ConfigError: a key is missing, or the endpoint is none.
    """

    def __init__(
        self,
        config: AgentConfig,
        errors: Counter[str],
        hello: Callable[[], protocol.Hello],
        lost: Callable[[], None],
    ) -> None:
        self.connected = False
        self.owes_hello = False
        """Every new connection is a sender that may be a new one: Hello goes first on each."""
        self.find: Callable[[], protocol.FromSender | None] | None = None
        """Gives what the sender laid where it is seen sooner than sent (transport/mailbox.py), where there is such."""
        self._errors = errors
        self._hello = hello
        self._lost = lost
        self._hello_after = 0.0
        self._look_until = 0.0
        self._put_back: deque[protocol.FromSender] = deque()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket, self._monitor = wire.connect_dealer(self._context, config.connect, config.curve_dir)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    @property
    def closed(self) -> bool:
        return bool(self._socket.closed)

    @property
    def pending(self) -> bool:
        """A message is there to be taken."""
        return bool(self._put_back) or (not self.closed and wire.readable(self._socket))

    @property
    def event_pending(self) -> bool:
        """A connection began or ended, which the next `take` sees to."""
        return wire.readable(self._monitor)

    @property
    def descriptors(self) -> tuple[int, int]:
        """ZMQ_FD of the socket and of its monitor: edge-triggered, for waiting on alone."""
        return self._socket.getsockopt(zmq.FD), self._monitor.getsockopt(zmq.FD)  # type: ignore[return-value]

    # --- out ----------------------------------------------------------------------------------------------------

    def post(self, message: protocol.Message) -> bool:
        """False when there is no sender to hear it: the next one gets a Hello, and nothing of what was for the last."""
        if not self.connected:
            return False
        try:
            self._socket.send(protocol.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def greet(self) -> None:
        """Says the Hello that is due. The event of a connection comes a moment before the socket can send over it, so
        it is tried until it is out.
        """
        if self.owes_hello and time.monotonic() >= self._hello_after:
            self.owes_hello = not self.post(self._hello())

    def greet_again(self, seconds: float) -> None:
        """Another Hello in so many seconds, unless `offered` comes first."""
        self.owes_hello, self._hello_after = True, time.monotonic() + seconds

    def offered(self) -> None:
        """A new offer came: the Hello that was to ask for one need not go out."""
        if self._hello_after:
            self.owes_hello, self._hello_after = False, 0.0

    # --- in -----------------------------------------------------------------------------------------------------

    def look_for(self, seconds: float) -> None:
        """For so long from now, `take` looks for what the sender laid instead of sleeping, where a core is spare."""
        self._look_until = time.perf_counter() + (seconds if wire.SPARE_CORE else 0)

    def put_back(self, message: protocol.FromSender, *, first: bool = False) -> None:
        """A message that was taken is taken again: before all others, or (`first` False) after those put back."""
        if first:
            self._put_back.appendleft(message)
        else:
            self._put_back.append(message)

    def take(self, timeout: float) -> protocol.FromSender | None:
        """One message, or None after `timeout` seconds. Raises Closed when this end is closed, and what `lost` does."""
        if self.closed:
            raise Closed("this receiver is closed")
        if self._put_back:
            return self._put_back.popleft()
        # The socket first: a message that is there costs no poll.
        frame = self._receive()
        if frame is None and timeout > 0:
            found = self._look()
            if isinstance(found, bytes):
                frame = found
            elif found is not None:
                return found
        if frame is None:
            self.greet()
            timeout = min(timeout, HELLO_SECONDS) if self.owes_hello else timeout
            if timeout > 0:
                self._poller.poll(max(1, round(timeout * 1000)))
            if wire.readable(self._monitor):
                self._connection(recv_monitor_message(self._monitor, zmq.NOBLOCK))
            frame = self._receive()
        if frame is None:
            return None
        try:
            return protocol.decode_from_sender(frame)
        except protocol.ProtocolError as error:
            self._errors["protocol"] += 1
            self.post(protocol.Error(cause=str(error)))
            return None

    def _look(self) -> protocol.FromSender | bytes | None:
        while self.find is not None and time.perf_counter() < self._look_until:
            if (message := self.find()) is not None:
                return message
            if wire.readable(self._socket):
                return self._receive()
            if wire.readable(self._monitor):
                return None
            os.sched_yield()  # the engine's other threads go first; sleeping for 0 s would take 75 us
        return None

    def _receive(self) -> bytes | None:
        if not wire.readable(self._socket):
            return None
        frames = self._socket.recv_multipart(zmq.NOBLOCK)
        return frames[0] if len(frames) == 1 else b""

    def _connection(self, event: Mapping[str, object]) -> None:
        if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.owes_hello, self._hello_after, self.connected = True, 0.0, True
            return
        self.owes_hello = self.connected = False
        self._lost()

    # --- the end ------------------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Says goodbye and gives ZeroMQ's threads back. Once."""
        self.post(protocol.Bye(reason=reason))
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()
