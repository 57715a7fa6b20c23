"""What a family of models is here: code that writes its prompts, in place of a template.

A Modelfile names a family's renderer where no template language could, or nobody should have to, say it. Written are the
prompts that the family's own published chat template makes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from puna.prompt.ending import Ending, continued
from puna.prompt.thinking import Tags

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
Think = bool | str | None


class Write(Protocol):
    """Writes a conversation, and with *begins* what an answer begins with."""

    def __call__(self, messages: Sequence[Message], tools: Sequence[Tool], think: Think, *, begins: bool) -> str: ...


@dataclass(frozen=True)
class Family:
    write: Write
    parser: str  # how its models answer, where a Modelfile names no parser
    tags: Tags = Tags()
    has_tools: bool = True
    can_think: bool = False

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], think: Think, ending: Ending) -> str:
        def one(turns: Sequence[Message], end: Ending) -> str:
            return self.write(turns, tools, think, begins=end is Ending.ANSWER)

        return continued(messages, self.tags, one) if ending is Ending.CONTINUE else one(messages, ending)


def text_of(message: Message) -> str:
    return str(message.get("content") or "")


def thinking_of(message: Message) -> str:
    return str(message.get("thinking") or "")


def calls_of(message: Message) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments."""
    functions = (call.get("function") or {} for call in message.get("tool_calls") or ())
    return [(str(function.get("name") or ""), dict(function.get("arguments") or {})) for function in functions]


def functions_of(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    return [dict(tool.get("function") or tool) for tool in tools]


def to_json(value: Any) -> str:
    """As ``tojson`` of Hugging Face's templates writes it."""
    return json.dumps(value, ensure_ascii=False)


def shown(value: Any) -> str:
    """A value as text; what is no text as JSON."""
    return value if isinstance(value, str) else to_json(value)


def without_thinking(text: str) -> str:
    """What follows thinking that is part of the text."""
    return text.rpartition("</think>")[2].lstrip("\n") if "</think>" in text else text


def system_and_rest(messages: Sequence[Message]) -> tuple[str | None, Sequence[Message]]:
    """The text of a system message at the beginning, and the others."""
    if messages and messages[0].get("role") == "system":
        return text_of(messages[0]), messages[1:]
    return None, messages


def is_first_result(messages: Sequence[Message], index: int) -> bool:
    return index == 0 or messages[index - 1].get("role") != "tool"


def is_last_result(messages: Sequence[Message], index: int) -> bool:
    return index + 1 == len(messages) or messages[index + 1].get("role") != "tool"


def last_index(messages: Sequence[Message], role: str) -> int:
    return max((index for index, message in enumerate(messages) if message.get("role") == role), default=-1)
