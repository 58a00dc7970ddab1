"""Pickle, for peers whose protocols carry nothing else (verl, checkpoint-engine, SGLang): the one place that has it.

Written as plain data. Read by an allow-list: first every opcode, then every name. Nothing that a message names is
imported, and nothing is called but the constructors of `torch.Size` and of `PeerError`; a function that a peer wants
called (`rebuild_cuda_tensor`) becomes a `Marker`, and its arguments stay data. Opcodes: Python's pickletools module.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from multiprocessing.reduction import ForkingPickler

import torch
from torch import multiprocessing
from torch.multiprocessing import reductions  # registers torch's reductions with ForkingPickler

from ..errors import ConfigError, TransportError

MAX_MESSAGE_BYTES = 256 << 20
"""Metadata of a million tensors, generously."""

_PROTOCOL = 4
_OPCODES = frozenset(
    {
        "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT",
        "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
        "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES",
        "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS",
        "EMPTY_DICT", "SETITEM", "SETITEMS", "GLOBAL", "STACK_GLOBAL", "REDUCE",
    }
)  # fmt: skip
"""What plain data, torch.Size, torch.dtype and a call's arguments are made of. Not BUILD, NEWOBJ, INST, OBJ, PERSID."""


class WireRefused(TransportError):
    """A peer's message holds something that is not on the allow-list, or is no message at all. Nothing of it ran."""


class Marker(Enum):
    """What stands for a name that a message may hold as data. Not callable."""

    CUDA_TENSOR = "torch.multiprocessing.reductions.rebuild_cuda_tensor"
    SHARED_FILE = "weightsync_agent.engines.shared_file.open_shared_file"
    TENSOR = "torch.Tensor"
    STORAGE = "torch.UntypedStorage"


_NAMES: dict[tuple[str, str], Marker] = {
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"): Marker.CUDA_TENSOR,
    ("weightsync_agent.engines.shared_file", "open_shared_file"): Marker.SHARED_FILE,
    ("torch", "Tensor"): Marker.TENSOR,
    ("torch._tensor", "Tensor"): Marker.TENSOR,
    ("torch.nn.parameter", "Parameter"): Marker.TENSOR,
    ("torch.storage", "UntypedStorage"): Marker.STORAGE,
    ("torch", "UntypedStorage"): Marker.STORAGE,
    ("torch.storage", "TypedStorage"): Marker.STORAGE,
}
_ERRORS = frozenset({"RuntimeError", "ValueError", "TypeError", "Exception", "AssertionError", "KeyError"})


@dataclass(frozen=True, init=False)
class PeerError:
    """An exception that a peer sent: its text."""

    text: str

    def __init__(self, *arguments: object) -> None:
        object.__setattr__(self, "text", "; ".join(str(argument)[:4096] for argument in arguments[:4]))


def require_allowed(allowed: bool, peer: str) -> None:
    """Raises ConfigError unless the user asked for this wire by name."""
    if not allowed:
        raise ConfigError(
            f"{peer}'s protocol carries pickled Python objects. WeightSync reads them by an allow-list and never runs "
            f"what they name, but {peer} runs what it is sent, so both ends must trust whoever can reach the socket: "
            "pass allow_object_wire=True to use it"
        )


def dumps(value: object) -> bytes:
    """The message of plain data, dtypes, sizes, names of functions with their arguments, or an exception."""
    return pickle.dumps(value, protocol=_PROTOCOL)


def dumps_tensors(named: list[tuple[str, torch.Tensor]]) -> bytes:
    """Handles of tensors, as torch.multiprocessing makes them: by file name on the CPU, by CUDA IPC on a GPU.

    On the CPU a tensor's memory moves into a file under /dev/shm that torch counts holders of. Call within
    `sharing_by_name`, or the default would need a relation between the processes.
    """
    assert reductions
    buffer = io.BytesIO()
    ForkingPickler(buffer, _PROTOCOL).dump(named)
    return buffer.getvalue()


@contextmanager
def sharing_by_name() -> Iterator[None]:
    """Host memory is shared by file names for as long as this lasts, and not by descriptors, which go to relatives of
    this process only: SGLang's server dies of one."""
    before = multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]


def loads(message: bytes, peer: str) -> object:
    """What a peer sent, as allowed types only: dict, list, tuple, str, int, float, bool, bytes, None, torch.Size,
    torch.dtype, Marker, PeerError.

    Raises WireRefused, with the first thing that is not allowed; nothing was called then.
    """
    if len(message) > MAX_MESSAGE_BYTES:
        raise WireRefused(f"{peer} sent a message of {len(message)} bytes, above {MAX_MESSAGE_BYTES}")
    _check_opcodes(message, peer)
    try:
        return _Reader(message, peer).load()
    except WireRefused:
        raise
    except Exception as error:  # a broken message may raise nearly anything
        raise WireRefused(f"{peer}'s message can't be read: {type(error).__name__}: {str(error)[:200]}") from None


def _check_opcodes(message: bytes, peer: str) -> None:
    try:
        for opcode, argument, position in pickletools.genops(message):
            if opcode.name not in _OPCODES:
                raise WireRefused(f"{peer}'s message holds {opcode.name} at byte {position}, which plain data has not")
            # The memo is an array as large as its highest index: 5 bytes could ask for 64 GiB.
            if opcode.name == "LONG_BINPUT" and (not isinstance(argument, int) or argument > len(message)):
                raise WireRefused(f"{peer}'s message asks for a memo of {argument} places in {len(message)} bytes")
    except WireRefused:
        raise
    except Exception as error:
        raise WireRefused(f"{peer}'s message is no message: {type(error).__name__}: {str(error)[:200]}") from None


class _Reader(pickle.Unpickler):
    def __init__(self, message: bytes, peer: str) -> None:
        super().__init__(io.BytesIO(message), fix_imports=False)
        self._peer = peer

    def find_class(self, module: str, name: str, /) -> object:
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        if module == "builtins" and name in _ERRORS:
            return PeerError
        marker = _NAMES.get((module, name))
        if marker is None:
            raise WireRefused(
                f"{self._peer}'s message names {module[:80]}.{name[:80]}, which is not on the allow-list: the peer is "
                "another version than the tested one, or not who it seems to be"
            )
        return marker

    def persistent_load(self, pid: object, /) -> object:
        raise WireRefused(f"{self._peer}'s message holds a persistent id")
