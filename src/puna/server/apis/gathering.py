"""An answer as one message, for clients that do not want it part by part."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass

from puna.prompt.output import Call, Thought
from puna.server.answering.parts import AnswerPart, Choices, Finished, Logprobs, Parts
from puna.wire import TokenLogprob


@dataclass(frozen=True)
class Whole:
    """An answer with nothing left to come."""

    text: str
    thought: str
    calls: list[Call]
    logprobs: list[TokenLogprob]
    finished: Finished


class Gathering:
    """An answer that comes part by part."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._thought: list[str] = []
        self._calls: list[Call] = []
        self._logprobs: list[TokenLogprob] = []
        self._finished: Finished | None = None

    def add(self, part: AnswerPart) -> None:
        match part:
            case Finished():
                self._finished = part
            case Logprobs(entries):
                self._logprobs += entries
            case Thought(text):
                self._thought.append(text)
            case Call():
                self._calls.append(part)
            case text:
                self._text.append(text)

    @property
    def whole(self) -> Whole:
        assert self._finished is not None, "a generation ended without its last message"
        return Whole("".join(self._text), "".join(self._thought), self._calls, self._logprobs, self._finished)


async def gather(parts: Parts) -> Whole:
    gathering = Gathering()
    async with aclosing(parts):
        async for part in parts:
            gathering.add(part)
    return gathering.whole


async def gather_choices(choices: Choices, n: int) -> list[Whole]:
    gatherings = [Gathering() for _ in range(n)]
    async with aclosing(choices):
        async for number, part in choices:
            gatherings[number].add(part)
    return [gathering.whole for gathering in gatherings]
