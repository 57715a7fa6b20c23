from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from puna.cluster.routing.book import PrefixBook

# Prompts as paths of a tree: a key stands for all those before it.
PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=20)


def keys(path: list[int]) -> list[int]:
    return [hash(tuple(path[: n + 1])) for n in range(len(path))]


@given(PATHS, st.integers(1, 12))
def test_what_is_held_has_no_gaps_and_is_no_more_than_fits(paths: list[list[int]], capacity: int) -> None:
    book = PrefixBook(capacity)
    for path in paths:
        book.record(keys(path), 10)
        assert len(book) <= capacity
        for other in paths:
            held = [key in book for key in keys(other)]
            assert held == sorted(held, reverse=True)
        assert [key in book for key in keys(path)][:capacity] == [True] * min(len(path), capacity)


@given(PATHS, st.integers(1, 12), st.data())
def test_whoever_follows_the_changes_knows_what_is_held(paths: list[list[int]], capacity: int, data: st.DataObject) -> None:
    book = PrefixBook(capacity)
    told: dict[str, set[int]] = {"early": set(), "seldom": set()}
    known: dict[str, set[int]] = {"early": set(), "seldom": set()}
    for path in paths:
        book.record(keys(path), 10)
        for follower in data.draw(st.sets(st.sampled_from(["early", "seldom"]))):
            changes = book.changes(told[follower])
            known[follower] = (known[follower] - set(changes.removed)) | set(changes.added)
            assert len(known[follower]) == len(book)
            assert all(key in book for key in known[follower])


def test_it_holds_as_many_keys_as_the_cache_has_tokens() -> None:
    book = PrefixBook()
    book.record(list(range(100)), 1600)  # four bytes a token
    assert len(book) == 100
    book.has_room_for(800)
    assert len(book) == 50
    assert 0 in book
    assert 99 not in book


def test_what_is_lost_is_told_as_removed() -> None:
    book = PrefixBook()
    book.record([1, 2, 3], 30)
    told: set[int] = set()
    assert set(book.changes(told).added) == {1, 2, 3}
    book.clear()
    assert set(book.changes(told).removed) == {1, 2, 3}
    assert book.changes(told).removed == ()
