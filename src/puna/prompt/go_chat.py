"""Render a conversation with a Go template, as Ollama fills its variables.

A template that mentions Messages sees the whole conversation and runs once. An older one knows a single turn (System,
Prompt, Response) and runs once per turn, the last time only up to where the answer begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from puna.prompt.chat import parsed_arguments
from puna.prompt.go_functions import typescript_type
from puna.prompt.go_values import JsonDict, JsonList, Struct
from puna.prompt.gotemplate import GoTemplate
from puna.prompt.limits import Budget, count_chars

Think = bool | str | None


def parse(source: str) -> GoTemplate:
    """Parse a Modelfile's template; one that never prints a response gets it at its end.

    Errors: TemplateError naming the line.
    """
    template = GoTemplate.parse(source)
    return template if template.mentions("Messages") or template.mentions("Response") else template.with_response()


def render_messages(
    template: GoTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    think: Think = None,
) -> str:
    """Errors: TemplateError naming the line."""
    system, merged = _collate(messages)
    common = _think_variables(think)
    budget = Budget(count_chars([messages, tools or []]))
    if not template.mentions("Messages"):
        return _render_turns(template, merged, common, budget)
    variables = {
        "System": system,
        "Messages": [_message(message) for message in merged],
        "Tools": JsonList(_tool(tool) for tool in tools or []),
        "Response": "",
        **common,
    }
    return template.execute(variables, budget=budget)


def render_infill(template: GoTemplate, prompt: str, suffix: str, think: Think = None) -> str:
    """The prompt for text that goes between *prompt* and *suffix*."""
    return template.execute({"Prompt": prompt, "Suffix": suffix, "Response": "", **_think_variables(think)})


def _think_variables(think: Think) -> dict[str, Any]:
    return {
        "Think": bool(think),
        "ThinkLevel": think if isinstance(think, str) else "medium" if think else "",
        "IsThinkSet": think is not None,
    }


def _collate(messages: Iterable[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """All system text, and the messages with neighbours of the same role joined by a blank line.

    Tool results stay apart, and so do messages that carry tool calls: joining those would lose the calls.
    """
    system: list[str] = []
    groups: list[list[dict[str, Any]]] = []
    for message in messages:
        current = {**message, "content": _text_of(message.get("content"))}
        if current.get("role") == "system":
            system.append(current["content"])
        if groups and _belong_together(groups[-1][0], current):
            groups[-1].append(current)
        else:
            groups.append([current])
    return "\n\n".join(system), [_joined(group) for group in groups]


def _joined(group: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if len(group) == 1:
        return group[0]
    images = [image for message in group for image in message.get("images") or []]
    return {**group[0], "content": "\n\n".join(message["content"] for message in group), "images": images}


def _belong_together(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    is_plain = not (first.get("tool_calls") or second.get("tool_calls"))
    return first.get("role") == second.get("role") != "tool" and is_plain


def _text_of(content: Any) -> str:
    return "" if content is None else str(content)


@dataclass
class _Turn:
    System: str = ""
    Prompt: str = ""
    Response: str = ""


def _render_turns(template: GoTemplate, messages: Iterable[Mapping[str, Any]], common: dict[str, Any], budget: Budget) -> str:
    parts: list[str] = []
    turn = _Turn()

    def finish() -> _Turn:
        parts.append(template.execute({**vars(turn), **common}, budget=budget))
        return _Turn()

    for message in messages:
        match message.get("role"):
            case "system":
                if turn.Prompt or turn.Response:
                    turn = finish()
                turn.System = message["content"]
            case "user":
                if turn.Response:
                    turn = finish()
                turn.Prompt = message["content"]
            case "assistant":
                turn.Response = message["content"]
    parts.append(template.cut_after_response().execute({**vars(turn), **common}, budget=budget))
    return "".join(parts)


def _message(message: Mapping[str, Any]) -> Struct:
    calls = [_tool_call(call, index) for index, call in enumerate(message.get("tool_calls") or [])]
    fields = {
        "Role": str(message.get("role") or ""),
        "Content": message["content"],
        "Thinking": _text_of(message.get("thinking")),
        "Images": list(message.get("images") or []),
        "ToolCalls": JsonList(calls),
        "ToolName": _text_of(message.get("tool_name") or message.get("name")),
        "ToolCallID": _text_of(message.get("tool_call_id")),
    }
    json_names = {"Thinking": "thinking", "Images": "images", "ToolCalls": "tool_calls"}
    json_names |= {"ToolName": "tool_name", "ToolCallID": "tool_call_id"}
    plain = {"role": fields["Role"], "content": fields["Content"]}
    plain |= {json_name: fields[name] for name, json_name in json_names.items() if fields[name]}
    return Struct("Message", fields, plain)


def _tool_call(call: Mapping[str, Any], position: int) -> Struct:
    function = call.get("function") or {}
    index = function.get("index", position)
    arguments = parsed_arguments(function.get("arguments"))
    shown = JsonDict(arguments) if isinstance(arguments, dict) else arguments
    name = _text_of(function.get("name"))
    plain = {"index": index, "name": name, "arguments": shown}
    inner = Struct("ToolCallFunction", {"Index": index, "Name": name, "Arguments": shown}, plain)
    call_id = _text_of(call.get("id"))
    return Struct("ToolCall", {"ID": call_id, "Function": inner}, {**({"id": call_id} if call_id else {}), "function": inner})


def _tool(tool: Mapping[str, Any]) -> Struct:
    kind, items = _text_of(tool.get("type")) or "function", tool.get("items")
    function = _function(tool.get("function") or {})
    plain = {"type": kind, **({"items": items} if items else {}), "function": function}
    return Struct("Tool", {"Type": kind, "Items": items, "Function": function}, plain)


def _function(function: Mapping[str, Any]) -> Struct:
    name, description = _text_of(function.get("name")), _text_of(function.get("description"))
    parameters = _parameters(function.get("parameters") or {})
    plain = {"name": name, **({"description": description} if description else {}), "parameters": parameters}
    return Struct("ToolFunction", {"Name": name, "Description": description, "Parameters": parameters}, plain)


def _parameters(schema: Mapping[str, Any]) -> Struct:
    properties = JsonDict({str(name): _property(value) for name, value in (schema.get("properties") or {}).items()})
    fields = {
        "Type": _text_of(schema.get("type")),
        "Defs": schema.get("$defs"),
        "Items": schema.get("items"),
        "Required": list(schema.get("required") or []),
        "Properties": properties,
    }
    optional = {"$defs": fields["Defs"], "items": fields["Items"], "required": fields["Required"]}
    plain = {"type": fields["Type"], **{name: value for name, value in optional.items() if value}, "properties": properties}
    return Struct("ToolFunctionParameters", fields, plain)


def _property(value: Any) -> Struct:
    schema = value if isinstance(value, Mapping) else {}
    kinds = schema.get("type") or []
    listed = list(kinds) if isinstance(kinds, list) else [kinds]
    nested = {str(name): _property(item) for name, item in (schema.get("properties") or {}).items()}
    fields = {
        "AnyOf": [_property(item) for item in schema.get("anyOf") or []],
        "Type": listed[0] if len(listed) == 1 else listed,
        "Items": schema.get("items"),
        "Description": _text_of(schema.get("description")),
        "Enum": list(schema.get("enum") or []),
        "Properties": JsonDict(nested),
        "Required": list(schema.get("required") or []),
    }
    names = ("AnyOf", "Type", "Items", "Description", "Enum", "Properties", "Required")
    plain = {name[0].lower() + name[1:]: fields[name] for name in names if fields[name]}
    fields["ToTypeScriptType"] = typescript_type(dict(schema))
    return Struct("ToolProperty", fields, plain)
