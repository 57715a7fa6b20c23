"""Nemotron 3 Nano.

Source: the chat template published with nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from puna.prompt.families import function_tags
from puna.prompt.families.family import (
    Message,
    Think,
    Tool,
    calls_of,
    functions_of,
    is_first_result,
    is_last_result,
    last_index,
    system_and_rest,
    text_of,
    thinking_of,
    to_json,
)
from puna.prompt.families.qwen import turn


def nano(messages: Sequence[Message], tools: Sequence[Tool], think: Think, *, begins: bool) -> str:
    system, rest = system_and_rest(messages)
    system = _without_switches(system or "")
    described = function_tags.described(functions_of(tools), required_last=True)
    listed = f"{function_tags.INTRODUCTION}{described}\n</tools>{function_tags.HOW_TO_CALL}" if tools else ""
    parts = [turn("system", system + ("\n\n" if system and listed else "") + listed)]
    last_user = last_index(rest, "user")
    for index, message in enumerate(rest):
        role, text = str(message.get("role") or ""), text_of(message)
        if role == "tool":
            parts.append(_result(rest, index, text))
        elif role == "assistant":
            parts.append(turn(role, _said(message, is_past=index < last_user)))
        else:
            parts.append(turn(role, text))
    begin = "<|im_start|>assistant\n" + ("<think>\n" if _thinks(messages, think) else "<think></think>")
    return "".join(parts) + (begin if begins else "")


def _said(message: Message, *, is_past: bool) -> str:
    thinking, text = thinking_of(message), text_of(message)
    if thinking.strip():
        text = f"<think>\n{thinking}\n</think>\n{text}"
    elif "<think>" not in text and "</think>" not in text:
        text = f"<think></think>{text}"
    if is_past and "</think>" in text:
        # Of a text without calls nothing is trimmed between the empty thinking and what was said.
        rest = text.rpartition("</think>")[2]
        text = "<think></think>" + (rest.strip() if message.get("tool_calls") else rest)
    calls = "".join(f"{function_tags.call(*call, _shown)}\n" for call in calls_of(message))
    return f"{text.strip()}\n{calls}" if calls else text.strip()


def _shown(value: Any) -> str:
    """Constants as Python has them: this template prints them with its language's own means."""
    return to_json(value) if isinstance(value, dict | list) else str(value)


def _result(messages: Sequence[Message], index: int, text: str) -> str:
    begin = "<|im_start|>user\n" if is_first_result(messages, index) else ""
    end = "<|im_end|>\n" if is_last_result(messages, index) else ""
    return f"{begin}<tool_response>\n{text}\n</tool_response>\n{end}"


def _without_switches(text: str) -> str:
    kept = text.replace("</think>", "<_end_think>").replace("/think", "").replace("/no_think", "")
    return kept.replace("<_end_think>", "</think>")


def _thinks(messages: Sequence[Message], think: Think) -> bool:
    """What the request says, unless a message has a switch for it."""
    found = think is not False
    for message in messages:
        if message.get("role") in ("user", "system"):
            text = text_of(message)
            if "/think" in text.replace("</think>", ""):
                found = True
            elif "/no_think" in text:
                found = False
    return found
