"""The options that PARAMETER lines and create requests set, in their text forms.

Which options exist, and of which type, is puna.api.options' to say; what they do is the server's and the runner's business.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from puna.api.options import Options, OptionTypeError, merge, warnings
from puna.errors import BadRequest

log = logging.getLogger(__name__)

TYPES = {item.name: str(item.type).removesuffix(" | None") for item in fields(Options)}
LISTS = frozenset(name for name, kind in TYPES.items() if kind == "list[str]")
_TRUE = frozenset(("1", "t", "T", "TRUE", "true", "True"))
_FALSE = frozenset(("0", "f", "F", "FALSE", "false", "False"))
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
_FLOAT = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")


def parse(name: str, text: str) -> Any:
    """The value of a PARAMETER line; one ``stop`` line gives one string.

    Errors: BadRequest for an unknown name or a value of the wrong type.
    """
    kind = TYPES.get(name)
    if kind is None:
        raise BadRequest(f"unknown parameter '{name}'")
    if name in LISTS:
        return text
    if kind.startswith("dict"):
        return _object(name, text)
    if kind == "int" and _INTEGER.fullmatch(text) and -(1 << 63) <= int(text) < 1 << 63:
        return int(text)
    if kind == "float" and _FLOAT.fullmatch(text) and abs(float(text)) < 1 << 63:
        return float(text)
    if kind == "bool" and text in _TRUE | _FALSE:
        return text in _TRUE
    raise BadRequest(f"invalid {kind} value [{text}]")


def _object(name: str, text: str) -> Any:
    try:
        return getattr(merge({name: json.loads(text)}), name)
    except (ValueError, RecursionError, OptionTypeError) as error:
        raise BadRequest(f"invalid {name} value [{text[:100]}]: a JSON object from tokens' numbers to numbers") from error


def check(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values from JSON with their types checked; unknown names are logged, they and nulls left out.

    Errors: OptionTypeError naming the option and the type it must have.
    """
    checked = merge(values)
    for text in warnings(values):
        log.warning("%s", text)
    return {name: getattr(checked, name) for name, value in values.items() if name in TYPES and value is not None}


def lines(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """One pair per line of a Modelfile or of show's output: lists become several, names are in order."""
    pairs: list[tuple[str, Any]] = []
    for name in sorted(values):
        value = values[name]
        pairs.extend((name, item) for item in value) if isinstance(value, list) else pairs.append((name, value))
    return pairs


def number_text(value: Any) -> str:
    """A number, boolean or object as Go prints it: whole floats without a point."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return json.dumps(value, separators=(",", ":"))
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
        return str(int(value))
    return str(value)


_ESCAPES = {"\\": "\\\\", '"': '\\"', "\a": "\\a", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\v": "\\v"}


def quoted(text: str) -> str:
    """A string as Go quotes it."""
    return '"' + "".join(_escaped(character) for character in text) + '"'


def _escaped(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character.isprintable():
        return character
    code = ord(character)
    if code < 0x80:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def text(values: Mapping[str, Any]) -> str:
    """The ``parameters`` field of show: a line per value, the name padded to 30 columns, strings quoted."""
    return "\n".join(
        f"{name:<30} {quoted(value) if isinstance(value, str) else number_text(value)}" for name, value in lines(values)
    )
