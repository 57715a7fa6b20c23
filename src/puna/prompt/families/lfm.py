"""LFM2, instructed and thinking.

Source: the chat templates published with LiquidAI/LFM2-1.2B and LFM2.5-1.2B-Thinking, and Liquid's description of tool use.
"""

from __future__ import annotations

from collections.abc import Sequence

from puna.prompt.families.family import (
    Message,
    Think,
    Tool,
    calls_of,
    functions_of,
    last_index,
    system_and_rest,
    text_of,
    thinking_of,
    to_json,
    without_thinking,
)
from puna.prompt.families.qwen import turn


def instruct(messages: Sequence[Message], tools: Sequence[Tool], think: Think, *, begins: bool) -> str:
    return _lfm2(messages, tools, begins=begins, keeps_thinking=True)


def thinking(messages: Sequence[Message], tools: Sequence[Tool], think: Think, *, begins: bool) -> str:
    return _lfm2(messages, tools, begins=begins, keeps_thinking=False)


def _lfm2(messages: Sequence[Message], tools: Sequence[Tool], *, begins: bool, keeps_thinking: bool) -> str:
    system, rest = system_and_rest(messages)
    head = [system] if system else []
    if tools:
        listed = ", ".join(to_json(function) for function in functions_of(tools))
        head.append(f"List of tools: <|tool_list_start|>[{listed}]<|tool_list_end|>")
    parts = ["<|startoftext|>"]
    if head:
        parts.append(turn("system", "\n".join(head)))
    last_answer = last_index(rest, "assistant")
    for index, message in enumerate(rest):
        role, text = str(message.get("role") or ""), text_of(message)
        if role == "tool":
            text = f"<|tool_response_start|>{text}<|tool_response_end|>"
        elif role == "assistant":
            thinking = ""
            if not keeps_thinking and index != last_answer:
                text = without_thinking(text).strip() if "</think>" in text else text
            elif not keeps_thinking and thinking_of(message):
                thinking = f"<think>{thinking_of(message)}</think>"
            calls = ", ".join(_call(name, given) for name, given in calls_of(message))
            text = thinking + (f"<|tool_call_start|>[{calls}]<|tool_call_end|>" if calls else "") + text
        parts.append(turn(role, text))
    return "".join(parts) + ("<|im_start|>assistant\n" if begins else "")


def _call(name: str, arguments: dict[str, object]) -> str:
    return f"{name}({', '.join(f'{key}={to_json(value)}' for key, value in arguments.items())})"
