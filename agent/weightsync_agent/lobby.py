"""Where receivers join: hello, an offer of memory, the self-test, admission; and where they leave.

Joining maps and unmaps memory, which must not happen while a stream of this process may wait: what comes within a step
is put off until after it (`defer`, `catch_up`).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping

from weightsync_api.agent_config import AgentConfig
from weightsync_api.reports import AgentState
from weightsync_api.v1alpha1.spec import TransferMode

from . import protocol
from .errors import FallBack, Refused, SelfTestFailed, TransportError
from .identity import is_gone
from .manifest import Manifest
from .peers import Peer
from .transport.base import SenderTransport

log = logging.getLogger("weightsync.sender")

OF_JOINING = (protocol.Hello, protocol.Joined, protocol.Differs)

Send = Callable[[bytes, protocol.Message], bool]
"""To a ZeroMQ address; False when its connection is gone."""

MAX_STRANGERS = 8
"""Sentences about who was turned away at the door that are kept, for an error that finds nobody there."""


class Lobby:
    """The book of receivers, by rank. A receiver that left keeps its place, with the reason, until it returns."""

    def __init__(
        self,
        config: AgentConfig,
        session: str,
        manifest: Manifest,
        transport: SenderTransport,
        send: Send,
        errors: Counter[str],
    ) -> None:
        self.peers: dict[int, Peer] = {}
        self.in_step = False
        self._config = config
        self._session = session
        self._manifest = manifest
        self._transport = transport
        self._send = send
        self._errors = errors
        self._addresses: dict[bytes, Peer] = {}
        self._later: list[tuple[bytes, protocol.FromReceiver]] = []
        self._leaving: list[Peer] = []
        self._strangers: dict[str, None] = {}
        self._offers = itertools.count(1)

    def at(self, address: bytes) -> Peer | None:
        """Who speaks from this address."""
        return self._addresses.get(address)

    def present(self) -> list[Peer]:
        """Those that joined and were not lost, by rank."""
        return [self.peers[rank] for rank in sorted(self.peers) if self.peers[rank].joined]

    def missing(self, absent: Mapping[int, str]) -> dict[int, str]:
        """Why each of the expected ranks is not there. `absent`: what their drivers say of ranks that won't come."""
        found = {}
        for rank in range(1, self._config.receivers + 1):
            peer = self.peers.get(rank)
            if peer is None or not peer.joined:
                told = (peer.message or str(peer.state)) if peer else "it never said hello"
                found[rank] = told if peer and peer.state == AgentState.REFUSED else absent.get(rank, told)
        return found

    def waits_for(self, absent: Mapping[int, str]) -> bool:
        """Whether an expected receiver may still join. One that was refused for good may not, until its process is
        another; nor may one of `absent`."""
        refused = {rank for rank, peer in self.peers.items() if peer.state == AgentState.REFUSED and not peer.retries}
        return not self.missing(absent).keys() <= refused | absent.keys()

    def nobody(self, absent: Mapping[int, str], within: float | None) -> str:
        """Why no receiver is there, in a sentence. `within`: seconds that were waited, where that was in vain."""
        config = self._config
        told = [f"rank {rank}: {reason}" for rank, reason in list(self.missing(absent).items())[:20]]
        turned_away = [f"turned away: {stranger}" for stranger in self._strangers]
        return (
            f"WeightSync {config.namespace}/{config.name}: no receiver has joined at {config.bind}"
            f"{'' if within is None else f' within {within:g} s'}; "
            + ("; ".join(told + turned_away) if told else "none is expected: spec.receivers.replicas is 0")
        )

    def lost(self, peer: Peer) -> None:
        """Its connection is gone."""
        peer.state, peer.message = AgentState.LOST, "its connection is gone: the process ended or the node is off"
        self.forget(peer)

    def take(self, address: bytes, message: protocol.FromReceiver, step: int) -> None:
        """A word of joining. `step`: the sender's last."""
        if self.in_step:
            self._later.append((address, message))
            return
        if isinstance(message, protocol.Hello):
            self._hello(address, message)
            return
        peer = self.at(address)
        if peer is None:
            self._errors["protocol"] += 1
            self._send(address, protocol.Error(cause=f"{message.kind} before Hello: say Hello first"))
        elif isinstance(message, protocol.Joined | protocol.Differs):
            self._answer(peer, message, step)

    def catch_up(self, step: int) -> None:
        """After a step: what was put off within it."""
        leaving, self._leaving = self._leaving, []
        for peer in leaving:
            self.forget(peer)
        later, self._later = self._later, []
        for address, message in later:
            self.take(address, message, step)

    def forget(self, peer: Peer) -> None:
        """Takes back what was exported to a receiver that left."""
        self._addresses.pop(peer.address, None)
        if self.in_step:
            self._leaving.append(peer)
            return
        if self.peers.get(peer.rank) is not peer:
            return  # its rank is another process' by now, and so is what was exported to that rank
        stranded = self._transport.forget(peer.rank, is_gone(peer.identity))
        if stranded:
            log.warning("%s left %d bytes stranded: they come back when this process ends", peer.label, stranded)

    def _hello(self, address: bytes, hello: protocol.Hello) -> None:
        try:
            peer = self._enlist(address, hello)
            if hello.protocol != protocol.PROTOCOL_VERSION:
                raise Refused(
                    f"the sender speaks protocol {protocol.PROTOCOL_VERSION}, the receiver {hello.protocol}: "
                    "run the same weightsync version on both sides"
                )
            self._welcome(peer, hello.manifest_hash)
        except (Refused, TransportError) as refusal:  # TransportError: no memory or descriptors left to offer
            self._errors["refused"] += 1
            log.warning("rank %d of pod %s is refused: %s", hello.identity.rank, hello.identity.pod, refusal)
            self._refuse(address, str(refusal))

    def _refuse(self, address: bytes, reason: str) -> None:
        self._send(address, protocol.Refuse(reason=reason))
        if (known := self._addresses.get(address)) is not None:
            known.state, known.message = AgentState.REFUSED, reason

    def _enlist(self, address: bytes, hello: protocol.Hello) -> Peer:
        config, rank = self._config, hello.identity.rank
        if (hello.namespace, hello.name) != (config.namespace, config.name):
            raise self._stranger(
                hello,
                f"this is the sender of WeightSync {config.namespace}/{config.name}, "
                f"not of {hello.namespace}/{hello.name}",
            )
        if rank < 1:
            raise self._stranger(hello, "rank 0 is the sender's: a receiver's WEIGHTSYNC_RANK is 1 or more")
        old = self.peers.get(rank)
        # The same process on a new connection is no second one, though the old connection may still look open.
        another = old is not None and old.address != address and old.identity != hello.identity
        if old is not None and another and old.joined and self._send(old.address, protocol.Ping()):
            raise Refused(f"rank {rank} is taken by pod {old.identity.pod}, process {old.identity.pid}, which is alive")
        if old is not None:
            self.forget(old)
        other = self.at(address)
        if other is not None:  # one connection is one receiver: it was another rank until now
            self.forget(other)
            other.state, other.message = AgentState.LOST, f"its process is rank {rank} by now"
        peer = Peer(hello.identity, address=address, step=hello.step)
        self.peers[rank] = self._addresses[address] = peer
        return peer

    def _stranger(self, hello: protocol.Hello, reason: str) -> Refused:
        """One that is none of the expected ranks, as far as can be known: the right one may still come."""
        if len(self._strangers) < MAX_STRANGERS:
            self._strangers[f"rank {hello.identity.rank} of pod {hello.identity.pod}: {reason}"] = None
        return Refused(reason)

    def _welcome(self, peer: Peer, known_hash: str) -> None:
        """Offers memory to a receiver. One that can't map the sender's own puts everybody on staging buckets."""
        transport = self._transport
        while True:
            try:
                offer = transport.offer(peer.identity)
                break
            except FallBack as reason:
                self._fall_back(peer, reason)
                self._welcome_others(peer)
        peer.offer_number = next(self._offers)
        self._send(
            peer.address,
            protocol.Welcome(
                protocol=protocol.PROTOCOL_VERSION,
                session=self._session,
                transport=transport.kind,
                mode=transport.plan.mode,
                manifest_hash=self._manifest.hash,
                manifest=None if known_hash == self._manifest.hash else self._manifest,
                bucket_bytes=transport.plan.bucket_bytes,
                slots=transport.plan.slots,
                offer=offer,
                offer_number=peer.offer_number,
            ),
        )
        peer.state = AgentState.STARTING

    def _refuse_joined(self, peer: Peer, reason: str) -> None:
        peer.state, peer.message = AgentState.REFUSED, reason
        self._errors["refused"] += 1
        log.warning("%s is refused: %s", peer.label, reason)
        self._send(peer.address, protocol.Refuse(reason=reason))

    def _fall_back(self, peer: Peer, reason: FallBack) -> None:
        """To the next best way, which takes all. Raises Refused where the spec allows no other."""
        transport, pushed = self._transport, self._transport.pushes
        if self._config.mode == TransferMode.DIRECT and (reason.apart or not pushed):
            raise Refused(f"transfer.mode is Direct, and {reason}") from None
        transport.fall_back(str(reason))
        level = logging.INFO if pushed else logging.WARNING
        how = "each receiver copies for itself" if transport.plan.mode == "Direct" else "all go through staging buckets"
        what = "its tensors can't be written from here" if pushed else "it can't read the sender's tensors"
        log.log(level, "%s: %s, so %s: %s", peer.label, what, how, reason)

    def offer_anew(self) -> None:
        """Everybody joins again, with what the transport offers now: what it offered before has moved."""
        for peer in self.peers.values():
            peer.verified_once = False
        self._welcome_others(None)

    def _welcome_others(self, newcomer: Peer | None) -> None:
        """A new offer for everybody who had one: those who joined, and those who have not answered theirs yet."""
        for other in list(self._addresses.values()):
            if other is newcomer or not (other.joined or other.state == AgentState.STARTING):
                continue
            try:
                self._welcome(other, self._manifest.hash)
            except (Refused, TransportError) as refusal:
                self._errors["refused"] += 1
                log.warning("%s is refused: %s", other.label, refusal)
                self._refuse(other.address, str(refusal))

    def _answer(self, peer: Peer, message: protocol.Joined | protocol.Differs, step: int) -> None:
        if message.offer_number < peer.offer_number:
            log.debug("%s: %s about an offer that was taken back", peer.label, message.kind)
        elif isinstance(message, protocol.Joined):
            self._joined(peer, message, step)
        else:
            peer.state, peer.message, peer.retries = AgentState.REFUSED, message.differences, message.retry
            log.error("%s does not fit: %s", peer.label, message.differences)

    def _joined(self, peer: Peer, joined: protocol.Joined, step: int) -> None:
        if peer.state != AgentState.STARTING:
            self._errors["protocol"] += 1
            self._send(peer.address, protocol.Error(cause="Joined without an offer: say Hello first"))
            return
        try:
            self._transport.check_join(peer.rank, joined)
        except FallBack as reason:
            try:
                self._fall_back(peer, reason)
            except Refused as refusal:
                self._refuse_joined(peer, str(refusal))
            else:
                self._welcome_others(None)
        except SelfTestFailed as failure:
            self._refuse_joined(peer, str(failure))
        else:
            peer.state, peer.message = AgentState.JOINED, ""
            peer.join_microseconds = round((time.perf_counter() - peer.hello_at) * 1e6)
            self._send(peer.address, protocol.Admitted(step=step))
            log.info("%s joined over %s in %.3f s", peer.label, joined.route, peer.join_microseconds / 1e6)
