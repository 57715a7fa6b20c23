"""A schema of tool calls, for answers that must be one: what ``tool_choice`` asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ANY = ""  # in place of a name: whichever tool the model likes


def call_schema(tools: Sequence[Mapping[str, Any]], name: str = ANY) -> dict[str, Any]:
    """A JSON Schema for ``{"name": ..., "arguments": ...}``, which every parser here takes for a call.

    Errors: ValueError when there is no such tool.
    """
    functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), dict)]
    forced = [function for function in functions if isinstance(function.get("name"), str) and name in (ANY, function["name"])]
    if not forced:
        raise ValueError(
            f'tool_choice: there is no tool "{name}"' if name else "tool_choice: a call is required, but there are no tools"
        )
    definitions: dict[str, Any] = {}
    calls = [_call(function, definitions) for function in forced]
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return schema | ({"$defs": definitions} if definitions else {})


def _call(function: Mapping[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """References start at the root of a schema, so definitions move there."""
    given = function.get("parameters")
    parameters = dict(given) if isinstance(given, dict) else {}
    parameters.setdefault("type", "object")
    own = parameters.pop("$defs", None)
    if isinstance(own, dict):
        definitions |= own
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
