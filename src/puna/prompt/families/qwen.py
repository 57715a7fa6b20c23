"""The Qwen family: Qwen3-Coder, Qwen3-VL (its text), Qwen 3.5 and 3.6.

Source: the chat templates published with Qwen/Qwen3-Coder-30B-A3B-Instruct, Qwen/Qwen3-VL-8B-Instruct and -Thinking, and
Qwen/Qwen3.5-35B-A3B.
"""

from __future__ import annotations

from collections.abc import Sequence

from puna.prompt.families import function_tags
from puna.prompt.families.family import (
    Message,
    Think,
    Tool,
    calls_of,
    functions_of,
    is_first_result,
    is_last_result,
    system_and_rest,
    text_of,
    thinking_of,
    to_json,
)

_CODER = "You are Qwen, a helpful AI assistant that can interact with a computer to solve tasks."
_JSON_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_JSON_CALLS = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> "
    'XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def _result(messages: Sequence[Message], index: int, text: str) -> str:
    begin = "<|im_start|>user" if is_first_result(messages, index) else ""
    end = "<|im_end|>\n" if is_last_result(messages, index) else ""
    return f"{begin}\n<tool_response>\n{text}\n</tool_response>{end}"


def coder(messages: Sequence[Message], tools: Sequence[Tool], think: Think, *, begins: bool) -> str:
    system, rest = system_and_rest(messages)
    parts: list[str] = []
    if system is not None or tools:
        described = function_tags.described(functions_of(tools))
        listed = f"\n\n{function_tags.INTRODUCTION}{described}\n</tools>{function_tags.HOW_TO_CALL}" if tools else ""
        parts.append(turn("system", (_CODER if system is None else system) + listed))
    for index, message in enumerate(rest):
        role, text = str(message.get("role") or ""), text_of(message)
        calls = "".join("\n" + function_tags.call(*call) for call in calls_of(message))
        if role == "assistant" and calls:
            parts.append(turn(role, (f"{text.strip()}\n" if text.strip() else "") + calls))
        elif role == "tool":
            parts.append(_result(rest, index, text))
        else:
            parts.append(turn(role, text))
    return "".join(parts) + ("<|im_start|>assistant\n" if begins else "")


def vl_instruct(messages: Sequence[Message], tools: Sequence[Tool], think: Think, *, begins: bool) -> str:
    return _vl(messages, tools, begins=begins, thinks=bool(think), keeps_thinking=bool(think))


def vl_thinking(messages: Sequence[Message], tools: Sequence[Tool], think: Think, *, begins: bool) -> str:
    return _vl(messages, tools, begins=begins, thinks=think is not False, keeps_thinking=True)


def _vl(messages: Sequence[Message], tools: Sequence[Tool], *, begins: bool, thinks: bool, keeps_thinking: bool) -> str:
    system, rest = system_and_rest(messages)
    parts: list[str] = []
    if tools:
        listed = "".join(f"\n{to_json(tool)}" for tool in tools)
        parts.append(turn("system", (f"{system}\n\n" if system else "") + _JSON_TOOLS + listed + _JSON_CALLS))
    elif system is not None:
        parts.append(turn("system", system))
    last_query = _last_query(rest)
    for index, message in enumerate(rest):
        role, text = str(message.get("role") or ""), text_of(message)
        if role == "tool":
            parts.append(_result(rest, index, text))
            continue
        if role == "assistant":
            thinking = thinking_of(message)
            if keeps_thinking and index > last_query and (thinking or index + 1 == len(rest)):
                thinking = thinking.strip("\n")
                text = f"<think>\n{thinking}\n</think>\n\n" + text.lstrip("\n")
            for name, arguments in calls_of(message):
                call = f'<tool_call>\n{{"name": "{name}", "arguments": {to_json(arguments)}}}\n</tool_call>'
                text += f"\n{call}" if text else call
        parts.append(turn(role, text))
    begin = "<|im_start|>assistant\n" + ("<think>\n" if thinks else "")
    return "".join(parts) + (begin if begins else "")


def qwen35(messages: Sequence[Message], tools: Sequence[Tool], think: Think, *, begins: bool) -> str:
    system, rest = system_and_rest(messages)
    system = (system or "").strip()
    parts: list[str] = []
    if tools:
        listed = "".join(f"\n{to_json(tool)}" for tool in tools)
        head = f"{function_tags.INTRODUCTION}{listed}\n</tools>{function_tags.HOW_TO_CALL}"
        parts.append(turn("system", head + (f"\n\n{system}" if system else "")))
    elif system:
        parts.append(turn("system", system))
    last_query = _last_query(rest)
    for index, message in enumerate(rest):
        role, text = str(message.get("role") or ""), text_of(message).strip()
        if role == "tool":
            parts.append(_result(rest, index, text))
        elif role == "assistant":
            calls = "\n".join(function_tags.call(*call) for call in calls_of(message))
            content = text + (f"\n\n{calls}" if text and calls else calls)
            thinking = f"<think>\n{thinking_of(message).strip()}\n</think>\n\n" if index > last_query else ""
            parts.append(turn(role, thinking + content))
        else:
            parts.append(turn(role, text))
    begin = "<|im_start|>assistant\n" + ("<think>\n\n</think>\n\n" if think is False else "<think>\n")
    return "".join(parts) + (begin if begins else "")


def _last_query(messages: Sequence[Message]) -> int:
    """Where a user last asked: results that come as a user's words are none. Behind the last message when nobody did."""
    found = len(messages)
    for index, message in enumerate(messages):
        text = text_of(message).strip()
        if message.get("role") == "user" and not (text.startswith("<tool_response>") and text.endswith("</tool_response>")):
            found = index
    return found
