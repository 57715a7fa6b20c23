from __future__ import annotations

import asyncio
import json

import pytest
from bench.load import answers, rows
from bench.load.answers import Answer
from bench.load.contenders import Contender
from bench.load.prompts import Prompts
from bench.load.rows import ROWS, Target, _note_gaps
from bench.load.sample import Sample


def stream(*times: float) -> Answer:
    return Answer(0, 100, times=list(times), was_aborted=True)


def noted(*streams: Answer) -> dict[str, float]:
    """Of a prompt that arrives at 10 and has its first token at 20; on an idle server it took 6."""
    sample = Sample()
    _note_gaps(sample, Answer(0, 6, times=[6.0]), Answer(10, 20, times=[20.0]), list(streams))
    return {name: value for name, (value,) in sample.extra.items()} | {"gap_max_of_all": max(sample.gaps_s)}


def test_a_token_without_text_is_no_stall() -> None:
    """The second stream's token at 16 has no text: its reader waits twice as long, but the server did not stop."""
    found = noted(stream(8, 9, 13, 16, 19), stream(8, 9, 13, 19))
    assert found["gap_before_p50_s"] == 1
    assert (found["gap_max_s"], found["stall_max_s"]) == (6, 3)
    assert (found["chunks"], found["chunk_s"], found["stall_max_per_chunk"]) == (3, 2, 1.5)


def test_streams_that_get_nothing_have_waited_all_the_time() -> None:
    found = noted(stream(8, 9), stream(8, 9))
    assert (found["gap_max_of_all"], found["stall_max_s"], found["chunks"]) == (10, 10, 1)
    assert found["chunk_s"] == pytest.approx(6)


def test_a_gap_begins_before_the_prompt_and_ends_with_the_last_text_before_its_token() -> None:
    found = noted(stream(8, 9, 18, 30))
    assert (found["gap_max_s"], found["stall_max_s"]) == (9, 8)


def test_a_conversation_is_told_in_turn_and_a_text_as_one() -> None:
    peer = Contender("peer", "http://peer", "m")
    chat, text = (json.loads(Target(peer, api)._body(["one", "two", "three"], 5, {})) for api in ("chat", "text"))
    assert [(m["role"], m["content"]) for m in chat["messages"]] == [("user", "one"), ("assistant", "two"), ("user", "three")]
    assert text["prompt"] == "one two three"


def test_rows_have_names_of_their_own() -> None:
    assert len({row.key for row in ROWS}) == len(ROWS)


def test_of_mixed_prompts_those_that_are_short_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes a millisecond for each word before its first token."""
    asked: list[int] = []

    async def ask(_: Target, prompt: str, n_tokens: int) -> int:
        assert n_tokens == 3
        asked.append(len(prompt.split()))
        return asked[-1]

    async def patiently(_: object) -> None:
        """All is there at once."""

    def read(n_words: int, n_tokens: int) -> Answer:
        return Answer(0, 1, times=[n_words / 1000 + i for i in range(n_tokens)], n_tokens=n_tokens)

    monkeypatch.setattr(Target, "ask", ask)
    monkeypatch.setattr(rows, "_patiently", patiently)
    monkeypatch.setattr(answers, "read", read)
    monkeypatch.setattr(rows, "_timed", lambda sample, *_: sample)
    measure = rows.mixed(2, 8, every=4, n_words=5, n_long_words=70, n_tokens=3)

    async def run() -> Sample:
        return await measure(Target(Contender("one", "", "")), Prompts("mixed"))

    sample = asyncio.run(run())
    assert sorted(asked) == [5] * 6 + [70] * 2
    assert sample.n_answers == 8
    assert sample.extra["short_first_token_p50_s"] == sample.extra["short_first_token_max_s"] == [pytest.approx(0.005)]
    assert sample.extra["long_first_token_p50_s"] == [pytest.approx(0.070)]
