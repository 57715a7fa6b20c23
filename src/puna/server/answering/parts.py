"""What an answer consists of on its way to the APIs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from puna import wire
from puna.prompt.output import Part


@dataclass(frozen=True)
class Finished:
    """The end of an answer, with durations in nanoseconds from the request's arrival."""

    done: wire.Done
    load_ns: int
    total_ns: int
    truncated_messages: int = 0  # that did not fit the context
    truncated_tokens: int = 0  # of them and of the rest of the prompt
    warnings: list[str] = field(default_factory=list)  # what of the request had no effect on the answer


@dataclass(frozen=True)
class Logprobs:
    """Those of tokens whose text, or the beginning of it, comes next; it may have come already, or be no part of the answer."""

    entries: list[wire.TokenLogprob]


AnswerPart = Part | Logprobs | Finished
Parts = AsyncGenerator[AnswerPart, None]
Choices = AsyncGenerator[tuple[int, AnswerPart], None]  # with the numbers of the answers
