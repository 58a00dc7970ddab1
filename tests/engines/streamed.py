"""A request that runs while a step comes: read token by token, so that a test knows that it has begun and not ended.

How fast a machine is decides neither: what runs may be stopped by the test once it has seen enough.
"""

from __future__ import annotations

import http.client
import json
import threading
import urllib.request
from collections.abc import Callable
from typing import Any, Self

SECONDS = 200.0
"""For whatever a request waits for: a step is within it."""

Read = Callable[[dict[str, Any], list[int]], tuple[list[int], str]]
"""Of an engine's line and the tokens before it: all tokens by then, and why the request ended; empty while it runs."""


class Streamed:
    """A greedy request to URL that has said its first token when the `with` block begins; stopped at its end."""

    def __init__(self, url: str, body: dict[str, object], read: Read) -> None:
        self._request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        self._read = read
        self._changed = threading.Condition()
        self._stopped = False
        self._over = False
        self._failure: Exception | None = None
        self._tokens: list[int] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.finish_reason = ""

    def _run(self) -> None:
        try:
            with urllib.request.urlopen(self._request, timeout=SECONDS) as answer:
                for line in answer:
                    if line.startswith(b"data: {"):
                        self._take(json.loads(line.removeprefix(b"data: ")))
                    if self._stopped:
                        break
        except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
            self._failure = error
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _take(self, said: dict[str, Any]) -> None:
        if "error" in said:
            raise ValueError(said)
        with self._changed:
            self._tokens, self.finish_reason = self._read(said, self._tokens)
            self._changed.notify_all()

    @property
    def tokens(self) -> list[int]:
        """All that it has said by now."""
        with self._changed:
            return list(self._tokens)

    def until(self, count: int) -> bool:
        """Waits for so many tokens. False: it has ended with fewer."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._over or len(self._tokens) >= count, SECONDS), "no more tokens"
            assert self._failure is None or self._stopped, self._failure
            return len(self._tokens) >= count

    def end(self) -> list[int]:
        """Waits for its end."""
        self.until(1 << 40)
        return self.tokens

    def __enter__(self) -> Self:
        self._thread.start()
        assert self.until(1), f"not a token: {self.finish_reason}"
        return self

    def __exit__(self, *_: object) -> None:
        """The engine aborts a request whose client has gone."""
        self._stopped = True
        self._thread.join(SECONDS)
