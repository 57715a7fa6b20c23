from __future__ import annotations

from typing import Any

import pytest

from puna.kvcache.cache import UNLIMITED
from puna.runner.prefixes.slots import Slots


class RecordingCache:
    """Lengths per sequence, as a cache would have them."""

    def __init__(self, count: int) -> None:
        self.lengths = [0] * count
        self.copies: list[tuple[int, int, int]] = []

    n_cells, n_free = 0, UNLIMITED

    def can_resume(self, sequence: int, position: int) -> bool:
        return position <= self.lengths[sequence]

    def remove(self, sequence: int, begin: int, end: int | None = None, *, n_positions: int = 0) -> None:
        assert end is None
        self.lengths[sequence] = min(self.lengths[sequence], begin)

    def copy_prefix(self, source: int, target: int, length: int, *, by_reference: bool = False) -> None:
        assert not by_reference
        assert self.lengths[source] >= length
        self.lengths[target] = length
        self.copies.append((source, target, length))


def make(count: int = 3) -> tuple[Slots, RecordingCache]:
    cache: Any = RecordingCache(count)
    return Slots(cache, count, count), cache


def run(slots: Slots, cache: RecordingCache, tokens: list[int], *, end: bool = True) -> tuple[int, int]:
    sequence, length = slots.acquire(tokens)
    cache.lengths[sequence] = len(tokens)
    slots.record(sequence, tokens, len(tokens))
    if end:
        slots.release(sequence)
    return sequence, length


def test_a_conversation_that_goes_on_finds_all_it_computed() -> None:
    slots, cache = make()
    first, _ = run(slots, cache, list(range(100)))
    assert run(slots, cache, list(range(150))) == (first, 100)


def test_the_last_token_is_always_computed_for_its_logits() -> None:
    slots, cache = make()
    run(slots, cache, list(range(100)))
    assert run(slots, cache, list(range(100)))[1] == 99


def test_unrelated_prompts_take_the_slot_unused_for_longest() -> None:
    slots, cache = make()
    used = [run(slots, cache, [k * 1000 + i for i in range(50)])[0] for k in range(4)]
    assert used[:3] == [0, 1, 2]
    assert used[3] == 0


def test_a_prefix_in_a_busy_slot_is_copied() -> None:
    slots, cache = make()
    busy, _ = run(slots, cache, list(range(100)), end=False)
    sequence, length = run(slots, cache, [*range(80), 7, 7, 7])
    assert (sequence != busy, length) == (True, 80)
    assert cache.copies == [(busy, sequence, 80)]


def test_a_short_common_prefix_is_not_worth_a_copy() -> None:
    slots, cache = make()
    run(slots, cache, list(range(100)), end=False)
    assert run(slots, cache, [*range(7), 70, 70])[1] == 0
    assert cache.copies == []


def test_a_fork_leaves_the_other_branch_in_place_when_there_is_room() -> None:
    slots, cache = make()
    run(slots, cache, list(range(200)))
    sequence, length = run(slots, cache, [*range(60), *range(900, 940)])
    assert length == 60
    again, kept = run(slots, cache, list(range(210)))
    assert kept == 200, "the long conversation was not given up for the short one"
    assert again != sequence


def test_conversations_that_share_only_what_all_begin_with_do_not_take_each_other_s_place() -> None:
    """All prompts begin with the same token or with a template's first words: a place nobody has used is better then."""
    slots, cache = make(4)
    talks = [[1, 2, 3, *range(1000 * k, 1000 * k + 100)] for k in range(1, 5)]
    assert sorted(run(slots, cache, talk)[0] for talk in talks) == [0, 1, 2, 3]
    assert [run(slots, cache, [*talk, 7, 7])[1] for talk in talks] == [103] * 4
    fifth, length = run(slots, cache, [1, 2, 3, *range(9000, 9100)])
    assert (fifth, length) == (0, 3), "the one unused for longest, with what it has of the prompt"


def test_a_short_conversation_that_goes_on_keeps_its_place() -> None:
    slots, cache = make(2)
    first, _ = run(slots, cache, list(range(10)))
    assert run(slots, cache, list(range(25))) == (first, 10)


def test_a_list_that_takes_another_s_place_is_the_one_that_grows() -> None:
    slots, cache = make()
    sequence, _ = run(slots, cache, list(range(50)), end=False)
    tokens = list(range(50))
    slots.record(sequence, tokens, 50)
    tokens.append(50)
    slots.record(sequence, tokens, 51)
    cache.lengths[sequence] = 51
    assert slots.cached(list(range(60))) == 51
    slots.check_integrity()


def test_a_list_that_lost_its_middle_must_be_put_in_its_place_again() -> None:
    slots, cache = make()
    tokens = list(range(100))
    sequence, _ = run(slots, cache, tokens, end=False)
    del tokens[10:50]
    with pytest.raises(AssertionError, match="shorter"):
        slots.check_integrity()
    slots.replace(sequence, tokens, 50)
    slots.check_integrity()
    assert slots.cached([*range(10), *range(50, 80)]) == 40


def test_what_a_sequence_will_hold_is_promised_as_far_as_its_tokens_go() -> None:
    slots, _ = make()
    short, _ = slots.acquire(list(range(50)))
    long, _ = slots.acquire(list(range(90)))
    slots.acquire([*range(10), 7])
    assert dict(slots.promised(list(range(100)), 11)) == {long: 90, short: 50}


def test_an_image_at_the_end_of_a_prompt_is_computed_again_as_a_whole() -> None:
    slots, cache = make()
    run(slots, cache, list(range(100)))
    assert slots.acquire(list(range(100)), groups=[(10, 30), (60, 100)])[1] == 60


def test_ended_prefixes_are_forgotten_oldest_first_and_running_ones_never() -> None:
    slots, cache = make()
    first, _ = run(slots, cache, list(range(50)))
    second, _ = run(slots, cache, list(range(100, 150)))
    busy, _ = run(slots, cache, list(range(200, 250)), end=False)
    assert slots.evict()
    assert (cache.lengths[first], cache.lengths[second]) == (0, 50)
    assert slots.evict()
    assert not slots.evict()
    assert cache.lengths[busy] == 50
