"""Carries one step through: Begin, buckets, Commit, ACKs; and breaks off what can't be completed."""

from __future__ import annotations

import time
from collections import Counter

from weightsync_api.agent_config import AgentConfig
from weightsync_api.reports import AgentState
from weightsync_api.v1alpha1.spec import VerifyMode

from . import protocol
from .addresses import Addresses
from .errors import StepTimeout, TransportError
from .manifest import Manifest
from .memory import MemoryMeter
from .router import Router
from .send_channel import StepChannel
from .transport.base import SenderTransport

BROKEN_OFF = "the step was broken off"


class Carrier:
    """Drives the transport through each step, in the thread that calls `step()`, under the router's lock."""

    def __init__(
        self,
        config: AgentConfig,
        manifest: Manifest,
        transport: SenderTransport,
        addresses: Addresses,
        meter: MemoryMeter,
        router: Router,
        errors: Counter[str],
    ) -> None:
        self._config = config
        self._manifest = manifest
        self._transport = transport
        self._addresses = addresses
        self._meter = meter
        self._router = router
        self._errors = errors
        self._foretold: tuple[protocol.Begin, bytes] | None = None
        """The next step's Begin and its frame, as laid ahead."""
        self._group: tuple[int, ...] = ()
        self._epoch = 0

    @property
    def checks_late(self) -> bool:
        """`carry` looks itself whether tensors moved, while the receivers copy. Otherwise it is to be done before."""
        return self._transport.overlaps and self._addresses.many

    def carry(self, channel: StepChannel) -> None:
        """Until every receiver has acknowledged or left the step.

        Raises TransportError, StepTimeout; ConfigError where tensors were resized; with `checks_late` Moved, or
        ConfigError, where they moved.
        """
        config, transport, step = self._config, self._transport, channel.step
        if not transport.overlaps:
            self._meter.before()
        verify = config.verify.mode == VerifyMode.DIGEST and (
            step % config.verify.every_steps == 0 or any(not p.verified_once for p in channel.members.values())
        )
        channel.verify = verify
        digests = b""
        if transport.overlaps and not verify:
            # Written while the trainer's last kernels still run: what comes after the fence, the receivers wait for.
            begin, frame = self._ready(channel)
            transport.fence()
            transport.open_step(step)
        else:
            transport.fence()
            if transport.collective:
                self._regroup(channel)
            transport.open_step(step)
            digests = transport.digests() if verify and transport.whole else b""
            begin = self._begin(channel, digests)
            frame = protocol.encode(begin)
        for rank in channel.ranks:
            transport.lay(rank, frame)
        channel.begin(begin)
        channel.when_started = lambda: self._meanwhile(channel, begin)
        if transport.whole:
            channel.started()
        else:
            if not transport.overlaps:
                self._addresses.check_sizes(BROKEN_OFF)
            transport.send(channel)
            digests = transport.digests() if verify else b""
        if not begin.whole:
            channel.post(protocol.Commit(step=step, digests=digests))
        channel.committed_at = time.perf_counter()
        channel.wait_acks(channel.deadline.earlier(config.ack_timeout_seconds))

    def _meanwhile(self, channel: StepChannel, begin: protocol.Begin) -> None:
        """What nobody waits for, since the step's copies run. Raises Moved, ConfigError."""
        if self.checks_late:
            self._addresses.check(BROKEN_OFF)
        self._addresses.check_sizes(BROKEN_OFF)
        # Nothing was allocated since the step began, and nothing will be.
        self._meter.before()
        channel.memory = self._meter.after()
        update = {
            "step": begin.step + 1, "verify": False, "whole": self._needs_no_commit(verify=False), "digests": b"",
            "timeout_seconds": self._config.step_timeout_seconds,
        }  # fmt: skip
        following = begin.model_copy(update=update)
        self._foretold = following, protocol.encode(following)
        for rank in channel.ranks:
            self._transport.lay_ahead(rank, following.step, self._foretold[1])

    def _ready(self, channel: StepChannel) -> tuple[protocol.Begin, bytes]:
        """This step's Begin and its frame: those that were laid ahead, if they say how it is now."""
        foretold, self._foretold = self._foretold, None
        if (
            foretold is not None
            and foretold[0].step == channel.step
            and foretold[0].whole == self._needs_no_commit(channel.verify)
            and foretold[0].flag_base == self._transport.flag_base
            and channel.deadline.remaining > 0.9 * foretold[0].timeout_seconds
        ):
            return foretold
        begin = self._begin(channel)
        return begin, protocol.encode(begin)

    def _begin(self, channel: StepChannel, digests: bytes = b"") -> protocol.Begin:
        whole = self._needs_no_commit(channel.verify)
        return protocol.Begin(
            step=channel.step,
            manifest_hash=self._manifest.hash,
            verify=channel.verify,
            whole=whole,
            digests=digests if whole else b"",
            flag_base=self._transport.flag_base,
            timeout_seconds=max(channel.deadline.remaining, 0.001),
        )

    def _needs_no_commit(self, verify: bool) -> bool:
        if self._transport.whole:
            return not self.checks_late
        return not (self._transport.commits or verify)

    def _regroup(self, channel: StepChannel) -> None:
        """Makes the collective's group anew where its members changed or the last step broke in it.

        A receiver that is lost while the group is made leaves the step, and the others make another group.
        """
        deadline = channel.deadline.earlier(self._config.join_timeout_seconds)
        while (ranks := (0, *sorted(channel.ranks))) != self._group or self._transport.needs_regroup:
            if len(ranks) == 1:
                raise TransportError(f"step {channel.step}: every receiver was lost while the group was made")
            self._group = ()
            self._epoch += 1

            def check(ranks: tuple[int, ...] = ranks) -> None:
                channel.alive()
                if (0, *sorted(channel.ranks)) != ranks:
                    raise TransportError(f"step {channel.step}: a receiver was lost while the group was made")

            invitation = self._transport.regroup(self._epoch, ranks, deadline.remaining)
            channel.post(invitation)
            try:
                check()
                self._transport.connect(invitation, deadline, check)
                channel.wait_regrouped(self._epoch, deadline)
                check()
            except TransportError:
                self._transport.needs_regroup = True
                if (0, *sorted(channel.ranks)) == ranks:
                    raise
            else:
                self._group = ranks

    def break_off(self, channel: StepChannel, error: TransportError | StepTimeout) -> None:
        """The step can't be completed: those who have not acknowledged are told to drop it, and are tainted."""
        self.drop(channel, str(error))
        self._errors["timeout" if isinstance(error, StepTimeout) else "transport"] += 1

    def drop(self, channel: StepChannel, cause: str) -> None:
        """As `break_off`, where nothing is wrong: the step comes again."""
        # First in shared memory, where it can't be late: the trainer may write as soon as step() returns.
        self._transport.close_step()
        self._router.take_all()
        for rank in channel.ranks:
            if rank not in channel.acks:
                self._router.post(channel.members[rank], protocol.Abort(step=channel.step, cause=cause[:4096]))
                channel.fail(rank, AgentState.TAINTED, cause)
        if self._transport.collective:
            self._transport.needs_regroup = True
