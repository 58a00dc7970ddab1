"""The request and response of an OpenAI-style `POST /v1/completions`, as far as the transformers engine serves them.

https://platform.openai.com/docs/api-reference/completions. `return_token_ids` and `ignore_eos` are vLLM's additions,
which trainers use: ids say what the policy did, and text does not.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

MAX_PROMPTS = 256
MAX_CHOICES = 1024
"""Sequences of one request: prompts times n."""

Tokens = Annotated[list[int], Field(min_length=1)]
Text = Annotated[str, StringConstraints(min_length=1)]


class CompletionRequest(BaseModel):
    """What is asked. Unknown fields are refused: one that is passed over would change what is sampled."""

    model_config = ConfigDict(extra="forbid")

    prompt: Text | Tokens | Annotated[list[Text], Field(min_length=1)] | Annotated[list[Tokens], Field(min_length=1)]
    model: str = ""
    max_tokens: int = Field(default=16, ge=1)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    temperature: float = Field(default=1.0, ge=0, le=2, description="0: greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, description="0: all.")
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: str | list[str] = Field(default_factory=list)
    logprobs: int | None = Field(default=None, ge=0, le=1, description="Of the chosen tokens, at temperature 1.")
    ignore_eos: bool = False
    return_token_ids: bool = False
    stream: Literal[False] = False
    user: str = ""

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):
            return [[token for token in prompt if isinstance(token, int)]]
        return prompt

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


class Logprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]


class Choice(BaseModel):
    index: int
    text: str
    finish_reason: Literal["stop", "length", "abort"]
    logprobs: Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(BaseModel):
    """What was generated."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str = Field(description="Whose weights: `step-5`, or `step-5,6` for what went on over a step.")
    choices: list[Choice]
    usage: Usage


class Refusal(Exception):
    """A request is not served; the text says why and what to do."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
