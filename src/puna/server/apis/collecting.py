"""An answer as one message, for clients that do not want it part by part."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass

from puna.prompt.output import Call, Thinking
from puna.server.answering.parts import AnswerPart, Choices, Finished, Logprobs, Parts
from puna.wire import TokenLogprob


@dataclass(frozen=True)
class CompleteAnswer:
    """An answer with nothing left to come."""

    text: str
    thinking: str
    calls: list[Call]
    logprobs: list[TokenLogprob]
    finished: Finished


class AnswerBuilder:
    """An answer that comes part by part."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._calls: list[Call] = []
        self._logprobs: list[TokenLogprob] = []
        self._finished: Finished | None = None

    def add(self, part: AnswerPart) -> None:
        match part:
            case Finished():
                self._finished = part
            case Logprobs(entries):
                self._logprobs += entries
            case Thinking(text):
                self._thinking.append(text)
            case Call():
                self._calls.append(part)
            case text:
                self._text.append(text)

    @property
    def has_ended(self) -> bool:
        return self._finished is not None

    @property
    def complete(self) -> CompleteAnswer:
        assert self._finished is not None, "a generation ended without its last message"
        return CompleteAnswer("".join(self._text), "".join(self._thinking), self._calls, self._logprobs, self._finished)


async def collect(parts: Parts) -> CompleteAnswer:
    builder = AnswerBuilder()
    async with aclosing(parts):
        async for part in parts:
            builder.add(part)
    return builder.complete


async def collect_choices(choices: Choices, n: int) -> list[CompleteAnswer]:
    builders = [AnswerBuilder() for _ in range(n)]
    async with aclosing(choices):
        async for number, part in choices:
            builders[number].add(part)
    return [builder.complete for builder in builders]
