"""From a request's messages to the turns that a template is given: the model's own messages and system text in front.

Source: product description, "Prompt construction".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from puna.api.generate import Message
from puna.server.prompting.images import PlacedImages
from puna.store.models.model import StoredModel

Turn = dict[str, Any]  # a message as templates see it


def assemble(model: StoredModel, turns: Sequence[Turn], system: str = "", *, with_messages: bool = True) -> list[Turn]:
    """The model's messages, then *turns*; in front of all the system text, unless the first turn brings one."""
    before: list[Turn] = [dict(message) for message in model.messages] if with_messages else []
    text = system or model.system
    if text and not (turns and turns[0]["role"] == "system"):
        before.insert(0, {"role": "system", "content": text})
    assembled = [*before, *turns]
    return _without_old_thinking(assembled) if _repeats_thinking(model) else assembled


def _repeats_thinking(model: StoredModel) -> bool:
    return model.family == "qwen3" or model.name.partition(":")[0].rpartition("/")[2] == "deepseek-r1"


def _without_old_thinking(turns: list[Turn]) -> list[Turn]:
    last_user = max((number for number, turn in enumerate(turns) if turn["role"] == "user"), default=-1)
    return [
        {**turn, "content": _without_thinking(turn["content"])} if turn["role"] == "assistant" and number < last_user else turn
        for number, turn in enumerate(turns)
    ]


def _without_thinking(text: str) -> str:
    if not text.lstrip().startswith("<think>"):
        return text
    _, tag, rest = text.partition("</think>")
    return rest.lstrip() if tag else text


def said(role: str, text: str, images: Sequence[bytes], placed: PlacedImages) -> Turn:
    """A turn of text and images."""
    content, markers = placed.within(text, images)
    return {"role": role, "content": content} | ({"images": markers} if markers else {})


def turn_of(message: Message, placed: PlacedImages) -> Turn:
    """A message of a request; empty fields are left out. Its images are *placed*, and what stands for them is in its text."""
    turn = said(message.role, message.content, message.images, placed)
    for name in ("thinking", "tool_name", "tool_call_id"):
        if value := getattr(message, name):
            turn[name] = value
    if message.tool_calls:
        turn["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    return turn
