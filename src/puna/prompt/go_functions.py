"""The functions templates may call: those of Go's text/template, and the four that Ollama adds.

Each takes the Budget and its evaluated arguments. ``and`` and ``or`` are absent: they do not evaluate all of theirs.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from typing import Any
from urllib.parse import quote_plus

from puna.prompt.go_values import GoError, Struct, equal, is_true, less, shown, to_json, type_name
from puna.prompt.limits import Budget

MAX_WIDTH = 1000

Function = Callable[[Budget, Sequence[Any]], Any]

_VERB = re.compile(r"%(?P<flags>[-+# 0]*)(?P<width>\d{0,9})(?:\.(?P<precision>\d{0,9}))?(?P<verb>.|$)", re.DOTALL)
_JS_ESCAPES = {"\\": "\\\\", "'": "\\'", '"': '\\"', "<": "\\u003C", ">": "\\u003E", "&": "\\u0026", "=": "\\u003D", "\n": "\\n"}


def call(name: str, budget: Budget, arguments: Sequence[Any]) -> Any:
    """Errors: GoError from the function, or for a wrong number of arguments."""
    function, least, most = FUNCTIONS[name]
    if not least <= len(arguments) <= most:
        expected = str(least) if least == most else f"at least {least}" if len(arguments) < least else f"at most {most}"
        raise GoError(f"wrong number of arguments for {name}: want {expected}, got {len(arguments)}")
    return function(budget, arguments)


def _not(_: Budget, arguments: Sequence[Any]) -> bool:
    return not is_true(arguments[0])


def _eq(_: Budget, arguments: Sequence[Any]) -> bool:
    first, *others = arguments
    return any(equal(first, other) for other in others)


def _ne(_: Budget, arguments: Sequence[Any]) -> bool:
    return not equal(arguments[0], arguments[1])


def _lt(_: Budget, arguments: Sequence[Any]) -> bool:
    return less(arguments[0], arguments[1])


def _le(_: Budget, arguments: Sequence[Any]) -> bool:
    return less(arguments[0], arguments[1]) or equal(arguments[0], arguments[1])


def _gt(budget: Budget, arguments: Sequence[Any]) -> bool:
    return not _le(budget, arguments)


def _ge(budget: Budget, arguments: Sequence[Any]) -> bool:
    return not _lt(budget, arguments)


def _len(_: Budget, arguments: Sequence[Any]) -> int:
    value = arguments[0]
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, list | dict):
        return len(value)
    raise GoError(f"len of type {type_name(value)}")


def _index(_: Budget, arguments: Sequence[Any]) -> Any:
    value, *keys = arguments
    for key in keys:
        if isinstance(value, dict):
            value = value.get(key) if isinstance(key, str) else None
            continue
        items = value.encode() if isinstance(value, str) else value
        if not isinstance(items, list | bytes):
            raise GoError(f"can't index item of type {type_name(value)}")
        value = items[_position(key, len(items) - 1)]
    return value


def _slice(budget: Budget, arguments: Sequence[Any]) -> Any:
    value, *bounds = arguments
    items = value.encode() if isinstance(value, str) else value
    if not isinstance(items, list | bytes):
        raise GoError(f"can't slice item of type {type_name(value)}")
    begin = _position(bounds[0], len(items)) if bounds else 0
    end = _position(bounds[1], len(items)) if len(bounds) > 1 else len(items)
    if begin > end:
        raise GoError(f"invalid slice index: {begin} > {end}")
    budget.text(end - begin)
    part = items[begin:end]
    return part.decode(errors="replace") if isinstance(part, bytes) else type(value)(part)


def _position(index: Any, last: int) -> int:
    if isinstance(index, bool) or not isinstance(index, int):
        raise GoError(f"cannot index slice/array with type {type_name(index)}")
    if not 0 <= index <= last:
        raise GoError(f"index out of range: {index}")
    return index


def _print(budget: Budget, arguments: Sequence[Any]) -> str:
    """Like Go's Sprint: a space between two arguments when neither is a string."""
    parts: list[str] = []
    for i, argument in enumerate(arguments):
        if i and not isinstance(argument, str) and not isinstance(arguments[i - 1], str):
            parts.append(" ")
        parts.append(shown(argument))
    budget.text(sum(map(len, parts)))
    return "".join(parts)


def _println(budget: Budget, arguments: Sequence[Any]) -> str:
    parts = [shown(argument) for argument in arguments]
    budget.text(sum(map(len, parts)) + len(parts))
    return " ".join(parts) + "\n"


def _printf(budget: Budget, arguments: Sequence[Any]) -> str:
    template, *values = arguments
    if not isinstance(template, str):
        raise GoError("printf needs a string to start with")
    waiting = list(reversed(values))
    parts: list[str] = []
    position = 0
    for found in _VERB.finditer(template):
        parts.append(template[position : found.start()])
        position = found.end()
        parts.append(_formatted(found, waiting))
        budget.text(len(parts[-1]))
    parts.append(template[position:])
    if waiting:
        parts.append("%!(EXTRA " + ", ".join(f"{type_name(v)}={shown(v)}" for v in reversed(waiting)) + ")")
    budget.text(sum(map(len, parts)))
    return "".join(parts)


def _formatted(found: re.Match[str], waiting: list[Any]) -> str:
    verb, flags = found["verb"], found["flags"]
    if verb == "%":
        return "%"
    if not verb:
        return "%!(NOVERB)"
    if not waiting:
        return f"%!{verb}(MISSING)"
    width = int(found["width"] or 0)
    precision = int(found["precision"] or 0) if found["precision"] is not None else None
    if max(width, precision or 0) > MAX_WIDTH:
        raise GoError(f"a format wider than {MAX_WIDTH} is not allowed")
    text = _verb(verb, waiting.pop(), precision)
    if "+" in flags and verb in "df" and not text.startswith("-"):
        text = "+" + text
    if "-" in flags:
        return text.ljust(width)
    return text.zfill(width) if "0" in flags and verb in "dfx" else text.rjust(width)


def _verb(verb: str, value: Any, precision: int | None) -> str:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    text: str | None = None
    if verb == "v" or (verb == "s" and not (is_int or isinstance(value, bool | float | None))):
        text = shown(value)[:precision] if verb == "s" else shown(value)
    elif verb == "q" and isinstance(value, str):
        text = to_quoted(value)
    elif verb == "d" and is_int:
        text = str(value)
    elif verb == "t" and isinstance(value, bool):
        text = shown(value)
    elif verb in "fFeEgG" and isinstance(value, float):
        text = f"{value:.{6 if precision is None else precision}{verb}}"
    elif verb in "xX" and (is_int or isinstance(value, str)):
        text = format(value, verb) if is_int else value.encode().hex()
    elif verb == "c" and is_int and 0 <= value < 0x110000:
        text = chr(value)
    return f"%!{verb}({type_name(value)}={shown(value)})" if text is None else text


def to_quoted(text: str) -> str:
    """A Go string constant."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return '"' + "".join(escapes.get(c) or (c if c.isprintable() else f"\\u{ord(c):04x}") for c in text) + '"'


def _html(budget: Budget, arguments: Sequence[Any]) -> str:
    escaped = html.escape(_print(budget, arguments), quote=False)
    return escaped.replace('"', "&#34;").replace("'", "&#39;").replace("\0", "\ufffd")


def _js(budget: Budget, arguments: Sequence[Any]) -> str:
    text = _print(budget, arguments)
    return "".join(_JS_ESCAPES.get(c) or (f"\\u{ord(c):04X}" if c < " " else c) for c in text)


def _urlquery(budget: Budget, arguments: Sequence[Any]) -> str:
    return quote_plus(_print(budget, arguments), safe="~")


def _call(_: Budget, arguments: Sequence[Any]) -> Any:
    raise GoError(f"call of a {type_name(arguments[0])}, which is no function")


def _json(budget: Budget, arguments: Sequence[Any]) -> str:
    text = to_json(arguments[0])
    budget.text(len(text))
    return text


def _current_date(_: Budget, __: Sequence[Any]) -> str:
    return date.today().isoformat()


def _yesterday_date(_: Budget, __: Sequence[Any]) -> str:
    return (date.today() - timedelta(days=1)).isoformat()


def _to_typescript_type(_: Budget, arguments: Sequence[Any]) -> str:
    value = arguments[0]
    plain = value.plain if isinstance(value, Struct) else value
    if not isinstance(plain, dict):
        raise GoError(f"toTypeScriptType needs a property, not a {type_name(value)}")
    return typescript_type(plain)


def typescript_type(schema: dict[str, Any]) -> str:
    """The TypeScript type of a JSON-Schema property; alternatives are joined with a bar."""
    alternatives = schema.get("anyOf")
    if isinstance(alternatives, list) and alternatives:
        return " | ".join(typescript_type(item) for item in alternatives if isinstance(item, dict))
    kinds = schema.get("type") or []
    names = {
        "string": "string",
        "number": "number",
        "integer": "number",
        "boolean": "boolean",
        "array": "any[]",
        "object": "Record<string, any>",
        "null": "null",
    }
    listed = kinds if isinstance(kinds, list) else [kinds]
    return " | ".join(names.get(str(kind), "any") for kind in listed) or "any"


_MANY = 1 << 20
FUNCTIONS: dict[str, tuple[Function, int, int]] = {
    "not": (_not, 1, 1),
    "eq": (_eq, 2, _MANY),
    "ne": (_ne, 2, 2),
    "lt": (_lt, 2, 2),
    "le": (_le, 2, 2),
    "gt": (_gt, 2, 2),
    "ge": (_ge, 2, 2),
    "len": (_len, 1, 1),
    "index": (_index, 1, _MANY),
    "slice": (_slice, 1, 3),
    "print": (_print, 0, _MANY),
    "printf": (_printf, 1, _MANY),
    "println": (_println, 0, _MANY),
    "html": (_html, 0, _MANY),
    "js": (_js, 0, _MANY),
    "urlquery": (_urlquery, 0, _MANY),
    "call": (_call, 1, _MANY),
    "json": (_json, 1, 1),
    "currentDate": (_current_date, 0, _MANY),
    "yesterdayDate": (_yesterday_date, 0, _MANY),
    "toTypeScriptType": (_to_typescript_type, 1, 1),
}
NAMES = (*FUNCTIONS, "and", "or")
