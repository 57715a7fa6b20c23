"""DeepSeek V3.1, and Cogito 2.1, which was made from a DeepSeek.

Source: the chat templates published with deepseek-ai/DeepSeek-V3.1 and deepcogito/cogito-671b-v2.1; how tools are described to
DeepSeek V3.1 is told in its model card.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

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
    to_json,
)

_BOS, _EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_USER, _ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_OUTPUT, _OUTPUT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
_HOW_TO_CALL = (
    "IMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
    f"{_CALLS}{_CALL}tool_call_name{_SEPARATOR}tool_call_arguments{_CALL_END}{{{{additional_tool_calls}}}}{_CALLS_END}\n\n"
    "Where:\n\n- `tool_call_name` must be an exact match to one of the available tools\n"
    "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n"
    "- For multiple tool calls, chain them directly without separators or spaces\n"
)


def v31(messages: Sequence[Message], tools: Sequence[Tool], think: Think, *, begins: bool) -> str:
    system = "\n\n".join(text_of(message) for message in messages if message.get("role") == "system")
    parts = [_BOS, system, _described(tools)]
    follows_user = follows_result = False
    for message in messages:
        role, text = message.get("role"), text_of(message)
        if role == "user":
            parts.append(_USER + text)
        elif role == "tool":
            parts.append(_OUTPUT + text + _OUTPUT_END)
        elif role == "assistant":
            if follows_user:
                parts.append(f"{_ASSISTANT}</think>")
            calls = calls_of(message)
            if calls:
                listed = "".join(f"{_CALL}{name}{_SEPARATOR}{to_json(given)}{_CALL_END}" for name, given in calls)
                parts.append(f"{text}{_CALLS}{listed}{_CALLS_END}{_EOS}")
            else:
                parts.append((text if follows_result else text.partition("</think>")[2] or text) + _EOS)
        if role != "system":
            follows_user, follows_result = role == "user", role == "tool"
    if begins and (follows_user or not (follows_result or len(parts) > 3)):
        parts.append(_ASSISTANT + ("<think>" if think else "</think>"))
    return "".join(parts)


def _described(tools: Sequence[Tool]) -> str:
    if not tools:
        return ""
    each = "".join(
        f"### {function.get('name', '')}\nDescription: {function.get('description', '')}\n\n"
        f"Parameters: {to_json(function.get('parameters') or {})}\n\n"
        for function in functions_of(tools)
    )
    return f"\n\n## Tools\nYou have access to the following tools:\n\n{each}{_HOW_TO_CALL}"


_COGITO = "You are Cogito, an AI assistant created by Deep Cogito, which is an AI research lab based in San Francisco."


def cogito(messages: Sequence[Message], tools: Sequence[Tool], think: Think, *, begins: bool) -> str:
    system, rest = system_and_rest(messages)
    head = f"Enable deep thinking subroutine.\n\n{_COGITO}" if think else _COGITO
    if system:
        head += f"\n\n{system}" + ("\n\n" if think else "")
    if tools:
        listed = "".join(f"```json\n{json.dumps(tool, ensure_ascii=False, indent=4)}\n```\n" for tool in tools)
        head += f"\nYou have the following functions available:\n{listed}"
    parts = [_BOS, head]
    for index, message in enumerate(rest):
        role, text, calls = message.get("role"), text_of(message), calls_of(message)
        if role == "user":
            parts.append(_USER + text + _ASSISTANT)
        elif role == "assistant" and calls:
            listed = "\n".join(
                f"{_CALL}function{_SEPARATOR}{name}\n```json\n{to_json(given)}\n```{_CALL_END}" for name, given in calls
            )
            parts.append(f"{text.strip()}{_CALLS}{listed}{_CALLS_END}{_EOS}")
        elif role == "assistant":
            parts.append(text + _EOS)
        elif role == "tool":
            begin = "<｜tool▁outputs▁begin｜>" if is_first_result(rest, index) else ""
            end = "<｜tool▁outputs▁end｜>" if is_last_result(rest, index) else "\n"
            parts.append(begin + _OUTPUT + text + _OUTPUT_END + end)
    if begins:
        parts.append("" if rest and rest[-1].get("role") == "user" else _ASSISTANT)
        parts.append("<think>\n" if think else "")
    return "".join(parts)
