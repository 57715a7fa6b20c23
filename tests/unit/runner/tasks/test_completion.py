"""Logprobs travel with the text of their tokens: held with it, removed with a stop sequence, delivered at the end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.sample.vocabulary import WordTokenizer

from puna.errors import BadRequest
from puna.runner.tasks.completion import Completion
from puna.wire import CompletionReply, CompletionRequest, Done, Piece, TokenLogprob


class Conversation:
    """A request that is given tokens by hand; the pieces are the vocabulary."""

    def __init__(self, pieces: Sequence[str | bytes], **fields: object) -> None:
        self.words = [p.encode() if isinstance(p, str) else p for p in pieces]
        self.tokenizer = WordTokenizer(words=self.words)
        self.replies: list[CompletionReply] = []
        given = {"prompt": "x", "n_predict": 100, "logprobs": True, **fields}
        self.request = Completion(CompletionRequest(**given), self.tokenizer.as_tokenizer(), 512, self.replies.append)  # type: ignore[arg-type]

    def say(self) -> Conversation:
        """All pieces, each with its number as logprob, then the end of the answer."""
        for number, word in enumerate(self.words):
            if not self.request.is_done:
                self.request.accept(256 + number, TokenLogprob(text=word, logprob=-float(number)))
        if not self.request.is_done:
            self.request.accept(self.tokenizer.end, TokenLogprob(text=b"<|end|>", logprob=-99.0))
        return self

    @property
    def pieces(self) -> list[tuple[str, list[int]]]:
        return [(r.content, [int(-e.logprob) for e in r.logprobs]) for r in self.replies if isinstance(r, Piece)]

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    @property
    def entries(self) -> list[int]:
        return [entry for _, entries in self.pieces for entry in entries]


def test_each_piece_carries_its_tokens_and_the_end_has_none() -> None:
    assert Conversation(["Hel", "lo"]).say().pieces == [("Hel", [0]), ("lo", [1])]


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "n_entries"),
    [
        (["Hello", " there", "!"], "!", "Hello there", 2),
        (["a", "b", "c", "STOP"], "STOP", "abc", 3),
        (["Hello", " the", "re!"], "there!", "Hello ", 2),  # a piece that is cut keeps its entry
        (["one", " two", "E", "ND"], "END", "one two", 2),
        (["a", "b", "c", "d ", "stop", " ", "word"], "stop word", "abcd ", 4),
        (["hello", " wor", "ld"], "llo w", "he", 1),
        (["all of it"], "all", "", 0),
    ],
)
def test_what_a_stop_sequence_removes_loses_its_entries(pieces: list[str], stop: str, text: str, n_entries: int) -> None:
    conversation = Conversation(pieces, stop=[stop]).say()
    assert conversation.text == text
    assert conversation.entries == list(range(n_entries))


def test_what_is_held_back_holds_its_entries() -> None:
    conversation = Conversation(["a", "ST", "O", "X"], stop=["STOP"]).say()
    assert conversation.pieces == [("a", [0]), ("STOX", [1, 2, 3])]


def test_half_a_stop_sequence_at_the_end_is_text_like_any_other() -> None:
    assert Conversation(["a", "ST"], stop=["STOP"]).say().pieces == [("a", [0]), ("ST", [1])]


def test_the_tokens_of_one_character_come_together() -> None:
    sun = "☀".encode()
    assert Conversation([sun[:1], sun[1:2], sun[2:], "!"]).say().pieces == [("☀", [0, 1, 2]), ("!", [3])]


def test_entries_without_text_come_at_the_end() -> None:
    assert Conversation(["a", b""]).say().pieces == [("a", [0]), ("", [1])]


def test_a_limit_delivers_what_is_held() -> None:
    conversation = Conversation(["a", "ST", "O"], stop=["STOP"], n_predict=2).say()
    assert conversation.pieces == [("a", [0]), ("ST", [1])]
    end = conversation.replies[-1]
    assert isinstance(end, Done)
    assert end.reason == "length"


def test_a_cancelled_request_says_nothing_more() -> None:
    conversation = Conversation(["a", "ST", "O"], stop=["STOP"])
    conversation.request.accept(257, TokenLogprob(text=b"ST", logprob=0.0))
    conversation.request.finish("cancelled")
    assert conversation.pieces == []


@given(
    st.lists(st.sampled_from([b"a", b"b", b"ab", b"ba", b"", "é".encode()[:1], "é".encode()[1:], b"c"]), max_size=12),
    st.lists(st.sampled_from(["ab", "bab", "éa", "cc"]), max_size=2),
)
def test_entries_are_a_beginning_of_all_and_complete_without_a_stop(pieces: list[bytes], stop: list[str]) -> None:
    conversation = Conversation(pieces, stop=stop).say()
    assert conversation.entries == list(range(len(conversation.entries)))
    if not conversation.request._text.stopped:
        assert len(conversation.entries) == len(pieces)


@pytest.mark.parametrize("n_top", [-1, 21])
def test_too_many_alternatives_are_refused(n_top: int) -> None:
    with pytest.raises(BadRequest, match="between 0 and 20"):
        Conversation(["a"], top_logprobs=n_top)
