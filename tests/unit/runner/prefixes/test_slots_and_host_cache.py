"""More conversations than sequences: what loses its place in the cache is put away, and comes back for its next turn."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from tests.unit.runner.scheduling import test_admission
from tests.unit.runner.scheduling.test_admission import N_PARALLEL, N_SEQUENCES, PROMPTS, OneByOne, asked, choose
from tests.unit.runner.token_cache import SavingTokenCache

from puna.runner.prefixes.host_cache import MIN_LOST, HostCache
from puna.runner.prefixes.slots import MAX_STORED_PER_LOST, MIN_RESTORE_GAIN, Slots

MEGABYTE = 1 << 20


def make(count: int = 2, max_bytes: int = MEGABYTE, **options: int) -> tuple[Slots, SavingTokenCache]:
    cache = SavingTokenCache(count, **options)
    return Slots(cache, count, count, HostCache(cache, max_bytes, lambda: MEGABYTE)), cache


def run(slots: Slots, cache: SavingTokenCache, tokens: list[int], *, ends: bool = True) -> tuple[int, int]:
    """The request computes its prompt; its sequence, and how much was there."""
    sequence, length = slots.acquire(tokens)
    assert cache.rows[sequence] == tokens[:length]
    cache.rows[sequence] = list(tokens)
    slots.record(sequence, tokens, len(tokens))
    if ends:
        slots.release(sequence)
    slots.check_integrity()
    return sequence, length


def talk(number: int, n_tokens: int) -> list[int]:
    return [1000 * number + i for i in range(n_tokens)]


def test_every_conversation_finds_all_it_computed_when_its_turn_comes() -> None:
    slots, cache = make()
    for n_tokens in (100, 180, 260):
        for number in range(6):
            _, length = run(slots, cache, talk(number, n_tokens))
            assert length == n_tokens - 80 if n_tokens > 100 else length == 0
    assert slots.host_cache is not None
    assert slots.host_cache.n_entries == 4, "the others are in their sequences"


def test_without_an_host_cache_they_find_nothing() -> None:
    cache: Any = SavingTokenCache(2)
    slots = Slots(cache, 2, 2)
    found = [run(slots, cache, talk(number, n))[1] for n in (100, 180) for number in range(6)]
    assert found == [0] * 12
    assert cache.n_saves == 0


def test_little_that_is_lost_is_not_worth_a_copy() -> None:
    slots, cache = make(1)
    run(slots, cache, talk(0, MIN_LOST - 1))
    run(slots, cache, talk(1, 10))
    assert cache.n_saves == 0
    run(slots, cache, talk(0, MIN_LOST))
    run(slots, cache, talk(1, 10))
    assert cache.n_saves == 1


def test_a_long_prefix_is_not_copied_for_a_small_part_of_it() -> None:
    slots, cache = make(1, max_bytes=16 * MEGABYTE)
    common = MAX_STORED_PER_LOST * MIN_LOST
    run(slots, cache, [*talk(0, common), *talk(1, MIN_LOST)])
    run(slots, cache, [*talk(0, common), *talk(2, MIN_LOST)])
    assert cache.n_saves == 0
    run(slots, cache, [*talk(0, common), *talk(3, 2 * MIN_LOST)])
    run(slots, cache, [*talk(0, common), *talk(4, 10)])
    assert cache.n_saves == 1


def test_what_another_sequence_or_the_host_cache_holds_is_not_put_away_again() -> None:
    slots, cache = make(3)
    run(slots, cache, talk(0, 300), ends=False)
    copied, length = run(slots, cache, [*talk(0, 200), 7])
    assert length == 200
    while slots.evict():
        pass
    assert (cache.n_saves, cache.rows[copied]) == (0, [])
    slots, cache = make(1)
    for _ in range(2):
        run(slots, cache, talk(0, 200))
        run(slots, cache, [*talk(0, 10), *talk(1, 20)])
        run(slots, cache, talk(2, 20))
    assert cache.n_saves == 2, "once for each time that it was taken out and came back"


def test_what_is_evicted_for_room_comes_back() -> None:
    slots, cache = make(2)
    run(slots, cache, talk(0, 200))
    assert slots.evict()
    assert cache.rows == [[], []]
    assert run(slots, cache, talk(0, 220))[1] == 200


@pytest.mark.parametrize(("n_held", "n_found"), [(200 - MIN_RESTORE_GAIN, 200), (201 - MIN_RESTORE_GAIN, 201 - MIN_RESTORE_GAIN)])
def test_a_slot_that_spares_nearly_as_much_is_taken_instead(n_held: int, n_found: int) -> None:
    slots, cache = make(2)
    holder, _ = run(slots, cache, talk(0, n_held))
    assert slots.host_cache is not None
    cache.rows[1 - holder] = talk(0, 200)
    slots.host_cache.store(1 - holder, talk(0, 200))
    cache.rows[1 - holder] = []
    sequence, length = run(slots, cache, talk(0, 300))
    assert (length, sequence == holder) == (n_found, n_found == n_held)


def test_the_slot_of_who_comes_back_is_the_one_unused_for_longest_and_not_the_one_that_holds_most_of_its_prompt() -> None:
    slots, cache = make(3)
    run(slots, cache, talk(0, 200))
    for _ in range(2):
        slots.evict()
    holder, _ = run(slots, cache, [*talk(0, 20), *talk(1, 100)])
    oldest, _ = run(slots, cache, talk(2, 100))
    run(slots, cache, talk(3, 100))
    run(slots, cache, [*talk(0, 20), *talk(1, 100)])
    sequence, length = run(slots, cache, talk(0, 220))
    assert (sequence, length) == (oldest, 200)
    assert sequence != holder


def test_in_a_short_pool_idle_prefixes_give_way_to_what_comes_back() -> None:
    slots, cache = make(3, n_pool=420)
    run(slots, cache, talk(0, 200))
    slots.evict()
    run(slots, cache, talk(1, 150))
    run(slots, cache, talk(2, 150))
    run(slots, cache, talk(3, 100))
    assert run(slots, cache, talk(0, 210))[1] == 200
    assert run(slots, cache, talk(1, 160))[1] == 150


def test_where_running_requests_hold_the_pool_the_prompt_is_computed_from_what_is_left() -> None:
    slots, cache = make(2, n_pool=300)
    run(slots, cache, talk(0, 200))
    slots.evict()
    run(slots, cache, talk(1, 150), ends=False)
    sequence, length = slots.acquire(talk(0, 210))
    assert (cache.rows[sequence], length) == ([], 0)
    slots.check_integrity()
    assert slots.cached(talk(0, 210)) == 200, "it is there for later"


def test_the_last_token_is_computed_also_of_what_comes_back() -> None:
    slots, cache = make()
    run(slots, cache, talk(0, 200))
    slots.evict()
    assert run(slots, cache, talk(0, 200))[1] == 199


def test_an_image_comes_back_as_a_whole_or_not() -> None:
    slots, cache = make()
    run(slots, cache, talk(0, 200))
    slots.evict()
    assert slots.acquire(talk(0, 200), groups=[(10, 30), (150, 200)])[1] == 150


def test_nobody_waits_for_a_beginning_that_the_host_cache_has() -> None:
    slots, cache = make(3)
    run(slots, cache, talk(0, 200))
    slots.evict()
    computing = asked([*talk(0, 100), *talk(1, 100)])
    computing.slot, _ = slots.acquire(computing.tokens)
    slots.replace(computing.slot, computing.tokens, 0)  # as if nothing of it had come back
    cache.rows[computing.slot] = []
    waiting = asked(talk(0, 220))
    assert choose([waiting], [computing], slots) is waiting
    assert slots.host_cache is not None
    slots.host_cache.clear()
    assert choose([waiting], [computing], slots) is None


def test_a_fault_in_the_books_empties_the_host_cache() -> None:
    slots, cache = make()
    run(slots, cache, talk(0, 200))
    slots.evict()
    slots.start_afresh()
    assert slots.cached(talk(0, 200)) == 0


POOLS = [600, 9999]


class AnyOrder(test_admission.AnyOrder):
    """As without a host cache, where nobody finds less, and what a sequence is said to hold it holds."""

    @initialize(
        n_bytes=st.sampled_from([80_000, MEGABYTE]), resumes_every=st.sampled_from([1, 10]), n_pool=st.sampled_from([600, 9999])
    )
    def start(self, n_bytes: int, resumes_every: int, n_pool: int) -> None:
        self.cache: Any = SavingTokenCache(N_SEQUENCES, n_pool, resumes_every)
        self.slots = Slots(self.cache, N_PARALLEL, N_SEQUENCES, HostCache(self.cache, n_bytes, lambda: MEGABYTE))
        self.running = []

    @rule(prompt=PROMPTS)
    def arrive(self, prompt: list[int]) -> None:
        if not self.slots.n_free:
            return
        _, least = OneByOne(self.slots, self.cache).acquire(prompt)
        request = asked(prompt)
        request.slot, request.n_computed = self.slots.acquire(request.tokens)
        assert self.cache.rows[request.slot] == prompt[: request.n_computed]
        assert request.n_computed >= least or self.cache.n_free < least + MIN_RESTORE_GAIN
        self.running.append(request)

    @rule(turns=st.lists(st.tuples(st.integers(1, 8), st.integers(70, 200), st.integers(0, 3)), min_size=1, max_size=10))
    def talk(self, turns: list[tuple[int, int, int]]) -> None:
        for turn in turns:
            self.say(*turn)

    def say(self, number: int, n_tokens: int, end: int) -> None:
        """A conversation comes back, perhaps from further back, computes all of its prompt and ends."""
        prompt = [*talk(number, n_tokens), *[end] * end]
        if not self.slots.n_free or sum(s.length for s in self.slots.slots if s.is_busy) + len(prompt) > self.cache.n_pool:
            return
        self.arrive(prompt)
        request = self.running[-1]
        while self.cache.n_free < len(prompt) - request.n_computed:
            assert self.slots.evict()
        self.cache.rows[request.slot] = list(prompt)
        request.n_computed = len(prompt)
        self.slots.record(request.slot, request.tokens, request.n_computed)
        self.end(len(self.running) - 1)

    @rule(prompts=st.lists(PROMPTS, max_size=4), which=test_admission.WHICH, begin=st.integers(0, 60))
    def ask(self, prompts: list[list[int]], which: int, begin: int) -> None:
        expected = OneByOne(self.slots, self.cache)
        for prompt in prompts:
            assert self.slots.cached(prompt) >= expected.cached(prompt)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=40)
