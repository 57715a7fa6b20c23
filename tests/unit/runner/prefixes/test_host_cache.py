"""What is kept of prefixes that lost their place: the longest is found, the bound holds, those unused for longest go."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.kvcache.numpy_backend import ArrayBackend
from tests.unit.kvcache.steps import DIM, HEADS, step
from tests.unit.runner.token_cache import ROW_BYTES, SavingTokenCache

from puna.kvcache.cache import Limits
from puna.kvcache.causal import CausalCache
from puna.kvcache.cells import CacheFull
from puna.kvcache.span import Span
from puna.runner.prefixes.host_cache import MAX_ENTRIES, MAX_SHARE, MIN_LOST, TOKEN_BYTES, HostCache

BYTES = ROW_BYTES + TOKEN_BYTES  # of a token


def make(n_tokens: int, **options: int) -> tuple[HostCache, SavingTokenCache]:
    """Room for so many tokens."""
    cache = SavingTokenCache(2, **options)
    return HostCache(cache, n_tokens * BYTES, lambda: 1 << 40), cache


def put(host_cache: HostCache, cache: SavingTokenCache, tokens: list[int]) -> bool:
    cache.rows[0] = list(tokens)
    is_kept = host_cache.store(0, tokens)
    cache.rows[0] = []
    host_cache.check_integrity()
    return is_kept


def numbers(begin: int, count: int) -> list[int]:
    return list(range(begin, begin + count))


def spared(host_cache: HostCache, tokens: list[int]) -> int:
    return host_cache.find(tokens)[1]


def test_a_prefix_is_found_as_far_as_it_goes_and_brought_back() -> None:
    host_cache, cache = make(1000)
    put(host_cache, cache, numbers(0, 200))
    assert spared(host_cache, [*numbers(0, 150), 7]) == 150
    entry, n_found = host_cache.find(numbers(0, 300))
    assert entry is not None
    assert n_found == 200
    host_cache.restore(entry, 1, 200)
    assert cache.rows[1] == numbers(0, 200)
    assert (host_cache.n_entries, host_cache.n_bytes) == (0, 0)


def test_a_prefix_of_which_only_a_part_came_back_stays() -> None:
    host_cache, cache = make(1000)
    put(host_cache, cache, numbers(0, 200))
    entry, _ = host_cache.find(numbers(0, 300))
    assert entry is not None
    host_cache.restore(entry, 1, 200 - MIN_LOST)
    assert spared(host_cache, numbers(0, 300)) == 200


def test_where_only_some_points_can_be_resumed_the_furthest_of_them_counts() -> None:
    host_cache, cache = make(2000, resumes_every=64)
    put(host_cache, cache, numbers(0, 100))
    put(host_cache, cache, [*numbers(0, 90), *numbers(500, 60)])
    assert spared(host_cache, numbers(0, 95)) == 64
    assert spared(host_cache, [*numbers(0, 90), *numbers(500, 60)]) == 128


def test_one_prompt_does_not_throw_all_others_away() -> None:
    host_cache, cache = make(1000)
    assert not put(host_cache, cache, numbers(0, 1000 // MAX_SHARE + 1))
    assert put(host_cache, cache, numbers(0, 1000 // MAX_SHARE))


def test_those_unused_for_longest_make_room() -> None:
    host_cache, cache = make(1000)
    for k in range(4):
        put(host_cache, cache, numbers(1000 * k, 250))
    entry, _ = host_cache.find(numbers(0, 250))
    assert entry is not None
    host_cache.use(entry)
    put(host_cache, cache, numbers(9000, 250))
    assert [spared(host_cache, numbers(1000 * k, 250)) for k in (0, 1, 2, 9)] == [250, 0, 250, 250]


def test_a_conversation_that_went_on_takes_the_place_of_its_beginning() -> None:
    host_cache, cache = make(1000)
    put(host_cache, cache, numbers(0, 100))
    put(host_cache, cache, numbers(0, 160))
    assert (host_cache.n_entries, spared(host_cache, numbers(0, 100))) == (1, 100)


def test_a_beginning_stays_where_what_goes_on_could_not_be_resumed_there() -> None:
    host_cache, cache = make(1000)
    put(host_cache, cache, numbers(0, 100))
    cache.resumes_every = 64
    put(host_cache, cache, numbers(0, 160))
    assert (host_cache.n_entries, spared(host_cache, numbers(0, 100))) == (2, 100)


def test_there_is_a_bound_on_how_many() -> None:
    host_cache, cache = make(1_000_000)
    for k in range(MAX_ENTRIES + 1):
        cache.rows[0] = numbers(100 * k, 2)
        host_cache.store(0, list(cache.rows[0]))
    host_cache.check_integrity()
    assert (host_cache.n_entries, spared(host_cache, numbers(0, 2)), spared(host_cache, numbers(100, 2))) == (MAX_ENTRIES, 0, 2)


def test_without_memory_nothing_is_kept_and_nothing_breaks(caplog: pytest.LogCaptureFixture) -> None:
    host_cache, cache = make(1000)
    put(host_cache, cache, numbers(0, 200))
    cache.is_short_of_memory = True
    with caplog.at_level(logging.WARNING):
        assert not put(host_cache, cache, numbers(1000, 200))
    assert "no memory to keep 200 computed tokens" in caplog.text
    assert (host_cache.n_entries, spared(host_cache, numbers(0, 200))) == (1, 200)


def test_on_a_machine_that_is_short_of_memory_it_gives_back_what_others_need() -> None:
    cache = SavingTokenCache(2)
    spare = [300 * BYTES]
    host_cache = HostCache(cache, 10_000 * BYTES, lambda: spare[0])
    for k in range(3):
        assert put(host_cache, cache, numbers(1000 * k, 100))
        spare[0] -= 100 * BYTES
    assert put(host_cache, cache, numbers(3000, 100))
    assert [spared(host_cache, numbers(1000 * k, 100)) for k in range(4)] == [0, 100, 100, 100]
    spare[0] = -100 * BYTES
    assert put(host_cache, cache, numbers(4000, 100))
    assert [spared(host_cache, numbers(1000 * k, 100)) for k in range(5)] == [0, 0, 0, 100, 100]
    spare[0] = -900 * BYTES
    assert not put(host_cache, cache, numbers(5000, 100))
    assert host_cache.n_entries == 0


def test_where_the_cache_has_no_room_the_entry_stays() -> None:
    host_cache, cache = make(1000, n_pool=150)
    put(host_cache, cache, numbers(0, 120))
    cache.rows[0] = numbers(500, 60)
    entry, _ = host_cache.find(numbers(0, 120))
    assert entry is not None
    with pytest.raises(CacheFull):
        host_cache.restore(entry, 1, 120)
    assert (cache.rows[1], spared(host_cache, numbers(0, 120))) == ([], 120)


PARTS = [[1] * 9, [1] * 5 + [2] * 6, [2] * 30, [1, 2] * 8, [1]]
PROMPTS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=8).map(lambda parts: [t for part in parts for t in part])


class AnyOrder(RuleBasedStateMachine):
    """Against a list of prefixes, those used last at its end, each compared with each."""

    @initialize(n_tokens=st.sampled_from([100, 400, 1500]), resumes_every=st.sampled_from([1, 10]))
    def start(self, n_tokens: int, resumes_every: int) -> None:
        self.host_cache, self.cache = make(n_tokens, resumes_every=resumes_every)
        self.kept: list[list[int]] = []
        self.n_tokens = n_tokens

    @rule(prompt=PROMPTS)
    def keep(self, prompt: list[int]) -> None:
        is_kept = put(self.host_cache, self.cache, prompt)
        assert is_kept == (len(prompt) * BYTES <= self.n_tokens * BYTES // MAX_SHARE)
        if is_kept:
            self.kept = [k for k in self.kept if not (self.alike(k, prompt) == len(k) == self.point(len(k)))]
            while len(prompt) + sum(len(k) for k in self.kept) > self.n_tokens:
                del self.kept[0]
            self.kept.append(prompt)

    def alike(self, a: list[int], b: list[int]) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    def point(self, n: int) -> int:
        return n // self.cache.resumes_every * self.cache.resumes_every

    @rule(prompt=PROMPTS)
    def find(self, prompt: list[int]) -> None:
        entry, n_found = self.host_cache.find(prompt)
        assert n_found == max((self.point(self.alike(k, prompt)) for k in self.kept), default=0)
        assert (entry is None) == (n_found == 0)
        if entry is not None:
            assert entry.tokens in self.kept
            assert entry.tokens[:n_found] == prompt[:n_found]

    @precondition(lambda self: self.kept)
    @rule(which=st.integers(0, 100), share=st.floats(0, 1), extra=PROMPTS)
    def restore(self, which: int, share: float, extra: list[int]) -> None:
        tokens = self.kept[which % len(self.kept)]
        prompt = tokens[: round(share * len(tokens))] + extra
        entry, n_found = self.host_cache.find(prompt)
        if entry is None:
            return
        self.host_cache.use(entry)
        self.cache.rows[1] = []
        self.host_cache.restore(entry, 1, n_found)
        assert self.cache.rows[1] == prompt[:n_found]
        at = next(i for i, k in enumerate(self.kept) if k is entry.tokens)
        used = self.kept.pop(at)
        if len(used) - n_found >= MIN_LOST:
            self.kept.append(used)

    @rule()
    def clear(self) -> None:
        self.host_cache.clear()
        self.kept.clear()

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "host_cache"):
            self.host_cache.check_integrity()
            assert [entry.tokens for entry in self.host_cache._entries.values()] == self.kept
            assert self.host_cache.n_bytes == BYTES * sum(len(k) for k in self.kept)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30)


def test_of_what_is_too_large_with_all_that_its_windows_forgot_the_end_is_kept() -> None:
    backend: Any = ArrayBackend()
    cache = CausalCache(
        backend,
        Limits(2, 10_000, 16),
        n_kv_heads=[HEADS],
        head_dim_k=DIM,
        head_dim_v=DIM,
        span=Span(window=20),
    )
    cache.remember(1 << 30, lambda: 1 << 30)
    for begin in range(0, 4000, 16):
        step(cache, [(0, p) for p in range(begin, begin + 16)])
    whole, lean = cache.saved_bytes(0), cache.saved_bytes(0, lean=True)
    assert lean < whole // 8
    tokens = numbers(0, 4000)
    for max_bytes, is_lean in ((whole + 4000 * TOKEN_BYTES, False), (lean + 4000 * TOKEN_BYTES, True)):
        host_cache = HostCache(cache, MAX_SHARE * max_bytes, lambda: 1 << 40)
        assert host_cache.store(0, tokens)
        host_cache.check_integrity()
        assert host_cache.find([*tokens, 7])[1] == 4000
        assert host_cache.find([*tokens[:1000], 7])[1] == (0 if is_lean else 1000)
        cache.remove(1, 0)
        (entry,) = host_cache._entries.values()
        host_cache.restore(entry, 1, 4000)
        assert step(cache, [(1, 4000)], [-1.0]) == [{**{p: float(p) for p in range(3981, 4000)}, 4000: -1.0}]
        cache.check_integrity()
