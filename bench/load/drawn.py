"""Requests of every kind drawn at random, and whether what came back is right: one end, the last thing said.

``RunnerFront`` speaks to a runner alone, ``ServerFront`` to a server in its three APIs. Request number i of a seed is
always the same, so whatever fails can be repeated.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from bench.load import answers
from bench.load.client import Exchange
from bench.load.prompts import WORDS
from puna import wire
from puna.errors import BadRequest

LEAVE_S = (0.001, 0.01, 0.1)
STARTS = tuple(" ".join(random.Random(number).choices(WORDS, k=40)) for number in range(3))  # prompts share them


@dataclass(frozen=True)
class Leaving:
    """When a client closes its connection: so long after it has so many parts of the answer."""

    after_s: float
    after_parts: int

    async def leave(self, exchange: Exchange) -> None:
        await exchange.wait_for_parts(self.after_parts)
        await asyncio.sleep(self.after_s)
        exchange.abort()


@dataclass(frozen=True)
class Drawn:
    """A request and how its client behaves."""

    path: str
    body: bytes
    end_of: Callable[[Exchange], str]
    refused_with: int | None = None  # the status with which it may be refused
    leaving: Leaving | None = None

    def judge(self, exchange: Exchange) -> str:
        """How the request ended, as a word for the statistics.

        Errors: AssertionError when it did not end as it must.
        """
        if exchange.was_aborted:
            return "left"
        assert not exchange.error, exchange.error
        assert exchange.is_complete, "the answer is not complete"
        if exchange.status != 200:
            error = json.loads(exchange.body)["error"]
            assert exchange.status == self.refused_with, f"status {exchange.status}: {error}"
            return "refused"
        return self.end_of(exchange)


class Front(Protocol):
    def draw(self, chance: random.Random) -> Drawn: ...

    def greedy(self, prompt: str, n_predict: int, *, shift: bool) -> tuple[str, bytes]:
        """Path and body of a request without chance, which goes on whatever the model says."""


def _text(chance: random.Random, n_ctx: int) -> str:
    """From a word to more than the context holds; a third begin like others, some have characters of several bytes."""
    n_words = chance.choice((1, 5, 20, n_ctx // 8, n_ctx // 4, n_ctx // 2))
    words = chance.choices(WORDS, k=chance.randint(1, max(1, n_words)))
    if chance.random() < 0.2:
        words.insert(chance.randrange(len(words)), "süß 🌈 日本")
    start = chance.choice(STARTS) + " " if chance.random() < 0.33 else ""
    return start + " ".join(words)


def _sampling(chance: random.Random) -> dict[str, Any]:
    drawn = {
        "temperature": chance.choice((0.0, 0.7, 2.0)),
        "top_k": chance.choice((0, 1, 40)),
        "top_p": chance.choice((0.5, 0.9, 1.0)),
        "min_p": chance.choice((0.0, 0.1)),
        "typical_p": chance.choice((0.7, 1.0)),
        "repeat_penalty": chance.choice((1.0, 1.3)),
        "presence_penalty": chance.choice((0.0, 0.5)),
        "seed": chance.choice((-1, 7)),
    }
    return {name: value for name, value in drawn.items() if chance.random() < 0.5}


def _n_predict(chance: random.Random, n_ctx: int) -> int:
    return chance.choice((0, 1, 2, 10, 30, 30, 60, n_ctx + n_ctx // 2))


def _stops(chance: random.Random) -> list[str]:
    return chance.choices(("e", " the", "ing", "\n", "never to be said", "日"), k=chance.choice((0, 0, 1, 3)))


def _leaving(chance: random.Random) -> Leaving | None:
    if chance.random() > 0.3:
        return None
    return Leaving(chance.uniform(0, chance.choice(LEAVE_S)), chance.choice((0, 0, 1, 2, 5)))


def _check_stops(text: str, stops: list[str]) -> None:
    assert not any(stop in text for stop in stops), f"a stop sequence of {stops} in the text"


@dataclass(frozen=True)
class RunnerFront:
    n_ctx: int

    def greedy(self, prompt: str, n_predict: int, *, shift: bool) -> tuple[str, bytes]:
        sampling = wire.SamplingOptions(temperature=0)
        request = wire.CompletionRequest(prompt=prompt, n_predict=n_predict, shift=shift, ignore_eos=True, sampling=sampling)
        return "/completion", wire.encode(request)

    def draw(self, chance: random.Random) -> Drawn:
        if chance.random() < 0.03:
            return Drawn("/completion", b'{"prompt": 1}', _no_end, refused_with=400)
        request = wire.CompletionRequest(
            prompt=_text(chance, self.n_ctx),
            context=chance.choices(range(4, 300), k=chance.choice((0, 0, 0, 10))),
            sampling=wire.SamplingOptions(**_sampling(chance)),
            n_predict=_n_predict(chance, self.n_ctx),
            n_keep=chance.choice((-1, 0, 4, 50)),
            stop=_stops(chance),
            ignore_eos=chance.random() < 0.5,
            truncate=chance.random() < 0.8,
            shift=chance.random() < 0.7,
            return_tokens=chance.random() < 0.2,
        )

        def end_of(exchange: Exchange) -> str:
            return _runner_end(exchange, request)

        refused_with = None if request.truncate else 400
        return Drawn("/completion", wire.encode(request), end_of, refused_with, _leaving(chance))


def _no_end(_: Exchange) -> str:
    raise AssertionError("what cannot be understood was answered")


def _runner_end(exchange: Exchange, request: wire.CompletionRequest) -> str:
    try:
        replies = [wire.decode_reply(line) for line in exchange.body.splitlines()]
    except BadRequest as error:
        raise AssertionError(f"not a reply: {error}") from error
    ends = [reply for reply in replies if not isinstance(reply, wire.Piece)]
    assert len(ends) == 1, f"{len(ends)} terminal replies"
    done = replies[-1]
    assert isinstance(done, wire.Done), f"the end is {done}"
    assert done.reason != "cancelled", "cancelled by nobody"
    assert done.eval_count <= request.n_predict, f"{done.eval_count} tokens of {request.n_predict}"
    assert 0 <= done.cached_count < done.prompt_eval_count, f"{done.cached_count} cached of {done.prompt_eval_count}"
    if request.return_tokens:
        assert len(done.tokens) == done.prompt_eval_count + done.eval_count, "not all tokens were returned"
    _check_stops("".join(reply.content for reply in replies if isinstance(reply, wire.Piece)), request.stop)
    return done.reason


@dataclass(frozen=True)
class ServerFront:
    model: str
    n_ctx: int

    def greedy(self, prompt: str, n_predict: int, *, shift: bool) -> tuple[str, bytes]:
        options = {"temperature": 0, "num_predict": n_predict, "ignore_eos": True}
        body = {"model": self.model, "prompt": prompt, "raw": True, "shift": shift, "options": options}
        return "/api/generate", json.dumps(body).encode()

    def draw(self, chance: random.Random) -> Drawn:
        draw = chance.choice((self._native, self._native, self._openai))
        return draw(chance)

    def _native(self, chance: random.Random) -> Drawn:
        stream = chance.random() < 0.8
        stops, truncate = _stops(chance), chance.random() < 0.8
        options = _sampling(chance) | {"num_predict": _n_predict(chance, self.n_ctx), "stop": stops}
        options |= {} if chance.random() < 0.5 else {"num_ctx": self.n_ctx // 2}  # less than is loaded: no reason to load anew
        body = {"model": self.model, "stream": stream, "options": options, "truncate": truncate, "shift": chance.random() < 0.7}
        text = _text(chance, self.n_ctx)
        is_bad = chance.random() < 0.03
        if is_bad:
            options["temperature"] = "hot"
        if chance.random() < 0.5:
            path, body = "/api/generate", body | {"prompt": text, "raw": chance.random() < 0.5}
        else:
            earlier = [{"role": chance.choice(("user", "assistant")), "content": _text(chance, 64)} for _ in range(3)]
            path, body = "/api/chat", body | {"messages": [*earlier, {"role": "user", "content": text}]}

        def end_of(exchange: Exchange) -> str:
            assert not is_bad, "what cannot be understood was answered"
            return _native_end(exchange, stops)

        refused_with = 500 if is_bad else None if truncate else 400
        return Drawn(path, json.dumps(body).encode(), end_of, refused_with, _leaving(chance))

    def _openai(self, chance: random.Random) -> Drawn:
        stops, n_tokens = _stops(chance), chance.choice((1, 10, 30))
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": _text(chance, self.n_ctx)}],
            "max_tokens": n_tokens,
            "stop": stops,
            "temperature": chance.choice((0, 1)),
            "stream": True,
            "stream_options": {"include_usage": True},
        }

        def end_of(exchange: Exchange) -> str:
            return _openai_end(exchange, stops, n_tokens)

        return Drawn("/v1/chat/completions", json.dumps(body).encode(), end_of, leaving=_leaving(chance))


def _native_end(exchange: Exchange, stops: list[str]) -> str:
    lines = [json.loads(line) for line in exchange.body.splitlines()]
    errors = [line["error"] for line in lines if "error" in line]
    assert not errors, errors
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True], "done is not said once, at the end"
    _check_stops("".join(line["message"]["content"] if "message" in line else line["response"] for line in lines), stops)
    reason = lines[-1]["done_reason"]
    assert isinstance(reason, str)
    return reason


def _openai_end(exchange: Exchange, stops: list[str], n_tokens: int) -> str:
    answer = answers.read(exchange)
    assert not answer.problem, answer.problem
    assert answer.n_tokens <= n_tokens, f"{answer.n_tokens} tokens of {n_tokens}"
    _check_stops(answer.text, stops)
    return answer.reason
