"""Base of every model of the API: camelCase on the wire, unknown fields refused, CEL rules attached."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationInfo, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


@dataclass(frozen=True)
class Rule:
    """One validation rule, written once for both judges of a manifest.

    The API server evaluates `cel` (it is put into the CRD as `x-kubernetes-validations`);
    `weightsync run` evaluates `holds` on the model. Both answer with `message`.
    A transition rule compares with the stored object (`oldSelf`), which only the API server
    has: its `holds` is None. `field`, dotted and in camelCase, is what the sentence is about
    when that is a field below the model's own.
    """

    message: str
    cel: str
    holds: Callable[[Any], bool] | None
    field: str = ""

    def schema(self) -> dict[str, str]:
        """The entry of `x-kubernetes-validations`."""
        path = {"fieldPath": f".{self.field}"} if self.field else {}
        return {"rule": self.cel, "message": self.message, **path}


DEFER_RULES = {"defer_rules": True}
"""Validation context with which only types and bounds are checked; `broken_rules` then tells every broken rule."""


def _raise_broken(rules: tuple[Rule, ...], value: Any, info: ValidationInfo) -> None:
    if info.context and info.context.get("defer_rules"):
        return
    broken = [rule.message for rule in rules if rule.holds and not rule.holds(value)]
    if broken:
        # One error that holds every broken rule: pydantic keeps only the first that a validator raises.
        raise PydanticCustomError("rule", "{sentences}", {"sentences": "\n".join(broken)})


@dataclass(frozen=True)
class Ruled:
    """Annotation that attaches rules to a field which is no model, such as a quantity."""

    rules: tuple[Rule, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def check(value: Any, info: ValidationInfo) -> Any:
            _raise_broken(self.rules, value, info)
            return value

        return core_schema.with_info_after_validator_function(check, handler(source))


class ApiModel(BaseModel):
    """A part of the resource. Subclasses list their cross-field rules in `rules`."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid")

    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        """The API server drops the nulls of known fields and then fills in defaults: so do we."""
        if not isinstance(data, dict) or None not in data.values():
            return data
        known = {name for key, field in cls.model_fields.items() for name in (key, field.alias)}
        return {key: value for key, value in data.items() if value is not None or key not in known}

    @model_validator(mode="after")
    def _check_rules(self, info: ValidationInfo) -> Self:
        _raise_broken(self.rules, self, info)
        return self


class StatusModel(BaseModel):
    """A part of what is reported. Unknown fields are ignored, so that a newer peer's report still reads.

    It has none of ApiModel's validators, since agents make these on a step's path, and so never any rules.
    """

    rules: ClassVar[tuple[Rule, ...]] = ()

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore")


def model_of(annotation: Any) -> type[ApiModel] | None:
    """The ApiModel that a field holds: as it is, or None in its place, or a list of it; None: it holds no model."""
    inner = inner_type(annotation)
    if get_origin(inner) is list:
        (inner,) = get_args(inner)
    return inner if isinstance(inner, type) and issubclass(inner, ApiModel) else None


def inner_type(annotation: Any) -> Any:
    """The type itself, without `| None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (part for part in get_args(annotation) if part is not type(None))
    return annotation


def broken_rules(model: ApiModel, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Rule]]:
    """Every rule that `model` breaks, as (path in camelCase, value at the path, rule).

    A model's own rules come before those of its fields, in the API server's order. To be used on a
    model validated with the context DEFER_RULES.
    """
    for rule in model.rules:
        if rule.holds and not rule.holds(model):
            yield (*path, *(rule.field.split(".") if rule.field else ())), model, rule
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        here = (*path, field.alias or name)
        for annotation in field.metadata:
            if isinstance(annotation, Ruled):
                yield from ((here, value, rule) for rule in annotation.rules if rule.holds and not rule.holds(value))
        if isinstance(value, ApiModel):
            yield from broken_rules(value, here)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, ApiModel):
                    yield from broken_rules(item, (*path, f"{here[-1]}[{index}]"))
