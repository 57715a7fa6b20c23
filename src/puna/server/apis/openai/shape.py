"""What an answer of chat completions and of completions have in common: the messages around choices, and their stream.

Where Ollama forces temperature and top_p to 1 when they are absent, a model's own parameters count here. An error in the
middle of a stream is sent as an error event.

Source: Ollama's OpenAI compatibility.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from puna.api import go_json
from puna.server.answering.parts import AnswerPart, Choices, Finished
from puna.server.apis.openai.usage import usage_of, warnings_of
from puna.server.http.errors import openai_body
from puna.server.http.replies import EVENT_STREAM, Stream

FINGERPRINT = "fp_ollama"
DEFAULTS = {"temperature": 1.0, "top_p": 1.0}  # of OpenAI's API, where neither the request nor the model says anything
_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Shape:
    """What all messages of one answer share."""

    id: str
    kind: str
    model: str
    created: int

    @classmethod
    def new(cls, prefix: str, kind: str, model: str) -> Shape:
        return cls(f"{prefix}-{secrets.token_hex(12)}", kind, model, int(time.time()))

    def message(self, choices: list[dict[str, Any]], kind: str = "", **extra: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": kind or self.kind, "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": FINGERPRINT, "choices": choices, **extra}


class Choice(Protocol):
    """One streamed answer."""

    def chunk(self, part: AnswerPart) -> dict[str, Any] | None:
        """What is to be sent of a part, if anything."""
        ...


def end_of(answers: Sequence[Finished]) -> dict[str, Any]:
    return {"usage": usage_of(answers), **warnings_of(answers)}


def stream_of(events: AsyncGenerator[bytes, None]) -> Stream:
    return Stream(events, EVENT_STREAM, lambda text, status: _event(openai_body(text, status)), cache_control="no-cache")


def _event(message: dict[str, Any]) -> bytes:
    return b"data: " + go_json.dumps(message) + b"\n\n"


async def chunks(
    choices: Choices,
    answers: Sequence[Choice],
    shape: Shape,
    kind: str,
    *,
    with_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """Chunks of all choices as they come; the usage, if it is wanted, when all have ended. Warnings come with the last."""
    ended: list[Finished] = []
    async with aclosing(choices):
        async for index, part in choices:
            chunk = answers[index].chunk(part)
            if isinstance(part, Finished):
                ended.append(part)
            is_last = len(ended) == len(answers)
            if chunk is not None:
                yield _event(shape.message([chunk], kind, **(warnings_of(ended) if is_last else {})))
            if is_last:
                if with_usage:
                    yield _event(shape.message([], kind, usage=usage_of(ended)))
                yield _DONE
