"""CURVE key pairs of one WeightSync, as the files that the agents read (ZPL certificates, as zmq.auth writes them).

https://rfc.zeromq.org/spec/4/ (ZPL), https://rfc.zeromq.org/spec/26/ (CURVE)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

SIDES = ("sender", "receiver")


@dataclass(frozen=True)
class CurveKeys:
    """File name -> its text: sender.key, sender.key_secret, receiver.key, receiver.key_secret."""

    files: Mapping[str, str]

    @classmethod
    def generate(cls) -> CurveKeys:
        import zmq  # here: printing a plan needs no keys

        files = {}
        for side in SIDES:
            public, secret = (key.decode() for key in zmq.curve_keypair())
            files[f"{side}.key"] = _certificate(public)
            files[f"{side}.key_secret"] = _certificate(public, secret)
        return cls(files)

    @property
    def complete(self) -> bool:
        """Whether every file is there and holds a key."""
        return all(
            "-key = " in self.files.get(f"{side}.key{suffix}", "") for side in SIDES for suffix in ("", "_secret")
        )

    @property
    def fingerprint(self) -> str:
        """Of the public keys: pods with other ones can't talk to each other."""
        text = "".join(self.files.get(f"{side}.key", "") for side in SIDES)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _certificate(public: str, secret: str = "") -> str:
    lines = ["metadata", "curve", f'    public-key = "{public}"', *([f'    secret-key = "{secret}"'] if secret else [])]
    return "\n".join(lines) + "\n"
