"""vLLM's HTTP server as the trainer calls it."""

from __future__ import annotations

import http.client
import json
import threading
from typing import Any
from urllib.parse import urlsplit

from ..errors import ConfigError, TransportError
from .vllm_core import Pause
from .vllm_worker import STEP


class HttpEngine:
    """vLLM's HTTP server, over one connection that is kept. Its routes exist with VLLM_SERVER_DEV_MODE=1 only."""

    def __init__(self, url: str, timeout: float = 120.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not the URL of a vLLM server, such as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._where = (parts.hostname, parts.port)
        self._prefix = parts.path.rstrip("/")
        self._timeout = timeout
        self._connection: http.client.HTTPConnection | None = None
        self._lock = threading.Lock()

    def post(self, path: str, body: object | None = None, timeout: float | None = None, *, once: bool = False) -> Any:
        """Raises TransportError with what the server said."""
        data = b"" if body is None else json.dumps(body).encode()
        status, text = self._exchange("POST", path, data, timeout, once=once)
        if status == 404:
            raise ConfigError(f"{self.url} has no {path}: start it with VLLM_SERVER_DEV_MODE=1")
        if status >= 400:
            raise TransportError(f"{self.url}{path}: {status} {text[:2000].decode(errors='replace')}")
        return json.loads(text) if text.strip() else None

    def get(self, path: str, timeout: float) -> int:
        """The answer's HTTP status. Raises TransportError where there is no answer."""
        return self._exchange("GET", path, b"", timeout)[0]

    def _exchange(
        self, method: str, path: str, data: bytes, timeout: float | None, *, once: bool = False
    ) -> tuple[int, bytes]:
        """`once`: over a connection of its own, and never again: it may have been taken when the connection broke."""
        with self._lock:
            for fresh in (True,) if once else (False, True):
                connection = self._open(timeout or self._timeout, fresh)
                try:
                    connection.request(method, self._prefix + path, data, {"Content-Type": "application/json"})
                    answer = connection.getresponse()
                    return answer.status, answer.read()
                except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError) as error:
                    # A kept connection that the server closed meanwhile: the request was not taken.
                    self._drop()
                    if fresh:
                        raise TransportError(f"{self.url}{path}: {error}") from None
                except (OSError, http.client.HTTPException) as error:
                    self._drop()
                    raise TransportError(f"{self.url}{path}: {error or type(error).__name__}") from None
                except BaseException:  # this process was asked to end: half an exchange is of no use
                    self._drop()
                    raise
        raise AssertionError("the second attempt answers or raises")

    def _open(self, timeout: float, fresh: bool) -> http.client.HTTPConnection:
        if fresh:
            self._drop()
        if self._connection is None:
            self._connection = self._kind(self._where[0], self._where[1], timeout=timeout)
        self._connection.timeout = timeout
        if self._connection.sock is not None:
            self._connection.sock.settimeout(timeout)
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def collective_rpc(self, method: str, timeout: float | None, args: tuple[Any, ...]) -> list[Any]:
        body = {"method": method, "args": list(args)}
        # A step that a worker waits for twice keeps the engine paused for the second.
        answer = self.post("/collective_rpc", body, timeout, once=method == STEP)
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list):
            raise TransportError(f"{self.url}/collective_rpc answered {str(answer)[:300]!r}")
        return results

    def pause(self, mode: Pause) -> None:
        self.post(f"/pause?mode={mode}")

    def resume(self) -> None:
        self.post("/resume")

    def reset_prefix_cache(self) -> None:
        self.post("/reset_prefix_cache")
