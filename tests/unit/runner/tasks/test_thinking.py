"""Thinking is counted, and ended when its budget is spent, however the tags are cut into tokens."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.sample.vocabulary import WordTokenizer

from puna.errors import BadRequest
from puna.runner.tasks.completion import Request
from puna.runner.tasks.thinking import ThinkingMeter
from puna.wire import CompletionReply, CompletionRequest, Done, Piece, Thinking

TAGS = {"begin": "<think>", "end": "</think>"}
TEXTS = ["<think>", "</think>", "why", " not", "so", "<thi", "nk>", "</th", "ink>"]
WORDS = [*(text.encode() for text in TEXTS), "☀".encode()[:2], "☀".encode()[2:]]


def meter(**fields: object) -> tuple[ThinkingMeter, WordTokenizer]:
    tokenizer = WordTokenizer(words=WORDS)
    return ThinkingMeter(Thinking(**{**TAGS, **fields}), tokenizer.as_tokenizer()), tokenizer  # type: ignore[arg-type]


def count(pieces: list[str], **fields: object) -> int:
    found, _ = meter(**fields)
    for piece in pieces:
        found.accept(0, piece.encode())
    return found.n_tokens


@pytest.mark.parametrize(
    ("pieces", "fields", "n_tokens"),
    [
        (["Hello", " world"], {}, 0),
        (["<think>", "a", "b", "</think>", "c"], {}, 2),
        (["\n", "<thi", "nk>a", "b", "</", "think>", "c", "<think>", "d"], {}, 1),  # "a" came with the tag
        (["Hm", "<think>", "a", "</think>"], {}, 0),  # it did not begin with it
        (["a", "b", "</think>", "c"], {"is_open": True}, 2),
        (["<think>", "a", "b"], {}, 2),  # never ended
        (["<think>", "a</th", "ink>", "c"], {}, 1),
        (["<think>", "a", "</think>", "x", "<think>", "b", "c", "</think>", "y"], {"repeats": True}, 3),
        (["x", "<think>a</think><think>", "b"], {"repeats": True}, 1),
        (["<think>", "</think>", "c"], {}, 0),
    ],
)
def test_tokens_of_thoughts_are_counted(pieces: list[str], fields: dict[str, object], n_tokens: int) -> None:
    assert count(pieces, **fields) == n_tokens


@given(st.lists(st.integers(0, 60), max_size=12))
def test_where_a_thought_begins_and_ends_does_not_depend_on_the_cuts(cuts: list[int]) -> None:
    """Only a token that holds both a tag and a thought is ambiguous; of single characters none does."""
    text = "  <think>because</think>it is so"
    bounds = [0, *sorted({min(cut, len(text)) for cut in cuts}), len(text)]
    pieces = [text[begin:end] for begin, end in itertools.pairwise(bounds)]
    inside = range(len("  <think>"), text.index("</think>"))
    begins = list(itertools.accumulate(map(len, pieces), initial=0))[:-1]
    assert count(pieces) == sum(begin in inside and bool(piece) for begin, piece in zip(begins, pieces, strict=True))


@pytest.mark.parametrize("fields", [{"end": ""}, {"begin": ""}, {"begin": "", "is_open": True, "repeats": True}])
def test_tags_without_text_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(BadRequest, match="begin and end must not be empty"):
        meter(**fields)


class Thinker:
    """A model that says "why" again and again; the request decides what is forced upon it."""

    def __init__(self, *, say: str = "why", n_tokens: int = 40, **fields: object) -> None:
        self.replies: list[CompletionReply] = []
        self.tokenizer = WordTokenizer(words=WORDS)
        wire = CompletionRequest(prompt="x", n_predict=n_tokens, thinking=Thinking(**{**TAGS, **fields}))  # type: ignore[arg-type]
        self.request = Request(wire, self.tokenizer.as_tokenizer(), 512, self.replies.append)
        opening = [] if fields.get("is_open") else ["<think>"]
        script = iter([*opening, *[say] * n_tokens])
        while not self.request.is_done:
            forced = self.request.forced_token
            self.request.accept(256 + TEXTS.index(next(script)) if forced is None else forced)

    @property
    def text(self) -> str:
        return "".join(reply.content for reply in self.replies if isinstance(reply, Piece))

    @property
    def done(self) -> Done:
        assert isinstance(self.replies[-1], Done)
        return self.replies[-1]


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_spent_budget_ends_the_thought_and_the_answer_follows(budget: int) -> None:
    answer = Thinker(budget=budget)
    assert answer.text.startswith("<think>" + "why" * budget + "</think>why")
    assert answer.text.count("</think>") == 1
    assert (answer.done.thinking_count, answer.done.eval_count) == (budget, 40)


def test_a_thought_that_the_prompt_began_is_ended_too() -> None:
    answer = Thinker(budget=3, is_open=True)
    assert answer.text.startswith("whywhywhy</think>why")
    assert answer.done.thinking_count == 3


def test_what_is_written_at_the_end_may_be_longer_than_the_tag() -> None:
    answer = Thinker(budget=2, ending="so</think>why not")
    assert answer.text.startswith("<think>whywhyso</think>why notwhy")


def test_without_a_budget_nothing_is_forced() -> None:
    answer = Thinker()
    assert "</think>" not in answer.text
    assert answer.done.thinking_count == 39


def test_of_thoughts_that_come_again_all_count() -> None:
    """As in the harmony format, where each message names its channel: once the budget is spent no more thoughts are had."""
    answer = Thinker(budget=4, repeats=True, say="<think>")
    assert answer.text.startswith("<think>" * 5 + "</think><think></think><think></think>")
    assert answer.done.thinking_count == 4


def test_a_character_is_finished_first() -> None:
    tokenizer = WordTokenizer(words=WORDS)
    wire = CompletionRequest(prompt="x", thinking=Thinking(**TAGS, is_open=True, budget=1))  # type: ignore[arg-type]
    request = Request(wire, tokenizer.as_tokenizer(), 512, lambda _: None)
    request.accept(256 + 9)  # two bytes of three
    assert request.forced_token is None
    request.accept(256 + 10)
    assert request.forced_token == tokenizer.as_tokenizer().encode("</think>", add_special=False)[0]
