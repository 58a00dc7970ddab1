"""What our receivers of verl's and checkpoint-engine's senders have in common: a step's result, and the state after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from ..deadline import Deadline
from ..errors import ConfigError
from ..manifest import Manifest
from ..targets import LoadWeights, Target, TensorTarget, target_for
from .bucket_target import BucketTarget
from .lockstep import Lockstep
from .object_wire import require_allowed

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Received:
    """One whole step."""

    step: int
    """Number of the step, from 1, as this receiver counts."""
    tensors: int
    buckets: int
    nbytes: int
    """Bytes of all tensors, tied ones counted as often as they were named."""
    duration_microseconds: int
    """From the sender's first message to the last tensor in place."""


class BucketReceiver:
    """Fed by one peer, a step a call. Names, shapes and dtypes are compared bucket by bucket, before its bytes move."""

    peer = "the sender"

    def __init__(
        self,
        address: str,
        target: torch.nn.Module | Mapping[str, torch.Tensor] | LoadWeights | Target,
        *,
        allow_object_wire: bool = False,
        expect: Manifest | None = None,
        device: torch.device | None = None,
        atomic: bool = False,
        join_timeout_seconds: float = 120.0,
        step_timeout_seconds: float = 300.0,
    ) -> None:
        """`target`: as for Receiver. `expect`: the manifest that a `load_weights` callable is to be given, to be
        compared. `device`: of a callable's tensors. `atomic`: nothing is written before all of a step was compared,
        at the price of one more copy of the weights.

        Raises ConfigError, also where `allow_object_wire` is not set.
        """
        require_allowed(allow_object_wire, self.peer)
        self.address = address
        bound = target_for(target)
        if isinstance(bound, TensorTarget):
            devices = {tensor.device for tensor in bound.tensors.values()}
            if len(devices) != 1:
                raise ConfigError(f"the target's tensors are on {len(devices)} devices, and on one they must be")
            device = devices.pop()
        elif bound.in_place:
            raise ConfigError("the target is an nn.Module, a dict of tensors or a load_weights callable")
        self._target = BucketTarget(bound, device or torch.device("cpu"), expect, atomic=atomic)
        self._join_timeout, self._step_timeout = join_timeout_seconds, step_timeout_seconds
        self._step = 0
        self.ready = False
        """Holds the last step whole: may serve."""
        self.message = "it holds no whole step yet"
        """Why it is not ready."""

    @property
    def step(self) -> int:
        """The last step that it holds whole; 0: none yet."""
        return self._step

    def receive(self) -> Received:
        """Takes one step in; whole when it returns.

        Raises:
            JoinTimeout: no sender came; the target is as it was.
            ManifestMismatch: what is sent does not fit; all differences of the bucket are listed.
            ViewsRetained, or what `load_weights` raised.
            TransportError, StepTimeout: the sender died, fell silent, or sent what can't be.
        After each but JoinTimeout look at `ready`: a target that was written in part stays tainted until a later step
        is whole.
        """
        self._target.begin()
        try:
            with Lockstep(self.address, "answers", self.peer) as channel:
                received = self._take_step(channel, Deadline(self._join_timeout))
        except BaseException as error:
            if self._target.written:
                self.ready, self.message = False, f"step {self._step + 1} broke off: {type(error).__name__}: {error}"
            raise
        finally:
            self._target.begin()
        self._step, self.ready, self.message = received.step, True, ""
        return received

    def _take_step(self, channel: Lockstep, join: Deadline) -> Received:
        raise NotImplementedError
