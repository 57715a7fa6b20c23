"""FunctionGemma and Gemma 4, which write tools, calls and results in a notation of their own.

Source: the chat templates published with google/functiongemma-270m-it and google/gemma-4-E2B-it, and Google's description of
FunctionGemma's formatting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from puna.prompt.families.family import Message, Think, Tool, calls_of, functions_of, last_index, text_of, thinking_of

_QUOTE = '<|"|>'
_TYPES = ("description", "type", "properties", "required", "nullable")


def functiongemma(messages: Sequence[Message], tools: Sequence[Tool], think: Think, *, begins: bool) -> str:
    parts = ["<bos>"]
    rest = list(messages)
    system = text_of(rest.pop(0)).strip() if rest and rest[0].get("role") in ("system", "developer") else ""
    if system or tools:
        declared = "".join(
            f"<start_function_declaration>{_declaration(function)}<end_function_declaration>" for function in functions_of(tools)
        )
        head = f"You can do function calling with the following functions:{declared}" if tools else ""
        parts.append(f"<start_of_turn>developer\n{system}{chr(10) if system and head else ''}{head}<end_of_turn>\n")
    follows_result = False
    called_names = _called(rest)
    for index, message in enumerate(rest):
        role, text, calls = message.get("role"), text_of(message).strip(), calls_of(message)
        if role == "tool":
            name = called_names[index]
            parts.append(f"<start_function_response>response:{name}{{<escape>{text}<escape>}}<end_function_response>")
        else:
            # After a result the model's turn is still open, and what comes belongs to it.
            begin = "" if follows_result else f"<start_of_turn>{'model' if role == 'assistant' else role}\n"
            called = "".join(
                f"<start_function_call>call:{name}{{{_arguments(given, '<escape>')}}}<end_function_call>" for name, given in calls
            )
            parts.append(f"{begin}{text}{called}" + ("" if calls else "<end_of_turn>\n"))
        follows_result = role == "tool"
    return "".join(parts) + ("<start_of_turn>model\n" if begins and not follows_result else "")


def _declaration(function: Mapping[str, Any]) -> str:
    def escaped(value: Any) -> str:
        return f"<escape>{value}<escape>"

    given = function.get("parameters")
    schema: Mapping[str, Any] = given if isinstance(given, dict) else {}
    inner: list[str] = []
    if schema.get("properties"):
        properties = sorted(schema["properties"].items(), key=lambda item: str(item[0]).lower())
        inner.append(f"properties:{{{','.join(_property(name, value) for name, value in properties)}}}")
    if schema.get("required"):
        inner.append(f"required:[{','.join(map(escaped, schema['required']))}]")
    if schema.get("type"):
        inner.append(f"type:{escaped(str(schema['type']).upper())}")
    parameters = f",parameters:{{{','.join(inner)}}}" if inner else ""
    return f"declaration:{function.get('name', '')}{{description:{escaped(function.get('description') or '')}{parameters}}}"


def _property(name: str, value: Any) -> str:
    schema = value if isinstance(value, dict) else {}
    kind = schema.get("type") or "string"
    shown = "|".join(map(str, kind)) if isinstance(kind, list) else str(kind)
    return f"{name}:{{description:<escape>{schema.get('description') or ''}<escape>,type:<escape>{shown.upper()}<escape>}}"


def _called(messages: Sequence[Message]) -> dict[int, str]:
    """The function that each result is of, by the result's index: by the call's id, else its own word, else its place."""
    found: dict[int, str] = {}
    names: dict[str, str] = {}  # by id
    in_order: list[str] = []
    caller = -1
    for index, message in enumerate(messages):
        if message.get("role") != "tool":
            caller, in_order = index, [name for name, _ in calls_of(message)]
            ids = [str(call.get("id") or "") for call in message.get("tool_calls") or ()]
            names = dict(zip(ids, in_order, strict=True))
            continue
        place = index - caller - 1
        by_place = in_order[place] if place < len(in_order) else ""
        by_id = names.get(str(message.get("tool_call_id") or "-"), "")
        found[index] = by_id or str(message.get("tool_name") or "") or by_place or "unknown"
    return found


def _value(value: Any, quote: str, *, quotes_keys: bool = False) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            return f"{{{_arguments(value, quote, quotes_keys=quotes_keys)}}}"
        case list():
            return f"[{','.join(_value(item, quote, quotes_keys=quotes_keys) for item in value)}]"
    return str(value)


def _arguments(given: Mapping[str, Any], quote: str, *, quotes_keys: bool = False) -> str:
    """In the order of their names, letters' case aside, as ``dictsort`` has it."""
    keys = quote if quotes_keys else ""
    items = sorted(given.items(), key=lambda item: str(item[0]).lower())
    return ",".join(f"{keys}{key}{keys}:{_value(value, quote, quotes_keys=quotes_keys)}" for key, value in items)


def gemma4(messages: Sequence[Message], tools: Sequence[Tool], think: Think, *, begins: bool) -> str:
    parts = ["<bos>"]
    rest = list(messages)
    has_system = bool(rest) and rest[0].get("role") in ("system", "developer")
    if think or tools or has_system:
        system = text_of(rest.pop(0)).strip() if has_system else ""
        declared = "".join(f"<|tool>{_declared(function)}<tool|>" for function in functions_of(tools))
        think_switch = "<|think|>\n" if think else ""
        parts.append(f"<|turn>system\n{think_switch}{system}{declared}<turn|>\n")
    last_user, called_names = last_index(rest, "user"), _called(rest)
    spoken = [index for index, message in enumerate(rest) if message.get("role") != "tool"]
    is_open = is_waiting = False  # the model's turn is not over; it waits for a result that has not come
    for place, index in enumerate(spoken):
        message, following = rest[index], spoken[place + 1 : place + 2]
        is_model = message.get("role") == "assistant"
        if not (is_model and place and rest[spoken[place - 1]].get("role") == "assistant"):
            parts.append(f"<|turn>{'model' if is_model else message.get('role')}\n")
        if thinking_of(message) and index > last_user:
            parts.append(f"<|channel>thought\n{thinking_of(message)}\n<channel|>")
        calls = calls_of(message)
        parts += [f"<|tool_call>call:{name}{{{_arguments(given, _QUOTE)}}}<tool_call|>" for name, given in calls]
        end = following[0] if following else len(rest)
        results = range(index + 1, end) if calls else range(0)
        parts += [_response(called_names[at], text_of(rest[at])) for at in results]
        content = _without_channels(text_of(message)) if is_model else text_of(message).strip()
        parts.append(content)
        has_results = len(results) > 0
        goes_on = bool(following) and is_model and rest[following[0]].get("role") == "assistant" and (not calls or has_results)
        is_waiting = bool(calls) and not has_results
        is_open = has_results and not content and not following
        if is_waiting:
            parts.append("<|tool_response>")
        elif not goes_on and not is_open:
            parts.append("<turn|>\n")
        is_open = has_results
    if begins and is_open:
        parts.append("<|channel>thought\n" if think else "")
    elif begins and not is_waiting:
        parts.append("<|turn>model\n")
    return "".join(parts)


def _response(name: str, text: str) -> str:
    return f"<|tool_response>response:{name}{{value:{_QUOTE}{text}{_QUOTE}}}<tool_response|>"


def _without_channels(text: str) -> str:
    return "".join(part.partition("<|channel>")[0] for part in text.split("<channel|>")).strip()


def _declared(function: Mapping[str, Any]) -> str:
    schema = function.get("parameters")
    parameters = ""
    if isinstance(schema, dict) and schema:
        inner = ""
        if schema.get("properties"):
            inner += f"properties:{{{_properties(schema['properties'])}}},"
        if schema.get("required"):
            inner += f"required:[{','.join(_quoted(item) for item in schema['required'])}],"
        if schema.get("type"):
            inner += f"type:{_quoted(str(schema['type']).upper())}}}"
        parameters = f",parameters:{{{inner}"
    return f"declaration:{function.get('name', '')}{{description:{_quoted(function.get('description') or '')}{parameters}}}"


def _quoted(text: Any) -> str:
    return f"{_QUOTE}{text}{_QUOTE}"


def _properties(properties: Mapping[str, Any], *, skips_keywords: bool = False) -> str:
    items = sorted(properties.items(), key=lambda item: str(item[0]).lower())
    kept = [(key, value) for key, value in items if not (skips_keywords and key in _TYPES)]
    return ",".join(f"{key}:{{{_schema(value if isinstance(value, dict) else {})}}}" for key, value in kept)


def _schema(schema: Mapping[str, Any]) -> str:
    kind = str(schema.get("type") or "").upper()
    parts: list[str] = []
    if schema.get("description"):
        parts.append(f"description:{_quoted(schema['description'])}")
    if kind == "STRING" and schema.get("enum"):
        parts.append(f"enum:{_value(schema['enum'], _QUOTE, quotes_keys=True)}")
    if kind == "ARRAY" and isinstance(schema.get("items"), dict) and schema["items"]:
        parts.append(f"items:{{{_items(schema['items'])}}}")
    if schema.get("nullable"):
        parts.append("nullable:true")
    if kind == "OBJECT":
        inner = schema.get("properties")
        given = _properties(inner) if isinstance(inner, dict) else _properties(schema, skips_keywords=True)
        parts.append(f"properties:{{{given}}}")
        if schema.get("required"):
            parts.append(f"required:[{','.join(_quoted(item) for item in schema['required'])}]")
    parts.append(f"type:{_quoted(kind)}")
    return ",".join(parts)


def _items(schema: Mapping[str, Any]) -> str:
    parts: list[str] = []
    for key, value in sorted(schema.items(), key=lambda item: str(item[0]).lower()):
        if value is None:
            continue
        if key == "properties":
            parts.append(f"properties:{{{_properties(value) if isinstance(value, dict) else ''}}}")
        elif key == "required":
            parts.append(f"required:[{','.join(_quoted(item) for item in value)}]")
        elif key == "type":
            kinds = str(value).upper() if isinstance(value, str) else [str(item).upper() for item in value]
            parts.append(f"type:{_value(kinds, _QUOTE)}")
        else:
            parts.append(f"{key}:{_value(value, _QUOTE, quotes_keys=True)}")
    return ",".join(parts)
