"""The causal cache on numpy arrays: what is stored comes back, to the rows that may see it, and to no others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from puna.kvcache.batch import batch
from puna.kvcache.cache import Limits, Saved
from puna.kvcache.causal import CausalCache, NotSupported
from puna.kvcache.cells import END, CacheFull
from puna.kvcache.views import PADDING
from tests.unit.kvcache.numpy_backend import ArrayBackend
from tests.unit.kvcache.steps import DIM, HEADS, history, step


def make(n_ctx: int = 512, n_sequences: int = 4, n_batch: int = 64, shift: Any = None) -> CausalCache:
    backend: Any = ArrayBackend()
    limits = Limits(n_sequences, n_ctx, n_batch)
    return CausalCache(backend, limits, n_kv_heads=[HEADS], head_dim_k=DIM, head_dim_v=DIM, shift=shift)


def test_rows_see_themselves_and_what_came_before() -> None:
    cache = make()
    assert step(cache, [(0, 0), (0, 1), (0, 2)]) == [history(0, 0), history(0, 1), history(0, 2)]
    assert step(cache, [(0, 3)]) == [history(0, 3)]


def test_a_row_that_fills_a_gap_does_not_see_what_comes_after_it() -> None:
    cache = make()
    step(cache, [(0, 0), (0, 1), (0, 5)])
    assert step(cache, [(0, 3)]) == [{0: 0.0, 1: 1.0, 3: 3.0}]


def test_sequences_do_not_see_each_other() -> None:
    cache = make()
    step(cache, [(0, 0), (0, 1), (1, 0), (1, 1)])
    assert step(cache, [(0, 2), (1, 2)]) == [history(0, 2), history(1, 2)]


def test_equally_spaced_sequences_are_read_by_one_view() -> None:
    cache = make()
    for s in range(4):
        step(cache, [(s, p) for p in range(10 + s)])
    seen = step(cache, [(s, 10 + s) for s in range(4)])
    assert len(cache._views) == 1
    assert seen == [history(s, 10 + s) for s in range(4)]


def test_a_long_sequence_does_not_make_short_ones_read_as_much() -> None:
    cache = make(n_ctx=2048)
    for p in range(0, 1500, 60):
        step(cache, [(0, p + i) for i in range(60)])
    for s in (1, 2, 3):
        step(cache, [(s, 0)])
    seen = step(cache, [(0, 1500), (1, 1), (2, 1), (3, 1)])
    assert [v.n_cells for v in cache._views] == [1536, PADDING]
    assert seen == [history(0, 1500), history(1, 1), history(2, 1), history(3, 1)]


def test_removed_tail_is_overwritten() -> None:
    cache = make()
    step(cache, [(0, p) for p in range(8)])
    cache.remove(0, 5)
    assert cache.length(0) == 5
    assert step(cache, [(0, 5)], [99.0])[0] == {**history(0, 4), 5: 99.0}


def test_removing_the_middle_is_refused_when_the_model_cannot_turn_keys_and_changes_nothing() -> None:
    cache = make()
    step(cache, [(0, p) for p in range(8)])
    with pytest.raises(NotSupported):
        cache.remove(0, 2, 5)
    assert step(cache, [(0, 8)]) == [history(0, 8)]


def test_copied_prefix_is_the_source_s_and_grows_apart() -> None:
    cache = make()
    step(cache, [(0, p) for p in range(6)])
    cache.copy_prefix(0, 2, 4)
    seen = step(cache, [(0, 6), (2, 4)], [6.0, 77.0])
    assert seen == [history(0, 6), {**history(0, 3), 4: 77.0}]


def test_a_prefix_is_shared_where_it_lies_when_the_pool_has_no_room_for_a_copy() -> None:
    cache = make(n_ctx=256, n_sequences=2)
    for p in range(0, 384, 64):
        step(cache, [(0, p + i) for i in range(64)])
    cache.copy_prefix(0, 1, 200)
    assert cache.cells.n_free == 512 - 384
    assert step(cache, [(1, 200)], [5.0]) == [{**history(0, 199), 200: 5.0}]


def test_a_prefix_by_reference_takes_no_room_and_outlives_its_source() -> None:
    cache = make(n_ctx=256, n_sequences=2)
    step(cache, [(0, p) for p in range(60)])
    n_free = cache.n_free
    cache.copy_prefix(0, 1, 50, by_reference=True)
    assert cache.n_free == n_free
    assert (cache.n_freed([0]), cache.n_freed([1]), cache.n_freed([0, 1]), cache.n_freed([0, 1], 1, 50)) == (10, 0, 60, 10)
    cache.remove(0, 0)
    assert cache.n_free == n_free + 10
    assert step(cache, [(1, 50)], [5.0]) == [{**history(0, 49), 50: 5.0}]


def test_copies_become_one() -> None:
    cache = make(n_ctx=256, n_sequences=2)
    step(cache, [(0, p) for p in range(60)])
    cache.copy_prefix(0, 1, 50)
    step(cache, [(1, 50)], [5.0])
    n_free = cache.n_free
    cache.share_prefix(0, 1, 50)
    cache.share_prefix(0, 1, 50)
    assert cache.n_free == n_free + 50
    cache.check_integrity()
    assert step(cache, [(1, 51)], [6.0]) == [{**history(0, 49), 50: 5.0, 51: 6.0}]


def test_decoding_sees_what_changed_between_its_steps() -> None:
    """Step after step in the same view, so whatever is kept from one to the next would show."""
    cache = make(n_ctx=128, n_sequences=2, shift=lambda _layer, keys, _changes: keys)
    step(cache, [(s, p) for s in (0, 1) for p in range(6)])
    assert step(cache, [(0, 6), (1, 6)]) == [history(0, 6), history(1, 6)]
    cache.remove(1, 3)
    assert step(cache, [(0, 7), (1, 3)], [7.0, 55.0]) == [history(0, 7), {**history(1, 2), 3: 55.0}]
    cache.remove(0, 1, 3)
    moved = {0: 0.0, 1: 3.0, 2: 4.0, 3: 5.0, 4: 6.0, 5: 7.0}
    assert step(cache, [(0, 6), (1, 4)], [66.0, 56.0]) == [{**moved, 6: 66.0}, {**history(1, 2), 3: 55.0, 4: 56.0}]
    cache.copy_prefix(0, 1, 5)
    assert step(cache, [(0, 7), (1, 5)], [67.0, 57.0])[1] == {**{p: moved[p] for p in range(5)}, 5: 57.0}
    cache.cells.remove(1, 0, END)
    cache.cells.share(1, cache.cells.cells_of(0, 0, 4))
    assert step(cache, [(0, 8), (1, 4)], [68.0, 58.0])[1] == {**{p: moved[p] for p in range(4)}, 4: 58.0}
    cache.start_reserve(64)
    assert cache.look_ahead(batch([0], [300], [0], [])) is not None
    assert step(cache, [(0, 9), (1, 5)], [69.0, 59.0])[1] == {**{p: moved[p] for p in range(4)}, 4: 58.0, 5: 59.0}
    cache.check_integrity()


def test_a_full_pool_refuses_a_batch_and_keeps_what_it_has() -> None:
    cache = make(n_ctx=256, n_sequences=1, n_batch=256)
    step(cache, [(0, p) for p in range(250)])
    with pytest.raises(CacheFull, match="7 more tokens"):
        cache.start_forward(batch([0] * 7, range(250, 257), [0] * 7, []))
    cache.check_integrity()
    assert step(cache, [(0, 250)]) == [history(0, 250)]


# The scenarios of an older engine's tests; positions moved by a removal keep their values here, parity tests turn them.


def test_scenario_store() -> None:
    cache = make(n_ctx=16, n_sequences=1, n_batch=16)
    seen = step(cache, [(0, p) for p in range(4)], [1.0, 2.0, 3.0, 4.0])
    assert [list(s.values()) for s in seen] == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
    assert step(cache, [(0, 4)], [5.0]) == [{0: 1, 1: 2, 2: 3, 3: 4, 4: 5}]


def test_scenario_sequences_then_remove() -> None:
    cache = make(shift=lambda _layer, keys, _changes: keys)
    seen = step(cache, [(0, 0), (0, 1), (1, 0), (1, 1)], [1.0, 2.0, 3.0, 4.0])
    assert seen == [{0: 1}, {0: 1, 1: 2}, {0: 3}, {0: 3, 1: 4}]
    cache.remove(0, 1)
    assert step(cache, [(0, 1), (1, 2)], [5.0, 6.0]) == [{0: 1, 1: 5}, {0: 3, 1: 4, 2: 6}]
    cache.remove(0, 0, 1)
    assert cache.length(0) == 1
    assert step(cache, [(0, 1), (0, 2)], [7.0, 8.0]) == [{0: 5, 1: 7}, {0: 5, 1: 7, 2: 8}]
    cache.check_integrity()


def test_scenario_copy_with_a_gap() -> None:
    cache = make()
    step(cache, [(0, p) for p in range(4)], [1.0, 2.0, 3.0, 4.0])
    cache.copy_prefix(0, 1, 2)
    assert step(cache, [(1, 3), (1, 4)], [5.0, 6.0]) == [{0: 1, 1: 2, 3: 5}, {0: 1, 1: 2, 3: 5, 4: 6}]


def test_shared_cells_are_not_moved_and_nothing_changes() -> None:
    cache = make(n_ctx=256, n_sequences=2, shift=lambda _layer, keys, _changes: keys)
    for p in range(0, 384, 64):
        step(cache, [(0, p + i) for i in range(64)])
    cache.copy_prefix(0, 1, 200)
    with pytest.raises(NotSupported):
        cache.remove(0, 5, 100)
    cache.remove(0, 250, 300)  # what follows belongs to it alone
    assert cache.length(0) == 334
    cache.check_integrity()


def test_what_is_saved_comes_back_into_another_sequence_in_order() -> None:
    """Its own rows lay apart: the home was full, so that the last ones went to another sequence's."""
    cache = make(n_ctx=256, n_sequences=3)
    step(cache, [(0, p) for p in range(200)])
    step(cache, [(1, p) for p in range(300)])
    step(cache, [(0, p) for p in range(200, 268)])
    saved = cache.save(0)
    cache.remove(0, 0)
    cache.remove(1, 0)
    step(cache, [(0, p) for p in range(20)], [7.0] * 20)
    cache.restore(2, saved, 250)
    assert step(cache, [(2, 250)], [250.0]) == [history(0, 250)]
    cache.check_integrity()


def test_without_room_nothing_comes_back_and_nothing_changes() -> None:
    cache = make(n_ctx=256, n_sequences=2)
    step(cache, [(0, p) for p in range(100)])
    saved = cache.save(0)
    cache.remove(0, 0)
    step(cache, [(1, p) for p in range(420)])
    with pytest.raises(CacheFull, match="100 more tokens"):
        cache.restore(0, saved, 100)
    assert (cache.length(0), cache.n_free) == (0, 92)
    cache.restore(0, saved, 92)
    assert step_of(cache, 0, 91) == history(0, 91)


def step_of(cache: CausalCache, sequence: int, position: int) -> dict[int, float]:
    """What the row at a position sees when it is computed again."""
    cache.remove(sequence, position)
    return step(cache, [(sequence, position)])[0]


class AnyOrder(RuleBasedStateMachine):
    """Any operations in any order: the cache agrees with a dictionary per sequence."""

    @initialize()
    def start(self) -> None:
        self.cache = make(n_ctx=64, n_sequences=3, n_batch=40)
        self.held: list[dict[int, float]] = [{} for _ in range(3)]
        self.next_value = 0.0
        self.saved: tuple[Saved, dict[int, float]] | None = None

    def _free(self) -> int:
        return self.cache.cells.n_free

    @rule(counts=st.lists(st.integers(0, 40), min_size=3, max_size=3))
    def forward(self, counts: list[int]) -> None:
        rows = [(s, len(self.held[s]) + i) for s, n in enumerate(counts) for i in range(n)]
        if not rows or len(rows) > self._free():
            return
        values = [self.next_value + i for i in range(len(rows))]
        self.next_value += len(rows)
        seen = step(self.cache, rows, values)
        for (s, p), value, found in zip(rows, values, seen, strict=True):
            self.held[s][p] = value
            assert {k: round(v) for k, v in found.items()} == {k: v for k, v in self.held[s].items() if k <= p}

    @rule(s=st.integers(0, 2), begin=st.integers(0, 60))
    def remove_tail(self, s: int, begin: int) -> None:
        self.cache.remove(s, begin)
        self.held[s] = {p: v for p, v in self.held[s].items() if p < begin}

    @rule(source=st.integers(0, 2), to=st.integers(0, 2), length=st.integers(0, 100), by_reference=st.booleans())
    def copy(self, source: int, to: int, length: int, by_reference: bool) -> None:
        n_free = self._free() + (self.cache.n_freed([to]) if source != to else 0)
        self.cache.copy_prefix(source, to, length, by_reference=by_reference)
        if source != to:
            self.held[to] = {p: v for p, v in self.held[source].items() if p < length}
            assert not by_reference or self._free() == n_free

    @rule(source=st.integers(0, 2), to=st.integers(0, 2))
    def share(self, source: int, to: int) -> None:
        """As far as the two hold the same."""
        pairs = zip(self.held[source].items(), self.held[to].items(), strict=False)
        length = next((p for p, (a, b) in enumerate(pairs) if a != b), min(len(self.held[source]), len(self.held[to])))
        self.cache.share_prefix(source, to, length)
        assert (self.cache.cells.cells_of(source, 0, length) == self.cache.cells.cells_of(to, 0, length)).all()

    @rule(who=st.sets(st.integers(0, 2)), s=st.integers(0, 2), n_kept=st.integers(0, 60))
    def ask_what_would_be_free(self, who: set[int], s: int, n_kept: int) -> None:
        others = {c for t in {0, 1, 2} - who for c in self._cells_of(t)}
        kept = {c for p, c in enumerate(self._cells_of(s)) if p < n_kept} if s in who else set()
        own = {c for t in who for c in self._cells_of(t)}
        assert self.cache.n_freed(who, s, n_kept if s in who else 0) == len(own - others - kept)

    def _cells_of(self, sequence: int) -> list[int]:
        found: list[int] = self.cache.cells.cells_of(sequence, 0, 1 << 20).tolist()
        return found

    @precondition(lambda self: any(self.held))
    @rule(s=st.integers(0, 2))
    def save(self, s: int) -> None:
        if self.held[s]:
            self.saved = self.cache.save(s), dict(self.held[s])
            assert self.saved[0].n_bytes == self.cache.saved_bytes(s)

    @precondition(lambda self: self.saved is not None)
    @rule(s=st.integers(0, 2), share=st.floats(0, 1))
    def restore(self, s: int, share: float) -> None:
        assert self.saved is not None
        saved, held = self.saved
        self.cache.remove(s, 0)
        self.held[s] = {}
        length = round(share * len(held))
        assert saved.resume_point(length) == length
        if length > self._free():
            with pytest.raises(CacheFull):
                self.cache.restore(s, saved, length)
        else:
            self.cache.restore(s, saved, length)
            self.held[s] = {p: v for p, v in held.items() if p < length}

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check_integrity()
            assert [self.cache.length(s) for s in range(3)] == [len(h) for h in self.held]


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=25)
