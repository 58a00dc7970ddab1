"""SGLang's HTTP endpoints around a weight update, each with a deadline and a sentence.

Tested with SGLang 0.5.23 (srt/entrypoints/http_server.py). A refusal is HTTP 400 with `{"success": false, "message"}`.
"""

from __future__ import annotations

import http.client
import json
import time
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..deadline import Deadline
from ..errors import ConfigError, StepTimeout, TransportError

MAX_ANSWER_BYTES = 16 << 20
FLUSH_AGAIN_SECONDS = 0.05
PauseMode = Literal["abort", "retract", "in_place"]


class ServerInfo(BaseModel):
    """What of `/server_info` decides how weights are sent."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model_path: str
    version: str = ""
    dtype: str = "auto"
    quantization: str | None = None
    tp_size: int = Field(default=1, ge=1)
    dp_size: int = Field(default=1, ge=1)
    pp_size: int = Field(default=1, ge=1)


class SGLangClient:
    """One server. Thread-safe: a connection a request."""

    def __init__(self, url: str, api_key: str = "") -> None:
        """`url`: http://HOST:PORT. `api_key`: the server's --api-key or --admin-api-key. Raises ConfigError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is no URL of an SGLang server: write http://HOST:PORT")
        self.url = url.rstrip("/")
        self._parts, self._key = parts, api_key

    def info(self, deadline: Deadline) -> ServerInfo:
        """Raises TransportError, StepTimeout; ConfigError where it answers like no SGLang."""
        try:
            return ServerInfo.model_validate_json(self._ask("GET", "/server_info", None, deadline))
        except ValidationError as error:
            raise ConfigError(f"{self.url}/server_info answers like no SGLang server: {error}") from None

    def weight_version(self, deadline: Deadline) -> str:
        found = json.loads(self._ask("GET", "/model_info", None, deadline))
        return str(found.get("weight_version", "")) if isinstance(found, dict) else ""

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        self.post("/pause_generation", {"mode": mode}, deadline)

    def resume(self, deadline: Deadline) -> None:
        self.post("/continue_generation", {}, deadline)

    def flush(self, deadline: Deadline) -> None:
        """Empties the prefix cache, trying again while a request holds it. Raises TransportError at the deadline.

        Not by the endpoint's own `timeout`: that waits for requests which a pause holds back.
        """
        while True:
            try:
                self._ask("POST", "/flush_cache", "{}", deadline)
                return
            except TransportError as error:
                if deadline.remaining < FLUSH_AGAIN_SECONDS:
                    raise TransportError(
                        f"the prefix cache could not be emptied within {deadline.seconds:.3g} s, and would serve the "
                        f"old weights' work: {error}"
                    ) from None
            time.sleep(FLUSH_AGAIN_SECONDS)

    def post(self, path: str, body: dict[str, object], deadline: Deadline) -> dict[str, object]:
        """Raises TransportError with the server's message where it refuses, StepTimeout."""
        answer = self._ask("POST", path, json.dumps(body), deadline)
        try:
            found = json.loads(answer)
        except ValueError:
            return {}
        if isinstance(found, dict) and found.get("success") is False:
            raise TransportError(f"SGLang at {self.url} refused {path}: {str(found.get('message'))[:2000]}")
        return found if isinstance(found, dict) else {}

    def _ask(self, method: str, path: str, body: str | None, deadline: Deadline) -> bytes:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=max(deadline.remaining, 0.001))
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            connection.request(method, self._parts.path.rstrip("/") + path, body, headers)
            answer = connection.getresponse()
            text = answer.read(MAX_ANSWER_BYTES)
        except TimeoutError:
            raise StepTimeout(
                f"SGLang at {self.url} did not answer {path} within {deadline.seconds:.3g} s: look at its log"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise TransportError(
                f"SGLang at {self.url} can't be asked for {path} ({type(error).__name__}: {error}): is it running?"
            ) from None
        finally:
            connection.close()
        if answer.status != 200:
            raise TransportError(f"SGLang at {self.url} answered {path} with {answer.status}: {_message(text)}")
        return text


def _message(text: bytes) -> str:
    try:
        found = json.loads(text)
    except ValueError:
        return text[:2000].decode("utf-8", "replace").strip()
    if isinstance(found, dict):
        return str(found.get("message") or found.get("error") or found)[:2000]
    return str(found)[:2000]
