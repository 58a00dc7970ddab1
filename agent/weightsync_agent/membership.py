"""A receiver's place at its sender: it takes an offer of memory up, follows into new groups, and leaves."""

from __future__ import annotations

import logging
import time
from collections import Counter

import torch
from weightsync_api.agent_config import AgentConfig
from weightsync_api.reports import AgentState

from . import protocol
from .collector import held_back
from .deadline import Deadline
from .dealer import Dealer
from .errors import Closed, ManifestMismatch, Refused, SelfTestFailed, TransportError, WeightSyncError
from .manifest import Manifest
from .standing import Standing
from .targets import Target
from .transport import receiver_transport
from .transport.base import ReceiverTransport

log = logging.getLogger("weightsync.receiver")

JOIN_AGAIN_SECONDS = 2.0


class Membership:
    """What was joined: a session's manifest, and the transport over the memory that the sender offered."""

    def __init__(
        self,
        config: AgentConfig,
        target: Target,
        device: torch.device,
        standing: Standing,
        dealer: Dealer,
        errors: Counter[str],
    ) -> None:
        self.manifest: Manifest | None = None
        """Kept from one session to the next, which mostly has the same."""
        self.transport: ReceiverTransport | None = None
        self.session = ""
        self.route = ""
        self.begun = 0
        """The last step that began with this sender, whole or not."""
        self.failure: WeightSyncError | None = None
        """Why this receiver can't be a member, for good."""
        self._config = config
        self._target = target
        self._device = device
        self._standing = standing
        self._dealer = dealer
        self._errors = errors

    @property
    def owned_bytes(self) -> int:
        """Bytes of memory that the transport allocated outside torch's allocator."""
        return self.transport.owned_bytes if self.transport else 0

    def covers(self, begin: protocol.Begin) -> bool:
        """Whether the step is one of the manifest that was joined with."""
        return self.transport is not None and begin.manifest_hash == self.transport.manifest.hash

    def join(self, welcome: protocol.Welcome) -> None:
        """Answers an offer: Joined once its memory is mapped and tested, or Differs with what is in the way."""
        if welcome.manifest is not None:
            self.manifest = welcome.manifest
        if self.manifest is None or self.manifest.hash != welcome.manifest_hash:
            self.refuse(Refused("the sender's manifest does not have the hash that it announced"))
            return
        self.leave()
        self.begun = 0
        try:
            joined = self._map(welcome, self.manifest)
        except ManifestMismatch as mismatch:
            self._differs(welcome, str(mismatch))
            self.refuse(mismatch)
            return
        except SelfTestFailed as error:
            self.leave()
            self._differs(welcome, f"self-test: {error}")
            self.refuse(error)
            return
        except TransportError as error:
            # The sender may be gone, or just busy: nothing is wrong with this receiver for good.
            self.leave()
            self._errors["transport"] += 1
            message = f"joining failed and is tried again: {error}"
            self._standing.state, self._standing.message = AgentState.STARTING, message
            log.warning("rank %d: %s", self._standing.identity.rank, message)
            self._differs(welcome, message, retry=True)
            self._dealer.greet_again(JOIN_AGAIN_SECONDS)
            return
        self.session, self.route = welcome.session, joined.route
        self._dealer.offered()
        self._dealer.post(joined.model_copy(update={"offer_number": welcome.offer_number}))

    def _map(self, welcome: protocol.Welcome, manifest: Manifest) -> protocol.Joined:
        """Raises ManifestMismatch, SelfTestFailed, TransportError."""
        deadline = Deadline(self._config.join_timeout_seconds)
        began = time.perf_counter()
        with held_back():
            self._target.bind(manifest)
            bound = time.perf_counter()
            self.transport = receiver_transport(welcome, manifest, self._target, self._config, self._device)
            self._dealer.find = self.transport.find
            joined = self.transport.join(deadline)
        log.debug(
            "rank %d: %d tensors fit, found in %.3f s; memory mapped and copies planned in %.3f s",
            *(self._standing.identity.rank, len(manifest.tensors), bound - began, time.perf_counter() - bound),
        )
        return joined

    def _differs(self, welcome: protocol.Welcome, differences: str, *, retry: bool = False) -> None:
        self._dealer.post(
            protocol.Differs(differences=differences[:65536], offer_number=welcome.offer_number, retry=retry)
        )

    def admitted(self) -> None:
        """The sender found nothing amiss: steps come from now on."""
        if self._standing.state in (AgentState.STARTING, AgentState.REFUSED):
            self._standing.state, self._standing.message = AgentState.JOINED, "it holds no whole step yet"

    def refuse(self, error: WeightSyncError) -> None:
        """This receiver can't join, until its process is another."""
        self._errors["refused"] += 1
        self._standing.state, self._standing.message = AgentState.REFUSED, str(error)
        self.failure = error

    def regroup(self, message: protocol.Regroup) -> None:
        """Follows into a new group of a collective transport, and answers Regrouped; where that fails, nothing: the
        sender then gives the group up.
        """
        if self.transport is None:
            return

        def check() -> None:
            newer = self._dealer.take(0)
            if newer is not None and not isinstance(newer, protocol.Ping):
                self._dealer.put_back(newer)
                raise Closed(f"the sender gave group {message.epoch} up")
            if not self._dealer.connected:
                raise Closed("the sender's connection is gone")

        rank = self._standing.identity.rank
        try:
            regrouped = self.transport.regroup(message, rank, Deadline(message.timeout_seconds), check)
        except WeightSyncError as error:
            self._errors["transport"] += 1
            log.error("rank %d: group %d failed: %s", rank, message.epoch, error)
            return
        self.route = regrouped.route
        self._dealer.post(regrouped)

    def leave(self) -> None:
        """Releases what was mapped. The target keeps its weights. Idempotent."""
        self._dealer.find = None
        if self.transport is not None:
            self.transport.close()
            self.transport = None
