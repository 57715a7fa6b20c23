"""GLM 4.7 and GLM 4.7 Flash.

Source: the chat template published with zai-org/GLM-4.7.
"""

from __future__ import annotations

from collections.abc import Sequence

from puna.prompt.families.family import (
    Message,
    Think,
    Tool,
    calls_of,
    is_first_result,
    last_index,
    shown,
    text_of,
    thinking_of,
    to_json,
    without_thinking,
)

_TOOLS = (
    "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_HOW_TO_CALL = (
    "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"
    "<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"
)


def glm47(messages: Sequence[Message], tools: Sequence[Tool], think: Think, *, begins: bool) -> str:
    parts = ["[gMASK]<sop>"]
    if tools:
        listed = "".join(to_json(tool) + "\n" for tool in tools)
        parts.append(f"<|system|>{_TOOLS}{listed}{_HOW_TO_CALL}")
    last_user = last_index(messages, "user")
    for index, message in enumerate(messages):
        role, text = message.get("role"), text_of(message)
        if role == "tool":
            begin = "<|observation|>" if is_first_result(messages, index) else ""
            parts.append(f"{begin}<tool_response>{text}</tool_response>")
        elif role == "assistant":
            thinking = thinking_of(message).strip() if index > last_user else ""
            calls = "".join(_call(name, given) for name, given in calls_of(message))
            content = without_thinking(text).strip()
            parts.append(f"<|assistant|>{f'<think>{thinking}</think>' if thinking else '</think>'}{content}{calls}")
        else:
            parts.append(f"<|{role}|>{text}")
    return "".join(parts) + (f"<|assistant|>{'</think>' if think is False else '<think>'}" if begins else "")


def _call(name: str, arguments: dict[str, object]) -> str:
    pairs = "".join(f"<arg_key>{key}</arg_key><arg_value>{shown(value)}</arg_value>" for key, value in arguments.items())
    return f"<tool_call>{name}{pairs}</tool_call>"
