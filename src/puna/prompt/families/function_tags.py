"""Tools and calls in XML-like tags, as Qwen3-Coder began it and Nemotron 3 and Qwen 3.5 go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from puna.prompt.families.family import shown, to_json

HOW_TO_CALL = """

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within \
<tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after
- If there is no function call available, answer the question like normal with your current knowledge and do not tell the user \
about function calls
</IMPORTANT>"""

INTRODUCTION = "# Tools\n\nYou have access to the following functions:\n\n<tools>"


def described(functions: Iterable[Mapping[str, Any]], *, required_last: bool = False) -> str:
    """The tools, each in tags. Where *required_last* holds, what is required stands behind all other keys of the schema."""
    return "".join(_described(function, required_last=required_last) for function in functions)


def _described(function: Mapping[str, Any], *, required_last: bool) -> str:
    given = function.get("parameters")
    parameters: Mapping[str, Any] = given if isinstance(given, dict) else {}
    properties = parameters.get("properties")
    parts = [f"\n<function>\n<name>{function.get('name', '')}</name>", _tag(function, "description"), "\n<parameters>"]
    for name, value in properties.items() if isinstance(properties, dict) else ():
        schema = value if isinstance(value, dict) else {}
        parts += ["\n<parameter>", f"\n<name>{name}</name>"]
        parts += [f"\n<type>{schema['type']}</type>" if "type" in schema else "", _tag(schema, "description")]
        parts += [f"\n<enum>{to_json(schema['enum'])}</enum>" if "enum" in schema else ""]
        parts += [_others(schema, ("name", "type", "description", "enum")), "\n</parameter>"]
    if required_last:
        parts.append(_others(parameters, ("type", "properties", "required")))
        parts.append(f"\n<required>{to_json(parameters['required'])}</required>" if "required" in parameters else "")
    else:
        parts.append(_others(parameters, ("type", "properties")))
    parts += ["\n</parameters>", _others(function, ("type", "name", "description", "parameters")), "\n</function>"]
    return "".join(parts)


def _tag(schema: Mapping[str, Any], key: str) -> str:
    return f"\n<{key}>{str(schema[key]).strip()}</{key}>" if schema.get(key) is not None else ""


def _others(schema: Mapping[str, Any], handled: Sequence[str]) -> str:
    rest = ((key, value) for key, value in schema.items() if key not in handled)
    return "".join(f"\n<{key}>{to_json(value) if isinstance(value, dict | list) else value}</{key}>" for key, value in rest)


def call(name: str, arguments: Mapping[str, Any], show: Callable[[Any], str] = shown) -> str:
    parameters = "".join(f"<parameter={key}>\n{show(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"
