"""The loads that a server is put under: each row sends requests to one contender and returns what came of them.

Every request asks for a fixed number of tokens at temperature 0, whatever the model would say.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from bench.load import answers
from bench.load.answers import Answer
from bench.load.client import Exchange
from bench.load.contenders import Contender
from bench.load.prompts import Prompts
from bench.load.sample import Sample, sample_of

API = Literal["chat", "text"]
Talk = list[str]  # what was said, by the user first and then in turn
PATIENCE_S = 600.0  # an answer that takes longer counts as none


@dataclass(frozen=True)
class Target:
    """A contender and the API it is spoken to in."""

    contender: Contender
    api: API = "chat"

    async def ask(self, prompt: str | Talk, n_tokens: int, **more: Any) -> Exchange:
        path = "/v1/chat/completions" if self.api == "chat" else "/v1/completions"
        return await Exchange.post(self.contender.url + path, self._body(prompt, n_tokens, more))

    def _body(self, prompt: str | Talk, n_tokens: int, more: dict[str, Any]) -> bytes:
        body: dict[str, Any] = {
            "model": self.contender.model,
            "max_tokens": n_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }
        said = [prompt] if isinstance(prompt, str) else prompt
        if self.api == "chat":
            body["messages"] = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
        else:
            body["prompt"] = " ".join(said)
        return json.dumps(body).encode()

    async def answer(self, prompt: str | Talk, n_tokens: int) -> Answer:
        return await finished(await self.ask(prompt, n_tokens), n_tokens)


async def finished(exchange: Exchange, n_tokens: int) -> Answer:
    try:
        async with asyncio.timeout(PATIENCE_S):
            await exchange.wait()
    except TimeoutError:
        exchange.abort()
        return Answer(exchange.began, exchange.ended, problem=f"no end within {PATIENCE_S:g} s")
    return answers.read(exchange, n_tokens)


Measure = Callable[[Target, Prompts], Awaitable[Sample]]


@dataclass(frozen=True)
class Row:
    key: str  # as the command line names it
    what: str
    measure: Measure


def clients(n_clients: int, n_requests: int, n_words: int = 100, n_tokens: int = 64, **more: Any) -> Measure:
    """So many clients, each of which sends its next request when the last is answered; *more* is part of each."""

    async def measure(target: Target, prompts: Prompts) -> Sample:
        texts = [prompts.words(n_words) for _ in range(n_requests)]
        waiting = iter(texts)
        exchanges: list[Exchange] = []

        async def client() -> None:
            for text in waiting:
                exchange = await target.ask(text, n_tokens, **more)
                exchanges.append(exchange)
                await _patiently([exchange])

        begin = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(n_clients)))
        return _timed(sample_of(answers.read(exchange, n_tokens) for exchange in exchanges), begin, exchanges)

    return measure


def mixed(
    n_clients: int, n_requests: int, every: int = 8, n_words: int = 20, n_long_words: int = 1500, n_tokens: int = 48
) -> Measure:
    """So many clients with short prompts, one of so many of which is long: how long do the short ones wait for it?"""

    async def measure(target: Target, prompts: Prompts) -> Sample:
        kinds = [i % every == every // 2 for i in range(n_requests)]
        asked = iter([(is_long, prompts.words(n_long_words if is_long else n_words)) for is_long in kinds])
        exchanges: list[tuple[bool, Exchange]] = []

        async def client() -> None:
            for is_long, text in asked:
                exchange = await target.ask(text, n_tokens)
                exchanges.append((is_long, exchange))
                await _patiently([exchange])

        begin = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(n_clients)))
        read = [(is_long, answers.read(exchange, n_tokens)) for is_long, exchange in exchanges]
        sample = _timed(sample_of(answer for _, answer in read), begin, [exchange for _, exchange in exchanges])
        short, long = (
            [a.first_token_s for is_long, a in read if is_long == wanted and not a.problem] for wanted in (False, True)
        )
        if short and long:
            sample.note(short_first_token_p50_s=statistics.median(short), short_first_token_max_s=max(short))
            sample.note(long_first_token_p50_s=statistics.median(long))
        return sample

    return measure


# Longer than any answer that is asked for, so that no grammar is complete before its time.
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_PEOPLE = {"type": "array", "items": _PERSON, "minItems": 100, "maxItems": 100}
SCHEMA = {"type": "object", "properties": {"people": _PEOPLE}, "required": ["people"], "additionalProperties": False}


def constrained(n_clients: int, n_requests: int) -> Measure:
    """The same clients without and with a JSON schema: by how much does the time between two texts grow?

    The sample is that of the schema. Only the chat API has one.
    """
    free = clients(n_clients, n_requests)
    schema = {"type": "json_schema", "json_schema": {"name": "people", "schema": SCHEMA}}
    bound = clients(n_clients, n_requests, response_format=schema)

    async def measure(target: Target, prompts: Prompts) -> Sample:
        if target.api != "chat":
            return Sample(problems=["this row needs the chat API"])
        await clients(1, 1, n_tokens=8, response_format=schema)(target, prompts)  # compiled once per server
        without, sample = await free(target, prompts), await bound(target, prompts)
        sample.problems += without.problems
        if without.gaps_s and sample.gaps_s:
            before, after = statistics.median(without.gaps_s), statistics.median(sample.gaps_s)
            mean_growth = statistics.fmean(sample.gaps_s) / statistics.fmean(without.gaps_s)
            sample.note(gap_free_p50_s=before, gap_growth=after / before, gap_mean_growth=mean_growth)
        return sample

    return measure


def shared_prefix(n_requests: int, n_shared_words: int = 400, n_own_words: int = 20, n_tokens: int = 16) -> Measure:
    """Requests that begin alike and arrive together."""

    async def measure(target: Target, prompts: Prompts) -> Sample:
        shared = prompts.words(n_shared_words)
        texts = [f"{shared} {prompts.words(n_own_words)}" for _ in range(n_requests)]
        begin = time.perf_counter()
        exchanges = await asyncio.gather(*(target.ask(text, n_tokens) for text in texts))
        await _patiently(exchanges)
        return _timed(sample_of(answers.read(exchange, n_tokens) for exchange in exchanges), begin, exchanges)

    return measure


def conversations(n_talks: int, n_turns: int, n_words: int = 100, n_tokens: int = 32) -> Measure:
    """Conversations that go on in turn, one request at a time: what of each is still known when it comes back?"""

    async def measure(target: Target, prompts: Prompts) -> Sample:
        talks: list[Talk] = [[] for _ in range(n_talks)]
        heard: list[Answer] = []
        begin = time.perf_counter()
        for talk in talks * n_turns:
            talk.append(prompts.words(n_words))
            heard.append(await target.answer(talk, n_tokens))
            talk.append(heard[-1].text)
        return _timed(sample_of(heard), begin, heard)

    return measure


def long_prompt(n_streams: int, n_words: int, n_stream_words: int = 30) -> Measure:
    """A long prompt that arrives while others read their answers: how long do they wait for their next token?

    A contender computes the prompt in chunks, and between two chunks each stream gets a token. So the streams' tokens
    count the chunks, and the prompt's time on an idle server, divided by them, is what one chunk costs by itself.
    """

    async def measure(target: Target, prompts: Prompts) -> Sample:
        idle = await target.answer(prompts.words(n_words), 1)
        if idle.problem:
            return sample_of([idle])
        n_tokens = 2000  # more than the streams live to see
        streams = await asyncio.gather(*(target.ask(prompts.words(n_stream_words), n_tokens) for _ in range(n_streams)))
        await asyncio.gather(*(stream.wait_for_parts(24) for stream in streams))
        begin = time.perf_counter()
        late = await finished(await target.ask(prompts.words(n_words), 1), 1)
        for stream in streams:
            stream.abort()
        read = [answers.read(stream, n_tokens) for stream in streams]
        sample = _timed(sample_of([late]), begin, [late])
        sample.problems += [answer.problem or "ended too early" for answer in read if answer.problem or not answer.was_aborted]
        if sample.problems:
            return sample
        _note_gaps(sample, idle, late, read)
        return sample

    return measure


def _note_gaps(sample: Sample, idle: Answer, late: Answer, streams: list[Answer]) -> None:
    begin, end = late.began, late.times[0]
    before = [b - a for stream in streams for a, b in pairwise(stream.times) if b < begin]
    # A gap that began before the prompt was there and ended after it counts: the stream's reader has waited.
    during = [b - a for stream in streams for a, b in pairwise(stream.times) if begin <= b <= end]
    # Who got nothing from the prompt's arrival to its first token has waited at least so long.
    during += [end - begin for stream in streams if not any(begin <= time <= end for time in stream.times)]
    # Some tokens have no text, which looks like a wait to one reader; what stops the server stops all readers.
    anyone = sorted(time for stream in streams for time in stream.times if begin <= time <= end)
    stall_s = max(b - a for a, b in pairwise([begin, *anyone, end]))
    n_chunks = max(1, *(sum(begin <= time <= end for time in stream.times) for stream in streams))
    chunk_s = idle.first_token_s / n_chunks
    sample.gaps_s = during
    sample.n_tokens = sample.n_texts = 0  # one token says nothing of throughput
    sample.note(
        gap_before_p50_s=statistics.median(before),
        gap_max_s=max(during),
        stall_max_s=stall_s,
        idle_first_token_s=idle.first_token_s,
        chunks=n_chunks,
        chunk_s=chunk_s,
        stall_max_per_chunk=stall_s / chunk_s,
    )


def cancels(n_clients: int, share: float = 0.6, within_s: float = 8.0, n_tokens: int = 64) -> Measure:
    """Many clients at once, of whom a share leaves at random times; then one more asks, and must be answered."""

    async def measure(target: Target, prompts: Prompts) -> Sample:
        chance = random.Random(prompts.words(8))
        begin = time.perf_counter()
        exchanges = await asyncio.gather(
            *(target.ask(prompts.words(chance.randint(10, 150)), n_tokens) for _ in range(n_clients))
        )
        loop = asyncio.get_running_loop()
        for exchange in exchanges:
            if chance.random() < share:
                loop.call_later(chance.uniform(0, within_s), exchange.abort)
        await _patiently(exchanges)
        read = [answers.read(exchange, n_tokens) for exchange in exchanges]
        sample = _timed(sample_of(read), begin, exchanges)
        asked = time.perf_counter()
        after = await target.answer(prompts.words(10), 4)
        sample.problems += [f"afterwards: {after.problem}"] if after.problem else []
        sample.note(left=sum(answer.was_aborted for answer in read), answer_afterwards_s=time.perf_counter() - asked)
        return sample

    return measure


async def _patiently(exchanges: Iterable[Exchange]) -> None:
    """Wait for all ends; what has none within PATIENCE_S is aborted, with a word about it."""
    waits = [asyncio.ensure_future(exchange.wait()) for exchange in exchanges]
    _, late = await asyncio.wait(waits, timeout=PATIENCE_S)
    for exchange, wait in zip(exchanges, waits, strict=True):
        if wait in late:
            exchange.abort()
            exchange.error = f"no end within {PATIENCE_S:g} s"


def _timed(sample: Sample, begin: float, ended: Iterable[Exchange] | Iterable[Answer]) -> Sample:
    sample.wall_s = max(item.ended for item in ended) - begin
    return sample


ROWS = [
    Row("1", "1 client, 100 words each", clients(1, 4)),
    Row("8", "8 clients, 100 words each", clients(8, 16)),
    Row("32", "32 clients, 100 words each", clients(32, 32)),
    Row("mixed", "8 clients, 20 words each, every eighth 1,500", mixed(8, 32)),
    Row("prefix", "16 at once, 400 words shared", shared_prefix(16)),
    Row("talks", "24 conversations in turn, 3 times 100 words each", conversations(24, 3)),
    Row("long", "4,000 words amid 4 streams", long_prompt(4, 4000)),
    Row("schema", "8 clients, answers by a JSON schema", constrained(8, 16)),
    Row("cancel", "64 at once, 60 % leave", cancels(64)),
]
WARM_UP = clients(8, 8, n_words=20, n_tokens=8)
