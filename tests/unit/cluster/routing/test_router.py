from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.cluster.routing.router import Candidate, choose, in_turn, is_overloaded

CANDIDATES = st.lists(
    st.builds(
        Candidate,
        node=st.uuids().map(str),
        n_held=st.integers(0, 20),
        n_running=st.integers(0, 40),
        n_parallel=st.integers(1, 8),
        n_sent=st.integers(0, 100),
    ),
    min_size=1,
    max_size=8,
)


@given(CANDIDATES)
def test_the_longest_prefix_wins_among_those_that_are_not_overloaded(candidates: list[Candidate]) -> None:
    chosen = choose(candidates)
    least = min(candidate.n_running for candidate in candidates)
    assert not is_overloaded(chosen, least)
    for other in candidates:
        assert other.n_held <= chosen.n_held or is_overloaded(other, least)


@given(CANDIDATES)
def test_without_any_prefix_nobody_has_more_free_places(candidates: list[Candidate]) -> None:
    plain = [Candidate(c.node, 0, c.n_running, c.n_parallel, c.n_sent) for c in candidates]
    chosen = choose(plain)
    assert chosen.n_running / chosen.n_parallel == min(
        c.n_running / c.n_parallel for c in plain if not is_overloaded(c, min(o.n_running for o in plain))
    )


def test_a_holder_is_left_only_when_a_request_would_wait_there_and_not_elsewhere() -> None:
    def where(n_on_holder: int, n_elsewhere: int) -> str:
        return choose([Candidate("holder", 9, n_on_holder, 4), Candidate("other", 0, n_elsewhere, 4)]).node

    assert where(3, 0) == "holder"
    assert where(4, 1) == "holder"
    assert where(4, 0) == "other"
    assert where(30, 28) == "holder"
    assert where(30, 26) == "other"


def test_equals_take_turns() -> None:
    sent = {"a": 0, "b": 0, "c": 0}
    for _ in range(9):
        sent[choose([Candidate(node, 0, 0, 4, n) for node, n in sent.items()]).node] += 1
    assert sent == {"a": 3, "b": 3, "c": 3}
    assert in_turn([Candidate("a", 9, 0, 4, 5), Candidate("b", 0, 9, 4, 4)]).node == "b"


@pytest.mark.parametrize("route", [choose, in_turn])
def test_nothing_cannot_be_chosen_from(route: object) -> None:
    with pytest.raises(ValueError, match="nothing"):
        route([])  # type: ignore[operator]
