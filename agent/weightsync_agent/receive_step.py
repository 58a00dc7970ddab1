"""Takes one step in: copy, synchronise, release, verify, ACK. The receiver's counterpart of the Carrier."""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter

from weightsync_api.reports import AgentState

from . import protocol
from .dealer import Dealer
from .digest import first_differences
from .errors import Closed, TransportError, VerifyFailed
from .memory import MemoryMeter
from .receive_channel import ReceiverStepChannel
from .standing import Standing
from .transport.base import ReceiverTransport
from .wire import SPARE_CORE

log = logging.getLogger("weightsync.receiver")

SEEN_SECONDS = 1e-4
"""A sender that is looking takes an Ack in within 30 us."""


class StepReceiver:
    """Drives the transport through each step, in the thread that polls the receiver."""

    def __init__(self, dealer: Dealer, standing: Standing, meter: MemoryMeter, errors: Counter[str]) -> None:
        self.in_step = False
        self.broken = 0
        """Steps that broke off."""
        self.broken_by: type[Exception] | None = None
        """What the last of them raised here: its kind alone, since an error's frames would hold views."""
        self._dealer = dealer
        self._standing = standing
        self._meter = meter
        self._errors = errors

    def receive(self, begin: protocol.Begin, transport: ReceiverTransport) -> int | None:
        """The step's number once it is whole and acknowledged; None where it broke off, and the target is tainted."""
        standing = self._standing
        began = time.perf_counter()
        early: list[protocol.Ack] = []

        def started() -> None:
            self._meter.before()
            if transport.settled and not begin.verify:
                ack = protocol.Ack(step=begin.step, load_microseconds=0, verified=False, memory=self._meter.after())
                transport.lay_ahead(begin.step, protocol.encode(ack))
                early.append(ack)

        channel = ReceiverStepChannel(begin, self._dealer.post, self._dealer.take, started)
        # From here on bytes land: whatever happens, the weights are mixed until the step is whole.
        standing.state, standing.message = AgentState.TAINTED, f"step {begin.step} is on its way"
        self.in_step = True
        try:
            transport.receive(channel)
            channel.received = True
            commit = channel.wait_commit()
            if begin.verify:
                _verify(transport, commit)
        except Closed as closed:
            self._broken(begin.step, Closed, str(closed))
            return None
        except Exception as error:  # an engine's load_weights may raise anything; the sender has to know
            self._errors[_kind(error)] += 1
            cause = f"{type(error).__name__}: {error}"
            # As text: a handler that keeps the record would keep the traceback's frames, and with them the views.
            trace = "".join(traceback.format_exception(error))
            log.error("rank %d: step %d failed: %s", standing.identity.rank, begin.step, trace)
            self._dealer.post(
                protocol.Error(step=begin.step, bucket=channel.bucket, received=channel.received, cause=cause[:65536])
            )
            self._broken(begin.step, type(error), cause)
            return None
        finally:
            self.in_step = False
        took = round((time.perf_counter() - began) * 1e6)
        laid = bool(early) and transport.confirm(took)
        if early:
            ack = early[0].model_copy(update={"load_microseconds": took})
        else:
            ack = protocol.Ack(
                step=begin.step, load_microseconds=took, verified=begin.verify, memory=self._meter.after()
            )
        if not laid:
            transport.lay(protocol.encode(ack))
        standing.memory = ack.memory
        standing.state, standing.message, standing.step = AgentState.SYNCED, "", begin.step
        if not _seen(transport):
            self._dealer.post(ack)
        return begin.step

    def _broken(self, step: int, kind: type[Exception], cause: str) -> None:
        self.broken += 1
        self.broken_by = kind
        self._standing.memory = self._meter.after()
        self._standing.message = f"step {step} broke off: {cause}"


def _verify(transport: ReceiverTransport, commit: protocol.Commit) -> None:
    mine = transport.digests()
    if mine != commit.digests:
        names = [entry.name for entry in transport.manifest.tensors]
        differing = first_differences(mine, commit.digests, names)
        raise VerifyFailed(f"the bytes of {', '.join(differing)} differ from the sender's")


def _kind(error: Exception) -> str:
    """As the metrics count it."""
    if isinstance(error, VerifyFailed):
        return "verify"
    return "transport" if isinstance(error, TransportError) else "load"


def _seen(transport: ReceiverTransport) -> bool:
    """Whether the sender was looking where the Ack was laid."""
    until = time.perf_counter() + SEEN_SECONDS if SPARE_CORE else 0.0
    while time.perf_counter() < until:
        if transport.taken():
            return True
    return False
