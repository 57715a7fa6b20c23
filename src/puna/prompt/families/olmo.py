"""OLMo 3 and 3.1, instructed and thinking.

Source: the chat templates published with allenai/Olmo-3-7B-Instruct, Olmo-3.1-32B-Instruct, Olmo-3-7B-Think and
Olmo-3-32B-Think. The thinking ones were not taught tools.
"""

from __future__ import annotations

from collections.abc import Sequence

from puna.prompt.families.family import Message, Think, Tool, calls_of, text_of, to_json
from puna.prompt.families.qwen import turn

_NONE = "You do not currently have access to any functions. <functions></functions>"
_SOME = (
    "You are provided with function signatures within <functions></functions> XML tags. You may call one or more functions to "
    "assist with the user query. Output any function calls within <function_calls></function_calls> XML tags. Do not make "
    "assumptions about what values to plug into functions."
)
_HELPFUL = "You are a helpful function-calling AI assistant. "
_OLMO = (
    "You are Olmo, a helpful AI assistant built by Ai2. Your date cutoff is December 2024, and your model weights are available "
    "at https://huggingface.co/allenai."
)


def instruct(messages: Sequence[Message], tools: Sequence[Tool], think: Think, *, begins: bool) -> str:
    return _instruct(_HELPFUL, messages, tools, begins=begins)


def instruct_31(messages: Sequence[Message], tools: Sequence[Tool], think: Think, *, begins: bool) -> str:
    return _instruct(f"{_OLMO} ", messages, tools, begins=begins)


def _instruct(default: str, messages: Sequence[Message], tools: Sequence[Tool], *, begins: bool) -> str:
    functions = f"<functions>{to_json(list(tools))}</functions>" if tools else ""
    parts: list[str] = []
    if not any(message.get("role") == "system" for message in messages):
        parts.append(turn("system", default + (_SOME + functions if tools else _NONE)))
    for message in messages:
        role, text = message.get("role"), text_of(message)
        if role == "system":
            parts.append(turn("system", text + functions))
        elif role == "tool":
            parts.append(turn("environment", text))
        elif role == "assistant":
            calls = "\n".join(_call(name, given) for name, given in calls_of(message))
            parts.append(turn("assistant", text + (f"<function_calls>{calls}</function_calls>" if calls else "")))
        else:
            parts.append(turn("user", text))
    return "".join(parts) + ("<|im_start|>assistant\n" if begins else "")


def _call(name: str, arguments: dict[str, object]) -> str:
    return f"{name}({', '.join(f'{key}={to_json(value)}' for key, value in arguments.items())})"


def think(messages: Sequence[Message], tools: Sequence[Tool], think: Think, *, begins: bool) -> str:
    return _think(_OLMO, messages, begins=begins)


def think_32b(messages: Sequence[Message], tools: Sequence[Tool], think: Think, *, begins: bool) -> str:
    return _think("You are a helpful AI assistant.", messages, begins=begins)


def _think(default: str, messages: Sequence[Message], *, begins: bool) -> str:
    system = next((text_of(message) for message in messages if message.get("role") == "system"), None)
    parts = [turn("system", default if system is None else f"{system} {_NONE}")]
    spoken = (message for message in messages if message.get("role") in ("user", "assistant"))
    parts += [turn(str(message["role"]), text_of(message)) for message in spoken]
    return "".join(parts) + ("<|im_start|>assistant\n<think>" if begins else "")
