"""Base of every model of the API: camelCase on the wire, unknown fields refused, CEL rules attached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError


@dataclass(frozen=True)
class Rule:
    """One validation rule, written once for both judges of a manifest.

    The API server evaluates `cel` (it is put into the CRD as `x-kubernetes-validations`);
    `weightsync run` evaluates `holds` on the model. Both answer with `message`.
    A transition rule compares with the stored object (`oldSelf`), which only the API server
    has: its `holds` is None.
    """

    message: str
    cel: str
    holds: Callable[[Any], bool] | None


class ApiModel(BaseModel):
    """A part of the resource. Subclasses list their cross-field rules in `rules`."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid")

    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = [rule.message for rule in self.rules if rule.holds and not rule.holds(self)]
        if broken:
            # One error that holds every broken rule: pydantic keeps only the first that a validator raises.
            raise PydanticCustomError("rule", "{sentences}", {"sentences": "\n".join(broken)})
        return self


class StatusModel(ApiModel):
    """A part of what is reported. Unknown fields are ignored, so that a newer peer's report still reads."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore")
