"""Values as models write them: JSON, JSON with a bracket missing at the end, or Python literals.

What comes out can always be written as JSON again: whole characters, numbers that fit, bounded depth.
"""

from __future__ import annotations

import json
import math
from typing import Any

from puna.prompt.tools.python_values import MAX_DEPTH, read_value

_INT_LIMIT = 1 << 63
_CLOSERS = {"{": "}", "[": "]", "(": ")"}


class _Opening:
    """Which brackets of a text are open, outside of strings."""

    def __init__(self, text: str) -> None:
        self.stack: list[str] = []
        self.in_string = False
        self.deepest = 0
        escaped = False
        for character in text:
            if self.in_string:
                self.in_string = escaped or character != '"'
                escaped = character == "\\" and not escaped
            elif character == '"':
                self.in_string, escaped = True, False
            elif character in _CLOSERS:
                self.stack.append(_CLOSERS[character])
                self.deepest = max(self.deepest, len(self.stack))
            elif self.stack and character == self.stack[-1]:
                self.stack.pop()


def _integer(text: str) -> int | float:
    try:
        value = int(text)
    except ValueError:  # thousands of digits
        return float(text)
    return value if -_INT_LIMIT <= value < _INT_LIMIT else float(text)


_decoder = json.JSONDecoder(strict=False, parse_int=_integer, parse_constant=lambda _: None)


def first_json(text: str, begin: int = 0) -> tuple[Any, int]:
    """The JSON value at *begin*, and where it ends.

    Errors: ValueError when there is none.
    """
    try:
        value, end = _decoder.raw_decode(text, begin)
    except (RecursionError, OverflowError) as error:
        raise ValueError("too deep or too large") from error
    return clean(value), end


def lenient(text: str) -> Any:
    """One value that fills all of *text*.

    Errors: ValueError.
    """
    body = text.strip()
    opening = _Opening(body)
    if opening.deepest > MAX_DEPTH:
        raise ValueError("too deep")
    for candidate in dict.fromkeys((body, body + ('"' if opening.in_string else "") + "".join(reversed(opening.stack)))):
        try:
            value, end = first_json(candidate)
        except ValueError:
            continue
        if not candidate[end:].strip(" \t\r\n,;") or not candidate[end:].strip(" \t\r\n}])"):
            return value  # a bracket too many is the commonest mistake of all
    return clean(read_value(body))


def clean(value: Any, depth: int = 0) -> Any:
    """Errors: ValueError for what is too deep."""
    if depth > MAX_DEPTH:
        raise ValueError("too deep")
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and not isinstance(value, bool):
        return value if -_INT_LIMIT <= value < _INT_LIMIT else float(value)
    if isinstance(value, list | tuple):
        return [clean(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {str(clean(key)): clean(item, depth + 1) for key, item in value.items()}
    if value is None or isinstance(value, bool):
        return value
    raise ValueError(f"no JSON: {type(value).__name__}")
