"""Tool calls in a complete piece of text, in any of the forms that model families use.

JSON objects (``{"name": ..., "arguments": ...}`` and its relatives) alone, in lists or in sequence; a name followed by a
JSON object; XML-like functions with parameters; Python-like calls. Only tools that the request named are called.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from puna.prompt.output import Call
from puna.prompt.tools.notation import read_notation
from puna.prompt.tools.python_values import read_calls
from puna.prompt.tools.values import clean, first_json, lenient

Found = list[Call | str]  # calls, and texts in between that are none

_NAME_KEYS = ("name", "tool_name", "function_name", "tool", "function")
_ARGUMENT_KEYS = ("arguments", "parameters", "args", "input", "tool_input", "kwargs")
_DECORATION = re.compile(r"\[ARGS\]|\[CALL_ID\][\w-]*|```\w*|<[|｜][\w▁]+[|｜]>")
_NAME_CHARACTER = re.compile(r"[\w.:/-]")
_TAG = re.compile(r"<(/?)(function|invoke|parameter)([^<>]*)>")
_SEPARATORS = " \t\r\n,;"
_MAX_SEARCH_DEPTH = 8


@dataclass(frozen=True)
class Tool:
    """What must be known of a tool to recognise a call of it."""

    name: str
    kinds: Mapping[str, str]  # JSON type by parameter, in the tool's order


class Tools:
    """The tools of one request."""

    def __init__(self, described: Iterable[Mapping[str, Any]]) -> None:
        found = [_tool(item) for item in described]
        self._by_name = {tool.name: tool for tool in found if tool.name}

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def find(self, name: Any) -> Tool | None:
        """By its name, also with the prefix or the number that some models add."""
        if not isinstance(name, str):
            return None
        called = name.strip()
        for candidate in (called, called.removeprefix("functions."), re.sub(r":\d+$", "", called.removeprefix("functions."))):
            if candidate in self._by_name:
                return self._by_name[candidate]
        return self._by_name.get(re.sub(r"\.call$", "", called))


def _tool(described: Mapping[str, Any]) -> Tool:
    function = described.get("function")
    function = function if isinstance(function, dict) else {}
    name, schema = function.get("name"), function.get("parameters")
    properties = schema.get("properties") if isinstance(schema, dict) else None
    kinds = {
        str(key): value.get("type") if isinstance(value, dict) and isinstance(value.get("type"), str) else ""
        for key, value in (properties.items() if isinstance(properties, dict) else ())
    }
    return Tool(name if isinstance(name, str) else "", {key: kind or "" for key, kind in kinds.items()})


def find_calls(text: str, tools: Tools, *, is_marked: bool = True) -> Found:
    """All calls in *text* with what stands between them; nothing at all when there is no call.

    *is_marked*: the model said that this is a call, so a looser form is enough.
    """
    readers: tuple[Callable[[str, Tools], Found], ...] = (_json, _python)
    if is_marked:
        readers = (_json, _notation, _functions, _argument_pairs, _named, _python)
    for read in readers:
        try:
            found = read(text, tools) if read is not _json else _json(text, tools, is_marked=is_marked)
        except ValueError:
            continue
        if any(isinstance(part, Call) for part in found):
            return [part for part in found if isinstance(part, Call) or part.strip(_SEPARATORS)]
    return []


def call_of(name: str, arguments: str, tools: Tools) -> Call | None:
    """A call whose name came apart from its arguments."""
    tool = tools.find(name)
    if tool is None:
        return None
    try:
        value = lenient(arguments) if arguments.strip() else {}
    except ValueError:
        return None
    return Call(tool.name, value) if isinstance(value, dict) else None


def _json(text: str, tools: Tools, *, is_marked: bool = True) -> Found:
    body = text.strip(_SEPARATORS)
    if not body.startswith(("{", "[")):
        return []
    found: Found = []
    position = 0
    while position < len(body):
        try:
            value, end = first_json(body, position)
        except ValueError:
            if position == 0:
                return _in_value(lenient(body), body, tools, is_marked)
            return [*found, body[position:]]
        found += _in_value(value, body[position:end], tools, is_marked)
        position = end
        while position < len(body) and body[position] in _SEPARATORS:
            position += 1
        if position < len(body) and body[position] not in "{[":
            rest = body[position:]
            return found if not rest.strip("}] \t\r\n") else [*found, rest]
    return found


def _in_value(value: Any, text: str, tools: Tools, is_marked: bool) -> Found:
    if isinstance(value, list):
        found: Found = []
        for item in value:
            call = _from_object(item, tools, is_marked)
            found.append(call if call else _shown(item))
        return found if any(isinstance(part, Call) for part in found) else [text]
    if isinstance(value, dict) and isinstance(value.get("tool_calls"), list):
        return _in_value(value["tool_calls"], text, tools, is_marked)
    call = _from_object(value, tools, is_marked)
    return [call if call else text]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _from_object(value: Any, tools: Tools, is_marked: bool, depth: int = 0) -> Call | None:
    if not isinstance(value, dict) or depth > _MAX_SEARCH_DEPTH:
        return None
    for key in _NAME_KEYS:
        inner = value.get(key)
        if key == "function" and isinstance(inner, dict):
            return _from_object(inner, tools, is_marked, depth + 1)
        tool = tools.find(inner)
        if tool is not None:
            return _with_arguments(tool, value, key, is_marked)
    if len(value) == 1:
        ((name, arguments),) = value.items()
        tool = tools.find(name)
        if tool is not None and isinstance(arguments, dict):
            return Call(tool.name, arguments)
    return None


def _with_arguments(tool: Tool, value: dict[str, Any], name_key: str, is_marked: bool) -> Call | None:
    for key in (*_ARGUMENT_KEYS, tool.name):
        if key not in value or key == name_key:
            continue
        arguments = value[key]
        if isinstance(arguments, str):
            try:
                arguments = lenient(arguments) if arguments.strip() else {}
            except ValueError:
                return None
        if arguments is None:
            arguments = {}
        return Call(tool.name, arguments) if isinstance(arguments, dict) else None
    rest = {key: item for key, item in value.items() if key not in (name_key, "id", "type", "tool_call_id")}
    return Call(tool.name, rest) if is_marked else None


def _named(text: str, tools: Tools) -> Found:
    """``name {...}``, with the marks of the families around and between."""
    body = _DECORATION.sub(" ", text)
    found: Found = []
    position = 0
    brace = body.find("{")
    while brace >= 0:
        name = _name_before(body, position, brace)
        if not name:
            brace = body.find("{", brace + 1)
            continue
        try:
            value, end = first_json(body, brace)
        except ValueError:
            try:
                value, end = lenient(body[brace:]), len(body)
            except ValueError:
                break
        tool = tools.find(name)
        if tool is None or not isinstance(value, dict):
            found.append(body[position:end])
        else:
            found.append(Call(tool.name, value))
        position, brace = end, body.find("{", end)
    return [*found, body[position:]]


def _name_before(text: str, begin: int, end: int) -> str:
    """The name that ends, but for white space, at *end*. Read backwards, so that no character is looked at twice."""
    while end > begin and text[end - 1].isspace():
        end -= 1
    at = end
    while at > begin and _NAME_CHARACTER.match(text[at - 1]):
        at -= 1
    return text[at:end].lstrip("0123456789.:/-")


def _functions(text: str, tools: Tools) -> Found:
    """``<function=name><parameter=key>value</parameter></function>`` and ``<invoke name="...">``."""
    found: Found = []
    position = 0  # up to where the text is accounted for
    function: _Function | None = None

    def end_function(body_end: int, end: int) -> None:
        nonlocal position, function
        assert function is not None
        found.extend((text[position : function.begin], function.call(text, body_end, tools) or text[function.begin : end]))
        position, function = end, None

    for tag in _TAG.finditer(text):
        is_closing, kind, attributes = tag.groups()
        if kind == "parameter":
            if function is not None:
                function.parameter(text, tag.start(), "" if is_closing else _attribute(attributes), tag.end())
            continue
        if function is not None:
            end_function(tag.start(), tag.end() if is_closing else tag.start())
        name = "" if is_closing else _attribute(attributes)
        if name:
            function = _Function(name, tag.start(), tag.end())
    if function is not None:
        end_function(len(text), len(text))
    return [*found, text[position:]]


def _attribute(text: str) -> str:
    """The name in ``=name`` or `` name="name"``; nothing for anything else."""
    key, _, value = text.partition("=")
    return value.strip().strip("\"'") if key.strip() in ("", "name") else ""


class _Function:
    """A function whose tag has come, and as many of its parameters as were read."""

    def __init__(self, name: str, begin: int, body_begin: int) -> None:
        self.name = name
        self.begin = begin
        self._body_begin = body_begin
        self._given: list[tuple[str, str]] = []
        self._key, self._value_begin = "", 0

    def parameter(self, text: str, end: int, next_key: str, next_begin: int) -> None:
        """A tag at *end* closes the parameter before it, and may open another."""
        if self._key:
            self._given.append((self._key, text[self._value_begin : end]))
        self._key, self._value_begin = next_key.strip(), next_begin

    def call(self, text: str, body_end: int, tools: Tools) -> Call | None:
        self.parameter(text, body_end, "", body_end)
        tool = tools.find(self.name)
        if tool is None:
            return None
        body = text[self._body_begin : body_end]
        if not self._given and body.strip().startswith("{"):
            return call_of(self.name, body, tools)
        return Call(tool.name, {key: _typed(value, tool.kinds.get(key, "")) for key, value in self._given})


def _argument_pairs(text: str, tools: Tools) -> Found:
    """A name, then pairs of ``<arg_key>`` and ``<arg_value>``."""
    name, opening, rest = text.partition("<")
    tool = tools.find(name.strip())
    if tool is None:
        return []
    given = {key.strip(): _typed(value, tool.kinds.get(key.strip(), "")) for key, value in _pairs(opening + rest)}
    return [Call(tool.name, given)] if given or not (opening + rest).strip() else []


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    while (begin := text.find("<arg_key>", position)) >= 0 and (end := text.find("</arg_key>", begin)) >= 0:
        position = end + len("</arg_key>")
        value = _after_space(text, position)
        if not text.startswith("<arg_value>", value):
            continue
        value_end = text.find("</arg_value>", value)
        if value_end < 0:
            return
        yield text[begin + len("<arg_key>") : end], text[value + len("<arg_value>") : value_end]
        position = value_end + len("</arg_value>")


def _after_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _typed(text: str, kind: str) -> Any:
    """A parameter written as bare text; one line break around it belongs to the format."""
    body = text.removeprefix("\n").removesuffix("\n")
    if kind == "string":
        return clean(body)
    try:
        return lenient(body)
    except ValueError:
        return clean(body)


def _notation(text: str, tools: Tools) -> Found:
    """``call:name{key:<escape>text<escape>}``."""
    if not text.lstrip().startswith("call:"):
        return []
    named = [(tools.find(name), arguments) for name, arguments in read_notation(text)]
    return [Call(tool.name, arguments) for tool, arguments in named if tool is not None] if all(t for t, _ in named) else []


def _python(text: str, tools: Tools) -> Found:
    """``f(a=1)``, or several of them in a list; all or none."""
    found: Found = []
    for call in read_calls(text.strip(_SEPARATORS)):
        tool = tools.find(call.name)
        if tool is None:
            return []
        positional = dict(zip(tool.kinds, call.positional, strict=False))
        found.append(Call(tool.name, clean({**positional, **call.named})))
    return found
