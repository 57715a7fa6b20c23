"""What the answer to one streamed request of the OpenAI API says, read after it has arrived.

Errors of the server are found here: ``Answer.problem`` is empty only for an answer that is whole, ends once and, where
that was asked for, has the one length it must have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bench.load.client import Exchange


@dataclass
class Answer:
    began: float
    ended: float
    times: list[float] = field(default_factory=list)  # when each piece of text arrived
    text: str = ""
    reason: str = ""  # of its end
    n_tokens: int = 0
    n_prompt_tokens: int = 0
    n_cached_tokens: int = 0
    was_aborted: bool = False
    problem: str = ""

    @property
    def first_token_s(self) -> float:
        return self.times[0] - self.began

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]


def read(exchange: Exchange, n_tokens: int | None = None) -> Answer:
    """Read an answer and say what is wrong with it. With *n_tokens* it must have that many, and text."""
    answer = Answer(exchange.began, exchange.ended, was_aborted=exchange.was_aborted)
    if exchange.error or not (exchange.is_complete or exchange.was_aborted):
        answer.problem = exchange.error or "the answer is not complete"
        return answer
    if exchange.status != 200 and not exchange.was_aborted:
        answer.problem = f"status {exchange.status}: {exchange.body[:200].decode('utf-8', 'replace')}"
        return answer
    try:
        _read_events(exchange, answer, n_tokens)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        answer.problem = f"not understood: {type(error).__name__}: {error}"
    return answer


def _read_events(exchange: Exchange, answer: Answer, n_tokens: int | None) -> None:
    texts: list[str] = []
    ends: list[str] = []
    n_done = 0
    for when, event in _events(exchange.parts):
        if event == "[DONE]":
            n_done += 1
            continue
        message: dict[str, Any] = json.loads(event)
        if "error" in message:
            answer.problem = f"error: {message['error']}"
            return
        for choice in message.get("choices", ()):
            if text := _text_of(choice):
                answer.times.append(when)
                texts.append(text)
            if choice.get("finish_reason"):
                ends.append(choice["finish_reason"])
        if usage := message.get("usage"):
            answer.n_tokens = usage["completion_tokens"]
            answer.n_prompt_tokens = usage["prompt_tokens"]
            answer.n_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    answer.text = "".join(texts)
    answer.reason = ends[0] if ends else ""
    if not answer.was_aborted:
        answer.problem = _problem(answer, ends, n_done, n_tokens)


def _problem(answer: Answer, ends: list[str], n_done: int, n_tokens: int | None) -> str:
    if (len(ends), n_done) != (1, 1):
        return f"ended with {ends} and {n_done} [DONE]"
    if not answer.n_prompt_tokens:
        return "no usage was reported"
    if n_tokens is None:
        return ""
    if (answer.reason, answer.n_tokens) != ("length", n_tokens):
        return f"{answer.n_tokens} tokens instead of {n_tokens}, then {answer.reason}"
    return "" if answer.times else "no text came"


def _text_of(choice: dict[str, Any]) -> str:
    text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
    if not isinstance(text, str | None):
        raise TypeError(f"a text is {text!r}"[:100])
    return text or ""


def _events(parts: list[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """The data of each event, with the arrival of its last byte."""
    rest = b""
    for when, part in parts:
        *events, rest = (rest + part).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield when, b"\n".join(lines).decode()
