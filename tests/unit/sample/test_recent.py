from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.sample.recent import RecentTokens

steps = st.lists(st.one_of(st.integers(0, 9), st.lists(st.integers(0, 9), max_size=12)), max_size=60)


@given(st.integers(-1, 7), steps)
def test_the_window_counts_its_last_tokens(length: int, added: list[int | list[int]]) -> None:
    window, history = RecentTokens(length), []
    for tokens in added:
        if isinstance(tokens, int):
            window.append(tokens)
            history.append(tokens)
        else:
            window.extend(tokens)
            history += tokens
        expected = Counter(history if length < 0 else history[max(len(history) - length, 0) :])
        found, counts = window.distinct
        assert len(set(found.tolist())) == len(found)
        assert dict(zip(found.tolist(), counts.tolist(), strict=True)) == expected


@pytest.mark.parametrize("length", [-1, 500])
def test_more_distinct_tokens_than_fit_at_first(length: int) -> None:
    window = RecentTokens(length)
    window.extend(range(1000))
    tokens, counts = window.distinct
    assert sorted(tokens.tolist()) == list(range(1000))[-length if length > 0 else 0 :]
    assert set(counts.tolist()) == {1}
