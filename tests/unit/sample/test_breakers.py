"""Breakers found with whole arrays, against looking at each token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.sample.vocabulary import WordTokenizer

from puna.errors import BadRequest
from puna.sample.breakers import MAX_BREAKERS, MAX_CHARACTERS, breakers_of

WORDS = [b"the", b" the fox", b"e f", b"\n\n", b": x", "né".encode(), "é".encode(), b"aab", b"ab", b"x:\n", b"aa"]
TOKENIZER = WordTokenizer(words=WORDS)


def naive(texts: list[str]) -> set[tuple[int, ...]]:
    found: set[tuple[int, ...]] = set()
    for text in texts:
        wanted = text.encode()
        for token in range(TOKENIZER.n_tokens):
            piece = TOKENIZER.piece(token, special=True)
            if wanted in piece:
                found.add((token,))
                continue
            for n in range(1, len(wanted)):
                rest = wanted[n:].decode("utf-8", "replace")
                if piece.endswith(wanted[:n]) and "�" not in rest:
                    found.add((token, *TOKENIZER.encode(rest)))
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(alphabet="aben\n:x thé", min_size=1, max_size=5), max_size=4))
def test_every_token_that_holds_or_begins_a_breaker_is_found(texts: list[str]) -> None:
    found = breakers_of(TOKENIZER.as_tokenizer(), texts)
    assert {sequence for sequences in found.values() for sequence in sequences} == naive(texts)
    assert all(sequence[-1] == last for last, sequences in found.items() for sequence in sequences)


def test_the_same_texts_are_looked_up_once() -> None:
    first = breakers_of(TOKENIZER.as_tokenizer(), ["the", "x"])
    n_encoded = TOKENIZER.n_encoded
    assert breakers_of(TOKENIZER.as_tokenizer(), ["the", "x", "the"]) is first
    assert TOKENIZER.n_encoded == n_encoded


def test_there_is_a_bound_on_breakers() -> None:
    long = "a" * MAX_CHARACTERS
    assert breakers_of(TOKENIZER.as_tokenizer(), [long * 1000]) == breakers_of(TOKENIZER.as_tokenizer(), [long])
    with pytest.raises(BadRequest, match="dry_sequence_breakers"):
        breakers_of(TOKENIZER.as_tokenizer(), ["x"] * (MAX_BREAKERS + 1))
