"""Rollouts for TRL from engines over HTTP: `GRPOTrainer(rollout_func=EngineRollout([url, ...]))`.

The engines are any that speak OpenAI's completions with vLLM's `return_token_ids`: ours of transformers, and vLLM.
Standard library only: it runs in the trainer's process.
"""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from ..deadline import Deadline
from ..errors import ConfigError, StepTimeout, TransportError

MAX_PROMPTS = 64
"""Of one request."""
RETRY_SECONDS = 0.2
LOOK_SECONDS = 1.0
"""How often a wait for engines is left to see whether one came back that waits for weights."""
MAX_ANSWER_BYTES = 256 << 20

if TYPE_CHECKING:
    from .callback import WeightSyncCallback


class _Logprobs(BaseModel):
    token_logprobs: list[float]


class _Choice(BaseModel):
    index: int
    token_ids: list[int]
    logprobs: _Logprobs


class _Completion(BaseModel):
    choices: list[_Choice]


class EngineRollout:
    """A `rollout_func` of TRL: asks engines for the completions of a batch of prompts.

    Engines that were started anew have no weights, and the next step comes only after the rollout. So where none is
    ready, the trainer's WeightSyncCallback sends them again meanwhile (see its `catch_up`).

    Args:
        urls: of the engines, such as http://engine:8000; the prompts are shared out among them.
        model: its name in the requests; empty: whatever the engine serves.
        timeout: seconds for one batch, retries while engines are not ready included.
        ignore_eos: generate to the full length.

    Raises, when called: StepTimeout where no engine answered in time, TransportError where one refused the request.
    """

    def __init__(
        self, urls: str | Sequence[str], *, model: str = "", timeout: float = 600, ignore_eos: bool = False
    ) -> None:
        self.urls = [url.rstrip("/") for url in ([urls] if isinstance(urls, str) else urls)]
        if not self.urls or not all(url.startswith(("http://", "https://")) for url in self.urls):
            raise ConfigError(f"engines' addresses are {self.urls}: write such as http://engine:8000")
        self._model = model
        self._timeout = timeout
        self._ignore_eos = ignore_eos
        # Ranks begin at different engines, so that few prompts of many ranks don't all go to the first.
        self._next = int(os.environ.get("RANK", "0"))
        self._callback: WeightSyncCallback | None = None

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """`prompts`: of TRL, one for each completion; gives prompt_ids, completion_ids and logprobs in that order."""
        self._callback = _callback_of(trainer)
        ids = [_tokens(prompt, trainer.processing_class) for prompt in prompts]
        options = {
            "max_tokens": trainer.args.max_completion_length,
            "temperature": trainer.args.temperature,
            "top_p": trainer.args.top_p,
            "top_k": trainer.args.top_k or 0,
        }
        choices = self.complete(ids, options)
        return {
            "prompt_ids": ids,
            "completion_ids": [choice.token_ids for choice in choices],
            "logprobs": [choice.logprobs.token_logprobs for choice in choices],
        }

    def complete(self, prompts: Sequence[list[int]], options: dict[str, Any]) -> list[_Choice]:
        """One completion a prompt, by the engines in turn. `options`: of the completions request."""
        deadline = Deadline(self._timeout)
        share = max(1, min(MAX_PROMPTS, -(-len(prompts) // len(self.urls))))
        parts = [prompts[start : start + share] for start in range(0, len(prompts), share)]
        body = {
            "model": self._model,
            "logprobs": 0,
            "return_token_ids": True,
            "ignore_eos": self._ignore_eos,
            **options,
        }
        first = self._next
        self._next += len(parts)
        stuck, over = threading.Event(), threading.Event()
        with ThreadPoolExecutor(len(self.urls)) as pool:
            answers = [
                pool.submit(self._ask, first + number, {**body, "prompt": list(part)}, deadline, stuck, over)
                for number, part in enumerate(parts)
            ]
            try:
                while wait(answers, LOOK_SECONDS).not_done:
                    if stuck.is_set() and self._callback is not None:
                        self._callback.catch_up()  # in this thread, which trains
            finally:
                over.set()
            return [choice for answer in answers for choice in answer.result()]

    def _ask(
        self, place: int, body: dict[str, Any], deadline: Deadline, stuck: threading.Event, over: threading.Event
    ) -> list[_Choice]:
        """Tries one engine after the other while they are not ready or not there. `stuck`: set once none was."""
        last, tries = "", 0
        while not (deadline.passed or over.is_set()):
            url = f"{self.urls[place % len(self.urls)]}/v1/completions"
            try:
                found = _post(url, body, deadline.remaining)
                if len(found.choices) != len(body["prompt"]):
                    raise TransportError(f"{url} gave {len(found.choices)} choices for {len(body['prompt'])} prompts")
                return sorted(found.choices, key=lambda choice: choice.index)
            except urllib.error.HTTPError as error:
                said = error.read(4096).decode(errors="replace")
                if error.code not in (429, 502, 503, 504):
                    raise TransportError(f"{url} refused the rollout: {error.code} {said}") from None
                last = f"{url}: {error.code} {said}"
            except OSError as error:
                if not last or not deadline.passed:  # cut short by the deadline it says nothing
                    last = f"{url}: {error}"
            except ValidationError as error:
                raise TransportError(f"{url} is no engine with token ids and logprobs: {error}") from None
            place, tries = place + 1, tries + 1
            if tries >= len(self.urls):
                stuck.set()
            time.sleep(min(RETRY_SECONDS, max(0.0, deadline.remaining)))
        raise StepTimeout(f"no engine gave a rollout within {self._timeout:g} s; the last: {last or 'none was asked'}")


def _post(url: str, body: dict[str, Any], timeout: float) -> _Completion:
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(asked, timeout=max(timeout, 0.001)) as answer:
        return _Completion.model_validate_json(answer.read(MAX_ANSWER_BYTES))


def _callback_of(trainer: Any) -> WeightSyncCallback | None:
    from .callback import WeightSyncCallback

    handler = getattr(trainer, "callback_handler", None)
    return next((c for c in getattr(handler, "callbacks", ()) if isinstance(c, WeightSyncCallback)), None)


def _tokens(prompt: Any, processing: Any) -> list[int]:
    """A text, or a conversation through the chat template, as token ids."""
    if isinstance(prompt, str):
        return list(processing(text=prompt)["input_ids"])
    found = processing.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)[
        "input_ids"
    ]
    return list(found[0] if found and isinstance(found[0], list) else found)
