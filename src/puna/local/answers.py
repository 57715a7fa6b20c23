"""What a Python program gets: answers, their pieces, scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from puna import wire
from puna.prompt.output import Call, Thinking
from puna.server.answering.parts import AnswerPart, Finished
from puna.server.apis.collecting import CompleteAnswer


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]
    id: str


@dataclass(frozen=True)
class Logprob:
    """A token's natural logarithm of its probability among all, before temperature and filters; *top*: the likeliest instead."""

    token: str
    logprob: float
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True)
class Answer:
    """An answer with nothing left to come; ``str(answer)`` is its text. Durations in seconds."""

    text: str
    thinking: str
    tool_calls: tuple[ToolCall, ...]
    logprobs: tuple[Logprob, ...]
    reason: str  # stop, or length where the room or num_predict ended it
    prompt_tokens: int
    cached_tokens: int  # of those of the prompt, so many were not computed again
    tokens: int
    prompt_seconds: float
    seconds: float  # of the answer's tokens, after the first
    warnings: tuple[str, ...]  # what of the request had no effect, and what of the prompt had no room

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Chunk:
    """A piece of an answer that streams; ``str(chunk)`` is its text."""

    text: str = ""
    thinking: str = ""
    tool_call: ToolCall | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Ranked:
    index: int  # among the documents that were given
    score: float  # how well it answers, from 0 to 1
    document: str


def answer_of(complete: CompleteAnswer) -> Answer:
    finished = complete.finished
    done = finished.done
    return Answer(
        text=complete.text,
        thinking=complete.thinking,
        tool_calls=tuple(_tool_call(call) for call in complete.calls),
        logprobs=tuple(_logprob(entry) for entry in complete.logprobs),
        reason=done.reason,
        prompt_tokens=done.prompt_eval_count,
        cached_tokens=done.cached_count,
        tokens=done.eval_count,
        prompt_seconds=done.prompt_eval_duration / 1e9,
        seconds=done.eval_duration / 1e9,
        warnings=(*finished.warnings, *_left_out(finished)),
    )


def _left_out(finished: Finished) -> Iterator[str]:
    if finished.truncated_messages:
        n = finished.truncated_messages
        yield f"the prompt did not fit the context: {n} message{'s were' if n > 1 else ' was'} left out"
    elif finished.truncated_tokens:
        yield f"the prompt did not fit the context: at least {finished.truncated_tokens} tokens were left out"


def chunk_of(part: AnswerPart) -> Chunk | None:
    """None for what is no piece of the answer's text."""
    match part:
        case str():
            return Chunk(text=part)
        case Thinking(text):
            return Chunk(thinking=text)
        case Call():
            return Chunk(tool_call=_tool_call(part))
        case _:
            return None


def _tool_call(call: Call) -> ToolCall:
    return ToolCall(call.name, call.arguments, call.id)


def _logprob(entry: wire.TokenLogprob) -> Logprob:
    top = tuple(_logprob(other) for other in entry.top)
    return Logprob(entry.text.decode("utf-8", "replace"), entry.logprob, top)
