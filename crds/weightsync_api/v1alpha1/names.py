"""Rules that rename tensors: regular expressions in the part of their language that RE2 and Python's `re` share.

Whether a text is such an expression can be told by a regular expression of its own, so that the API server (CEL, RE2)
and `weightsync run` judge alike. Groups don't nest and only single characters repeat: no name takes exponential time.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from pydantic import Field

from ..base import ApiModel, Rule, Ruled

MAX_NAME_RULES = 32
MAX_EXPRESSION = 256

_CHARACTER = r"([A-Za-z0-9_./:-]|\\[.dw]|\[\^?(0-9|a-z|A-Z|[A-Za-z0-9_.])+\])[*+?]?"
EXPRESSION = rf"^\^?({_CHARACTER}|\(({_CHARACTER})+(\|({_CHARACTER})+)*\)\??)+\$?$"
"""Characters, `.`, `\\.`, `\\d`, `\\w`, classes such as [a-z0-9_], with `*`, `+` or `?`; groups with `|`; ^ and $."""

REPLACEMENT = r"^([A-Za-z0-9_./:-]|\\[1-9])*$"
r"""Characters, and \1 to \9: the text of a group."""


GROUPS = range(1, 10)


def _groups_exist(rule: NameRule) -> bool:
    groups = rule.pattern.count("(")
    return all(int(digit) <= groups for digit in re.findall(r"\\([1-9])", rule.replacement))


class NameRule(ApiModel):
    r"""Every match of `pattern` in a tensor's name becomes `replacement`."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            r"replacement names a group that pattern does not have: \1 is what the first (...) matched",
            # Written out: a comprehension over split() is beyond the API server's budget for a list's rules.
            " && ".join(
                rf"(!self.replacement.contains(r'\{n}') || self.pattern.matches(r'(\(.*){{{n}}}'))" for n in GROUPS
            ),
            _groups_exist,
        ),
    )

    pattern: Annotated[
        str,
        Ruled(
            (
                Rule(
                    r"must be a regular expression of characters, `.`, `\.`, `\d`, `\w`, [a-z], `*`, `+`, `?`, `^`, "
                    r"`$` and (a|b) that don't nest, such as ^model\.(.*)$",
                    f"self.matches(r'{EXPRESSION}')",
                    lambda text: re.fullmatch(EXPRESSION, text) is not None,
                ),
            )
        ),
    ] = Field(max_length=MAX_EXPRESSION, description=r"Regular expression, such as ^model\.(.*)$.")
    replacement: Annotated[
        str,
        Ruled(
            (
                Rule(
                    r"must be letters, digits, `_`, `.`, `-`, `/`, `:` and groups such as \1",
                    f"self.matches(r'{REPLACEMENT}')",
                    lambda text: re.fullmatch(REPLACEMENT, text) is not None,
                ),
            )
        ),
    ] = Field(
        max_length=MAX_EXPRESSION,
        description=r"What stands there instead; \1 to \9 are the pattern's groups. "
        "A tensor whose name becomes empty is not sent.",
    )
