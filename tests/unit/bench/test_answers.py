from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from bench.load.answers import Answer, read
from bench.load.client import Exchange
from bench.load.prompts import Prompts
from bench.load.sample import Sample, sample_of

USAGE = {"completion_tokens": 3, "prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}


def arrived(*parts: bytes, status: int = 200, **state: Any) -> Exchange:
    """An exchange that began at 10 and whose parts came at 11, 12, ..."""

    async def make() -> Exchange:
        return Exchange()

    exchange = asyncio.run(make())
    exchange.began, exchange.status, exchange.is_complete = 10.0, status, True
    exchange.parts = [(11.0 + number, part) for number, part in enumerate(parts)]
    exchange.ended = 10.0 + len(parts)
    for name, value in state.items():
        setattr(exchange, name, value)
    return exchange


def event(message: Any) -> bytes:
    return b"data: " + (message if isinstance(message, bytes) else json.dumps(message).encode()) + b"\n\n"


def delta(text: str | None, reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]})


END = (delta("", "length"), event({"choices": [], "usage": USAGE}), event(b"[DONE]"))


def test_a_whole_answer() -> None:
    answer = read(arrived(delta(None), delta("Hello"), delta(" wor"), delta("ld"), *END), 3)
    assert answer.problem == ""
    assert (answer.text, answer.times, answer.reason) == ("Hello world", [12.0, 13.0, 14.0], "length")
    assert (answer.n_tokens, answer.n_prompt_tokens, answer.n_cached_tokens) == (3, 9, 4)
    assert (answer.first_token_s, answer.gaps) == (2.0, [1.0, 1.0])


def test_an_event_counts_when_its_last_byte_is_there() -> None:
    whole = delta("Hello")
    answer = read(arrived(whole[:7], whole[7:-1], whole[-1:] + delta("you"), *END), 3)
    assert (answer.text, answer.times) == ("Helloyou", [13.0, 13.0])


def test_plain_completions_and_carriage_returns() -> None:
    text = event({"choices": [{"text": "Hi", "index": 0, "finish_reason": None}]})
    end = event({"choices": [{"text": "", "index": 0, "finish_reason": "length"}], "usage": USAGE})
    answer = read(arrived(text.replace(b"\n", b"\r\n"), end, b": a comment\n\n", event(b"[DONE]")), 3)
    assert (answer.problem, answer.text) == ("", "Hi")


@pytest.mark.parametrize(
    ("parts", "state", "problem"),
    [
        ((delta("a"), *END[:2]), {}, "ended with ['length'] and 0 [DONE]"),
        ((delta("a"), *END, event(b"[DONE]")), {}, "ended with ['length'] and 2 [DONE]"),
        ((delta("a"), *END[1:]), {}, "ended with [] and 1 [DONE]"),
        ((delta("a"), END[0], *END), {}, "ended with ['length', 'length'] and 1 [DONE]"),
        ((delta("a"), END[0], END[2]), {}, "no usage"),
        ((delta("a"), delta("", "stop"), *END[1:]), {}, "3 tokens instead of 3, then stop"),
        (END, {}, "no text came"),
        ((delta("a"), event({"error": {"message": "it broke"}})), {}, "it broke"),
        ((b"data: {\n\n",), {}, "not understood"),
        ((event({"choices": [{"delta": {"content": 7}}]}),), {}, "not understood"),
        ((b'{"error": "busy"}',), {"status": 503}, 'status 503: {"error": "busy"}'),
        ((delta("a"), *END), {"error": "the connection broke: x"}, "the connection broke"),
        ((delta("a"),), {"is_complete": False}, "not complete"),
    ],
)
def test_what_is_wrong_is_found(parts: tuple[bytes, ...], state: dict[str, Any], problem: str) -> None:
    assert problem in read(arrived(*parts, **state), 3).problem


def test_the_number_of_tokens_counts_only_where_it_is_known() -> None:
    exchange = arrived(delta("a"), *END)
    assert read(exchange, 2).problem == "3 tokens instead of 2, then length"
    assert read(exchange).problem == ""


def test_who_leaves_has_no_problem_but_what_came_until_then() -> None:
    answer = read(arrived(delta("a"), delta("b"), was_aborted=True, is_complete=False), 3)
    assert (answer.problem, answer.was_aborted, answer.text) == ("", True, "ab")


def test_figures_of_several_turns() -> None:
    first = sample_of(
        [
            Answer(10, 13, times=[11.0, 12.0, 13.0], n_tokens=4, n_prompt_tokens=9, n_cached_tokens=4),
            Answer(10, 13, problem="it broke"),
            Answer(10, 13, times=[11.0], was_aborted=True),
        ]
    )
    first.wall_s, first.client_cpu_s = 3.0, 0.3
    first.note(left=1, gap_max_s=7)
    second = sample_of([Answer(20, 25, times=[23.0, 25.0], n_tokens=2, n_prompt_tokens=1)])
    second.wall_s = 5.0
    second.note(left=4, gap_max_s=2)
    total = Sample()
    total.add(first)
    total.add(second)
    figures = total.figures()
    assert total.problems == ["it broke"]
    assert (figures["answers"], figures["tokens_per_s"], figures["tokens_per_text"]) == (2, 6 / 8, 6 / 5)
    assert (figures["prompt_tokens"], figures["computed_prompt_tokens"]) == (10, 6)
    assert (figures["first_token_p50_s"], figures["gap_p50_s"]) == (2.0, 1.0)
    assert figures["client_cpu_share"] == pytest.approx(0.3 / 8)
    assert (figures["left"], figures["gap_max_s"]) == (2.5, 7)


def test_prompts_are_the_same_for_a_name_and_differ_between_names() -> None:
    assert Prompts("a/0").words(50) == Prompts("a/0").words(50)
    assert Prompts("a/0").words(50) != Prompts("a/1").words(50)
    one = Prompts("a/0")
    assert one.words(50) != one.words(50)
    assert len(one.words(100).split()) == 100
