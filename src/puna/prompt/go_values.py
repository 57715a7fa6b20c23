"""Values as Go's text/template sees them: truth, fields, printing, JSON and comparison.

Text is str, numbers are int and float, nil is None, a slice is a list, a map is a dict; a Struct has a fixed set of fields,
and asking for another one is an error. Struct, JsonList and JsonDict print as JSON, as the types of Ollama's API do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

NO_VALUE = "<no value>"


class GoError(Exception):
    """Raised inside an evaluation; the interpreter adds the line."""


class Struct:
    """A Go struct: fields by their Go names, and the plain data its JSON form shows."""

    def __init__(self, name: str, fields: Mapping[str, Any], plain: Any) -> None:
        self.name = name
        self.fields = fields
        self.plain = plain


class JsonList(list[Any]):
    """A slice that prints as JSON."""


class JsonDict(dict[str, Any]):
    """A map that prints as JSON."""


def is_true(value: Any) -> bool:
    return isinstance(value, Struct) or bool(value)


def type_name(value: Any) -> str:
    if isinstance(value, Struct):
        return value.name
    names: tuple[tuple[type, str], ...] = (
        (bool, "bool"),
        (int, "int"),
        (float, "float64"),
        (str, "string"),
        (list, "slice"),
        (dict, "map"),
    )
    return next((name for kind, name in names if isinstance(value, kind)), "nil")


def field(value: Any, name: str) -> Any:
    """Errors: GoError where Go has one: a field of nil or of a scalar, or one that a struct lacks."""
    if isinstance(value, dict):
        return value.get(name)
    if isinstance(value, Struct) and name in value.fields:
        return value.fields[name]
    if value is None:
        raise GoError(f"nil has no field {name}")
    raise GoError(f"can't evaluate field {name} in type {type_name(value)}")


def shown(value: Any, nil: str = "<nil>") -> str:
    """What ``%v`` prints."""
    match value:
        case None:
            text = nil
        case bool():
            text = "true" if value else "false"
        case float():
            text = _shown_float(value)
        case Struct() | JsonList() | JsonDict():
            text = to_json(value)
        case list():
            text = "[" + " ".join(shown(item) for item in value) + "]"
        case dict():
            text = "map[" + " ".join(f"{key}:{shown(value[key])}" for key in sorted(value)) + "]"
        case _:
            text = str(value)
    return text


def _shown_float(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    exponent = math.floor(math.log10(abs(value))) if value else 0
    if -4 <= exponent < 21:
        return str(int(value)) if value == int(value) else f"{value:.17f}".rstrip("0") if "e" in repr(value) else repr(value)
    mantissa, _, power = repr(value).partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(power):+03d}" if power else f"{value:e}"


def to_json(value: Any) -> str:
    """Compact JSON with ``<``, ``>`` and ``&`` escaped and maps in the order of their keys, as Go's encoder writes it.

    Errors: GoError for numbers JSON does not have.
    """
    try:
        text = json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise GoError(f"json: {error}") from error
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _plain(value: Any) -> Any:
    if isinstance(value, Struct):
        return _plain_struct(value.plain)
    if isinstance(value, dict):
        return {str(key): _plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
        return int(value)
    return value


def _plain_struct(plain: Any) -> Any:
    """A struct's own keys keep their order."""
    return {key: _plain(item) for key, item in plain.items()} if isinstance(plain, dict) else _plain(plain)


def equal(left: Any, right: Any) -> bool:
    """Errors: GoError for values of different kinds, and for slices and maps."""
    if left is None or right is None:
        return left is None and right is None
    if _kind(left) != _kind(right):
        raise GoError("incompatible types for comparison")
    return bool(left == right)


def less(left: Any, right: Any) -> bool:
    """Errors: GoError for values of different kinds, and for what has no order."""
    kind = _kind(left)
    if kind == "bool":
        raise GoError("invalid type for comparison")
    if kind != _kind(right):
        raise GoError("incompatible types for comparison")
    return bool(left < right)


def _kind(value: Any) -> str:
    for kind, name in ((bool, "bool"), (int, "int"), (float, "float"), (str, "string")):
        if isinstance(value, kind):
            return name
    raise GoError(f"invalid type for comparison: {type_name(value)}")
