"""YAML documents of a manifest file, read as kubectl reads them, from bytes that nobody has to trust.

Scalars are resolved as in go-yaml v2, which kubectl uses: no dates, no base-60 numbers, `y` and `n` are booleans;
2.0 becomes 2 on the way to JSON. Size, depth, number of documents and what aliases expand to are bounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import yaml

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

MAX_BYTES = 1 << 20
MAX_DEPTH = 64
MAX_DOCUMENTS = 100
MAX_VALUES = 100_000
"""Values of one document, with aliases written out."""

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_MERGE = "tag:yaml.org,2002:merge"


class DocumentError(Exception):
    """The bytes are no YAML that could be a manifest. The text is one sentence without the file's name."""


class _Loader(_Base):  # type: ignore[misc]
    """Scalars, lists and mappings only: any other tag is refused by name."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        """Keys become text at once: in a dict of Python's, 1 and true would be the same key."""
        self.flatten_mapping(node)
        return {_key(self.construct_object(key, True)): self.construct_object(item, deep) for key, item in node.value}


_RESOLVERS = {
    "bool": (r"[yY]|yes|Yes|YES|true|True|TRUE|on|On|ON|[nN]|no|No|NO|false|False|FALSE|off|Off|OFF", "yYtTfFoOnN"),
    "null": (r"|~|null|Null|NULL", ["", "~", "n", "N"]),
    "int": (r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]+|0|[1-9][0-9_]*)", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9_]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "merge": (r"<<", "<"),
}
_Loader.yaml_implicit_resolvers = {}
for _tag, (_pattern, _first) in _RESOLVERS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def _integer(loader: Any, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node).replace("_", "").lower()
    sign, digits = (-1 if text.startswith("-") else 1), text.lstrip("+-")
    for prefix, base in (("0x", 16), ("0b", 2), ("0o", 8), ("0", 8)):
        if digits.startswith(prefix) and digits != "0":
            return sign * int(digits[len(prefix) :], base)
    return sign * int(digits)


def _boolean(loader: Any, node: yaml.ScalarNode) -> bool:
    return loader.construct_scalar(node).lower() in ("y", "yes", "true", "on")


_PLAIN = {name: _Base.yaml_constructors[f"tag:yaml.org,2002:{name}"] for name in ("null", "float", "str", "seq", "map")}
_Loader.yaml_constructors = {None: _Base.yaml_constructors[None]}
for _tag, _constructor in _PLAIN.items():
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _constructor)
_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:bool", _boolean)


def read_documents(data: bytes) -> Iterator[tuple[int, Any]]:
    """Each document that is not empty, as (its number from 1, a tree of JSON values).

    Raises DocumentError, which ends the reading: what precedes it has been yielded.
    """
    if len(data) > MAX_BYTES:
        raise DocumentError(f"is larger than {MAX_BYTES >> 20} MiB: that is no manifest")
    loader = _Loader(_text(data))
    try:
        number = 0
        while loader.check_node():
            number += 1
            if number > MAX_DOCUMENTS:
                raise DocumentError(f"holds more than {MAX_DOCUMENTS} documents")
            node = loader.get_node()
            _expanded(node, {}, 0)
            value = _json(loader.construct_document(node))
            if value is not None:
                yield number, value
    except yaml.YAMLError as error:
        raise DocumentError(f"is no YAML: {_one_line(error)}") from None
    except RecursionError:
        raise DocumentError(f"is nested deeper than {MAX_DEPTH} levels") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        # A value that contradicts its own explicit tag, such as `!!int ""`.
        raise DocumentError(f"is no YAML: a tagged value can't be read ({str(error)[:80]})") from None
    finally:
        loader.dispose()


def _text(data: bytes) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"is no text: byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8"
        ) from None
    control = _CONTROL.search(text)
    if control:
        raise DocumentError(f"is no text: control character 0x{ord(control[0]):02x} in line {_line(text, control)}")
    return text


def _line(text: str, match: re.Match[str]) -> int:
    return text.count("\n", 0, match.start()) + 1


def _expanded(node: yaml.Node, sizes: dict[int, int], depth: int) -> int:
    """Values in the tree under `node` with aliases written out; refuses cycles, depth, size and repeated keys."""
    if id(node) in sizes:
        if not sizes[id(node)]:
            raise DocumentError(f"line {node.start_mark.line + 1}: an anchor holds an alias of itself")
        return sizes[id(node)]
    if depth > MAX_DEPTH:
        raise DocumentError(f"line {node.start_mark.line + 1}: nested deeper than {MAX_DEPTH} levels")
    sizes[id(node)] = 0
    total = 1
    if isinstance(node, yaml.MappingNode):
        _refuse_repeated_keys(node)
        for key, value in node.value:
            total += _expanded(key, sizes, depth + 1) + _expanded(value, sizes, depth + 1)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            total += _expanded(item, sizes, depth + 1)
    if total > MAX_VALUES:
        raise DocumentError(f"line {node.start_mark.line + 1}: holds more than {MAX_VALUES} values")
    sizes[id(node)] = total
    return total


def _refuse_repeated_keys(node: yaml.MappingNode) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise DocumentError(f"line {key.start_mark.line + 1}: a key must be text")
        line = key.start_mark.line + 1
        if key.tag != _MERGE and key.value in lines:
            raise DocumentError(f'line {line}: key "{key.value}" is already set in line {lines[key.value]}')
        lines[key.value] = line


def _json(value: Any) -> Any:
    """The value as JSON has it. Raises DocumentError for what JSON can't hold."""
    if isinstance(value, dict):
        return {key: _json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise DocumentError("holds a number that is infinite or none")
        return int(value) if value.is_integer() and abs(value) < 2**63 else value
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**63:
        return float(value)
    if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        raise DocumentError("holds half a character (a lone surrogate)")
    return value


def _key(key: Any) -> str:
    if isinstance(key, bool):
        return "true" if key else "false"
    if not isinstance(key, str | int | float):
        raise DocumentError("holds a key that is null")
    return str(_json(key))


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "it can't be parsed"
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return where + " ".join(str(problem).split())
