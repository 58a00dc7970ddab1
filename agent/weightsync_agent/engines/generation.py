"""One completion request -> one batch through `generate`, or a Refusal that names what is wrong with it."""

from __future__ import annotations

import time
import uuid
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .completions import MAX_CHOICES, MAX_PROMPTS, Choice, Completion, CompletionRequest, Logprobs, Refusal, Usage


class Generator:
    """Generates with a live model, whatever its weights are at the moment. Used by one thread.

    Args:
        tokenizer: None: prompts are token ids, and texts come back empty.
        max_tokens: most new tokens of a request: a step waits until the request that runs is done.
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

    def complete(self, request: CompletionRequest, prompts: list[list[int]], step: int) -> Completion:
        """Generates for prompts that `check` gave. `step`: whose weights the model holds."""
        width, device = max(map(len, prompts)), self._model.device
        tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        # On the CPU's generator too, whatever the device: a seed must not change what other requests sample.
        devices = [device] if device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices, enabled=request.seed is not None):
            if request.seed is not None:
                torch.manual_seed(request.seed)
            generate: Any = self._model.generate
            out = generate(
                tokens.to(device),
                attention_mask=mask.to(device),
                return_dict_in_generate=True,
                output_logits=request.logprobs is not None,
                **self._options(request),
            )
        logprobs = _logprobs(out, width) if request.logprobs is not None else None
        rows: list[list[int]] = out.sequences[:, width:].tolist()
        choices = []
        for row, ids in enumerate(rows):
            prompt = prompts[row // request.n]
            choices.append(self._choice(request, row, ids, prompt, logprobs[row] if logprobs is not None else None))
        asked = sum(map(len, prompts))
        made = sum(len(choice.token_ids or ()) for choice in choices)
        if not request.return_token_ids:
            for choice in choices:
                choice.token_ids = choice.prompt_token_ids = None
        return Completion(
            id=f"cmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self.name,
            system_fingerprint=f"step-{step}",
            choices=choices,
            usage=Usage(prompt_tokens=asked, completion_tokens=made, total_tokens=asked + made),
        )

    def _options(self, request: CompletionRequest) -> dict[str, Any]:
        options: dict[str, Any] = {
            "max_new_tokens": request.max_tokens,
            "num_return_sequences": request.n,
            "do_sample": request.temperature > 0,
            "pad_token_id": min(self._eos, default=0),
            "eos_token_id": sorted(self._eos) if self._eos and not request.ignore_eos else None,
        }
        if request.temperature:
            options |= {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
        if request.stops:
            options |= {"stop_strings": request.stops, "tokenizer": self._tokenizer}
        return options

    def _choice(
        self, request: CompletionRequest, row: int, ids: list[int], prompt: list[int], logprobs: list[float] | None
    ) -> Choice:
        # Rows that end early are padded to the longest.
        end = next((place + 1 for place, token in enumerate(ids) if token in self._eos), None)
        if end is not None and not request.ignore_eos:
            ids = ids[:end]
        text = "" if self._tokenizer is None else self._tokenizer.decode(ids, skip_special_tokens=True)
        places = [text.find(stop) for stop in request.stops if stop in text]
        ended = (end is not None and not request.ignore_eos) or bool(places)
        # An embedding that is padded has ids that no tokenizer knows.
        known = self._tokenizer.convert_ids_to_tokens(ids) if self._tokenizer is not None else ids
        pieces = [piece if isinstance(piece, str) else "" for piece in known]
        return Choice(
            index=row,
            text=text[: min(places)] if places else text,
            finish_reason="stop" if ended else "length",
            logprobs=Logprobs(tokens=pieces, token_logprobs=logprobs[: len(ids)]) if logprobs is not None else None,
            token_ids=ids,
            prompt_token_ids=prompt,
        )


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
