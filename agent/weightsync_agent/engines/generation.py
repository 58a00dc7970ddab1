"""One completion request -> a batch through `generate`, or a Refusal that names what is wrong with it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from .completions import MAX_CHOICES, MAX_PROMPTS, Choice, Completion, CompletionRequest, Logprobs, Refusal, Usage


@dataclass
class Row:
    """One sequence of a batch."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    """What was generated so far."""
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False
    """By an end token or a stop text, not by length."""


@dataclass
class Batch:
    """A request at work."""

    request: CompletionRequest
    rows: list[Row]
    """n for each prompt, in the prompts' order."""
    steps: list[int]
    """Whose weights generated it, in order."""
    rounds: int = 0


class Generator:
    """Generates with a live model, whatever its weights are at the moment. Used by one thread.

    Args:
        tokenizer: None: prompts are token ids, and texts come back empty.
        max_tokens: most new tokens of a request.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str, max_tokens: int
    ) -> None:
        self.name = name
        self._model = model
        self._tokenizer: Any = tokenizer
        self._max_tokens = max_tokens
        text = model.config.get_text_config()
        self._vocabulary = int(text.vocab_size)
        self._context = int(getattr(text, "max_position_embeddings", 0) or 1 << 30)
        eos = model.generation_config.eos_token_id
        if eos is None and tokenizer is not None:
            eos = tokenizer.eos_token_id
        self._eos = set(eos if isinstance(eos, list) else [] if eos is None else [eos])

    def check(self, request: CompletionRequest) -> list[list[int]]:
        """The prompts as token ids. Raises Refusal: beyond the model's vocabulary or context, or this server's bounds.

        Nothing unchecked reaches the model: on a GPU an index beyond the embedding ends the process.
        """
        if request.model not in ("", self.name):
            raise Refusal(404, "model_not_found", f"model is {request.model!r}, and this engine serves {self.name!r}")
        prompts = request.prompts
        if len(prompts) > MAX_PROMPTS or len(prompts) * request.n > MAX_CHOICES:
            raise _invalid(f"{len(prompts)} prompts, n {request.n}: at most {MAX_PROMPTS}, and {MAX_CHOICES} choices")
        if request.n > 1 and not request.temperature:
            raise _invalid(f"n is {request.n} at temperature 0, where all choices are the same: ask for one")
        if request.max_tokens > self._max_tokens:
            raise _invalid(f"max_tokens is {request.max_tokens}, and this engine was started with {self._max_tokens}")
        if request.stops and self._tokenizer is None:
            raise _invalid("stop is a text, and this engine has no tokenizer: its model's folder holds none")
        tokens = [self._tokens(prompt) for prompt in prompts]
        longest = max(map(len, tokens))
        if longest + request.max_tokens > self._context:
            raise _invalid(
                f"a prompt of {longest} tokens and max_tokens {request.max_tokens} are beyond the model's context of "
                f"{self._context}"
            )
        return tokens

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise _invalid("prompt is a text, and this engine has no tokenizer: send token ids")
            prompt = list(self._tokenizer(prompt)["input_ids"])
        beyond = [token for token in prompt if not 0 <= token < self._vocabulary]
        if beyond:
            raise _invalid(f"token {beyond[0]} of the prompt is beyond the model's vocabulary of {self._vocabulary}")
        if not prompt:
            raise _invalid("the prompt has no tokens")
        return prompt

    def begin(self, request: CompletionRequest, prompts: list[list[int]], step: int) -> Batch:
        """A batch for prompts that `check` gave. `step`: whose weights the model holds."""
        rows = [Row(prompt) for prompt in prompts for _ in range(request.n)]
        return Batch(request, rows, [step])

    def advance(self, batch: Batch, interrupt: Callable[[], bool] = lambda: False) -> bool:
        """Generates until the batch is done (True), or `interrupt()` said so after a token (False).

        What was generated stays, and its keys and values are computed anew when the batch is advanced again.
        """
        request = batch.request
        rows = [row for row in batch.rows if not row.ended]
        left = request.max_tokens - max((len(row.ids) for row in rows), default=request.max_tokens)
        if not left:
            return True
        width, device = max(len(row.prompt) + len(row.ids) for row in rows), self._model.device
        tokens = torch.zeros(len(rows), width, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for place, row in enumerate(rows):
            known = row.prompt + row.ids
            tokens[place, width - len(known) :] = torch.tensor(known)
            mask[place, width - len(known) :] = 1
        # On the CPU's generator too, whatever the device: a seed must not change what other requests sample.
        devices = [device] if device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices, enabled=request.seed is not None):
            if request.seed is not None:
                torch.manual_seed(request.seed + batch.rounds)
            generate: Any = self._model.generate
            out = generate(
                tokens.to(device),
                attention_mask=mask.to(device),
                return_dict_in_generate=True,
                output_logits=request.logprobs is not None,
                max_new_tokens=left,
                stopping_criteria=StoppingCriteriaList([_Interrupt(interrupt)]),
                **self._options(request),
            )
        batch.rounds += 1
        made: list[list[int]] = out.sequences[:, width:].tolist()
        logprobs = _logprobs(out, width) if request.logprobs is not None else [[] for _ in rows]
        for row, ids, values in zip(rows, made, logprobs, strict=True):
            row.ids += ids
            row.logprobs += values
            self._end(request, row)
        return all(row.ended or len(row.ids) >= request.max_tokens for row in batch.rows)

    def finish(self, batch: Batch) -> Completion:
        """The answer, with what there is; rows that are not done were aborted."""
        request = batch.request
        choices = [self._choice(request, index, row) for index, row in enumerate(batch.rows)]
        asked = sum(len(row.prompt) for row in batch.rows[:: request.n])
        made = sum(len(row.ids) for row in batch.rows)
        return Completion(
            id=f"cmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self.name,
            system_fingerprint="step-" + ",".join(map(str, dict.fromkeys(batch.steps))),
            choices=choices,
            usage=Usage(prompt_tokens=asked, completion_tokens=made, total_tokens=asked + made),
        )

    def complete(self, request: CompletionRequest, prompts: list[list[int]], step: int) -> Completion:
        """All of it, uninterrupted."""
        batch = self.begin(request, prompts, step)
        self.advance(batch)
        return self.finish(batch)

    def _options(self, request: CompletionRequest) -> dict[str, Any]:
        options: dict[str, Any] = {
            "do_sample": request.temperature > 0,
            "pad_token_id": min(self._eos, default=0),
            "eos_token_id": sorted(self._eos) if self._eos and not request.ignore_eos else None,
        }
        if request.temperature:
            options |= {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
        if request.stops:
            options |= {"stop_strings": request.stops, "tokenizer": self._tokenizer}
        return options

    def _end(self, request: CompletionRequest, row: Row) -> None:
        """Cuts off what a row was padded with after its end, as rows that end early are."""
        ends = [place + 1 for place, token in enumerate(row.ids) if token in self._eos and not request.ignore_eos][:1]
        if request.stops and any(stop in self._text(row.ids) for stop in request.stops):
            counts = range(1, len(row.ids) + 1)
            ends += [c for c in counts if any(stop in self._text(row.ids[:c]) for stop in request.stops)][:1]
        if ends:
            row.ended = True
            del row.ids[min(ends) :], row.logprobs[min(ends) :]

    def _text(self, ids: list[int]) -> str:
        return "" if self._tokenizer is None else str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _choice(self, request: CompletionRequest, index: int, row: Row) -> Choice:
        text = self._text(row.ids)
        places = [text.find(stop) for stop in request.stops if stop in text]
        # An embedding that is padded has ids that no tokenizer knows.
        known = self._tokenizer.convert_ids_to_tokens(row.ids) if self._tokenizer is not None else row.ids
        pieces = [piece if isinstance(piece, str) else "" for piece in known]
        whole = len(row.ids) >= request.max_tokens
        return Choice(
            index=index,
            text=text[: min(places)] if places else text,
            finish_reason="stop" if row.ended else "length" if whole else "abort",
            logprobs=Logprobs(tokens=pieces, token_logprobs=row.logprobs) if request.logprobs is not None else None,
            token_ids=row.ids if request.return_token_ids else None,
            prompt_token_ids=row.prompt if request.return_token_ids else None,
        )


class _Interrupt(StoppingCriteria):
    """Asked after each token of a batch."""

    def __init__(self, interrupt: Callable[[], bool]) -> None:
        self._interrupt = interrupt

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._interrupt(), dtype=torch.bool, device=input_ids.device)


def _logprobs(out: Any, width: int) -> list[list[float]]:
    """Of the chosen tokens, under the model's own distribution: before temperature, top_p and top_k."""
    chosen = out.sequences[:, width:]
    found = [
        logits.float().log_softmax(-1).gather(-1, chosen[:, place : place + 1])
        for place, logits in enumerate(out.logits)
    ]
    values: list[list[float]] = torch.cat(found, dim=1).tolist()
    return values


def _invalid(message: str) -> Refusal:
    return Refusal(400, "invalid_request_error", message)
