"""Reading and writing JSON as Ollama's clients expect it of a server written in Go.

Read: any content type, field names in any case, null means "not given", unknown fields ignored, text after the value
ignored, and errors worded like those of Go's decoder. Written: ``<``, ``>`` and ``&`` escaped, and what some clients take
for the end of a line.
Knows no request in particular.

Source: Ollama's REST API, "Global HTTP behaviour"; Go's encoding/json.
"""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from puna.errors import BadRequest

M = TypeVar("M", bound="Request")

MAX_DEPTH = 200  # of arrays and objects in one another
MAX_VALUES = 1 << 21  # in one body
_LONG_NUMBER = re.compile(rb"\d{19}")  # perhaps no integer of Go's
_INT64 = 1 << 63


class Request(BaseModel):
    """Base of what clients send, nested objects included."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _fold_names(cls, data: Any) -> Any:
        """Match field names in any case, an exact match winning, and leave nulls out."""
        if not isinstance(data, dict):
            return data
        found: dict[str, Any] = {}
        for name, value in data.items():
            field = name if name in cls.model_fields else name.lower()
            if value is not None and (field == name or field not in data):
                found[field] = value
        return found


def parse(kind: type[M], body: bytes) -> M:
    """Errors: BadRequest with Go's wording."""
    value = loads(body)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise BadRequest(_describe(kind, error.errors(include_url=False)[0], value)) from None


# Reading


def loads(body: bytes) -> Any:
    """The first JSON value in *body*.

    Errors: BadRequest; an empty body is ``missing request body``.
    """
    _check_count(body)
    if not _LONG_NUMBER.search(body):
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _checked_depth(msgspec.json.decode(body), body)
    return _loads_as_go_does(body)


def _check_count(body: bytes) -> None:
    """Errors: BadRequest for more values than any request has: each takes many times the memory of its text, and time.

    Counted by what looks like an end of a text or of a value, without decoding anything.
    """
    if len(body) <= 2 * MAX_VALUES:
        return
    rest = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    n_texts = rest.count(b'"') // 2
    if n_texts > MAX_VALUES or sum(part.count(b",") for part in rest.split(b'"')[::2]) > MAX_VALUES:
        raise BadRequest(f"the request body has more than {MAX_VALUES} values")


def _loads_as_go_does(body: bytes) -> Any:
    """What msgspec does not take: for Go's decoder some of it is sound, and the rest gets Go's errors."""
    text = body.decode("utf-8", "replace")
    begin = len(text) - len(text.lstrip(" \t\r\n"))
    if begin == len(text):
        raise BadRequest("missing request body")
    try:
        value, _ = _decoder.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        raise BadRequest(_syntax_error(error)) from None
    except (ValueError, RecursionError) as error:
        raise BadRequest("exceeded max depth" if isinstance(error, RecursionError) else str(error)) from None
    value = _checked_depth(value, body)
    return _without_surrogates(value) if _SURROGATE.search(text) else value


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _without_surrogates(value: Any) -> Any:
    """Half of a surrogate pair is no character: put U+FFFD in its place, as Go does."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"invalid character '{name.lstrip('-')[0]}' looking for beginning of value")


def _integer(text: str) -> float:
    """What no integer of Go's can hold is a number like 1.5, which fields for integers refuse."""
    number = int(text) if len(text) <= 20 else _INT64
    return number if -_INT64 <= number < _INT64 else _fraction(text)


def _fraction(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"json: cannot unmarshal number {text[:40]} into Go value of type float64")
    return number


_decoder = json.JSONDecoder(parse_constant=_no_constant, parse_int=_integer, parse_float=_fraction)


def _checked_depth(value: Any, body: bytes) -> Any:
    """Errors: BadRequest. Templates, grammars and encoders go down into a value step by step, so there must be an end."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return value
    level, depth = [value] if isinstance(value, dict | list) else [], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise BadRequest("exceeded max depth")
        inner = (node.values() if isinstance(node, dict) else node for node in level)
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
    return value


_EXPECTATIONS = {
    "Expecting value": "looking for beginning of value",
    "Expecting property name enclosed in double quotes": "looking for beginning of object key string",
    "Illegal trailing comma before end of object": "looking for beginning of object key string",
    "Illegal trailing comma before end of array": "looking for beginning of value",
    "Expecting ':' delimiter": "after object key",
    "Expecting ',' delimiter": "after object key:value pair",
    "Invalid control character at": "in string literal",
    "Invalid \\escape": "in string escape code",
    "Invalid \\uXXXX escape": "in \\u hexadecimal character escape",
}


def _syntax_error(error: json.JSONDecodeError) -> str:
    text, position = error.doc, error.pos
    if error.msg.startswith("Illegal trailing comma"):
        position += 1 + len(text[position + 1 :]) - len(text[position + 1 :].lstrip(" \t\r\n"))
    if position >= len(text) or error.msg.startswith("Unterminated string"):
        return "unexpected EOF"
    context = next((phrase for message, phrase in _EXPECTATIONS.items() if error.msg.startswith(message)), error.msg)
    character = text[position] if text[position] not in "'\\" else "\\" + text[position]
    return f"invalid character '{character}' {context}"


# Describing what is wrong with a value

_GO_TYPES = {
    "string_type": "string",
    "bool_type": "bool",
    "int_type": "int",
    "int_from_float": "int",
    "float_type": "float64",
    "list_type": "[]",
    "dict_type": "map[string]interface {}",
    "model_type": "struct",
    "model_attributes_type": "struct",
}


def _describe(kind: type[BaseModel], error: ErrorDetails, body: Any) -> str:
    if error["type"] == "value_error":  # from our own validators: the text is meant for the client
        return str(error["ctx"]["error"])
    where = ".".join(str(part) for part in error["loc"] if isinstance(part, str))
    wanted = _GO_TYPES.get(error["type"])
    if not where:
        return f"json: cannot unmarshal {_go_name(body)} into Go value of type api.{kind.__name__}"
    if wanted is None:
        return f"{where}: {error['msg']}"
    return f"json: cannot unmarshal {_go_name(error['input'])} into Go struct field {kind.__name__}.{where} of type {wanted}"


def _go_name(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, float):
        return f"number {value!r}"
    names: dict[type, str] = {str: "string", int: "number", dict: "object", list: "array", type(None): "null"}
    return names.get(type(value), "value")


# Writing

_encoder = msgspec.json.Encoder()

# NEL, LINE SEPARATOR and PARAGRAPH SEPARATOR end a line for whoever splits text as Unicode does, like Python's
# str.splitlines and httpx. Go escapes the latter two.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def dumps(value: Any) -> bytes:
    """Compact JSON on one line, whatever ends lines. What is escaped stands in strings only, so bytes can be replaced."""
    data = _encoder.encode(value)
    if b"<" in data or b">" in data or b"&" in data:
        data = data.replace(b"<", b"\\u003c").replace(b">", b"\\u003e").replace(b"&", b"\\u0026")
    if not data.isascii():
        for raw, escaped in _LINE_ENDS:
            data = data.replace(raw, escaped)
    return data
