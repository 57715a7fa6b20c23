"""Caches that forget: sliding windows and chunks.

Where a test follows a scenario of an older engine whose window W showed a row W + 1 keys, its window is one larger here.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from puna.kvcache.batch import batch
from puna.kvcache.cache import Limits, Saved, resume_point
from puna.kvcache.causal import CausalCache, NotSupported
from puna.kvcache.span import Span
from puna.kvcache.views import PADDING
from tests.unit.kvcache.numpy_backend import ArrayBackend
from tests.unit.kvcache.steps import DIM, HEADS, step

LONG = 100_000  # a context that no home could hold
ROW_BYTES = 2 * 2 * HEADS * DIM  # of keys and values, as a cache of F16 counts


def make(span: Span, n_ctx: int = LONG, n_sequences: int = 2, n_batch: int = 16, shift: Any = None) -> CausalCache:
    backend: Any = ArrayBackend()
    limits = Limits(n_sequences, n_ctx, n_batch)
    return CausalCache(
        backend,
        limits,
        n_kv_heads=[HEADS],
        head_dim_k=DIM,
        head_dim_v=DIM,
        span=span,
        shift=shift or (lambda _, keys, __: keys),
    )


def rows(sequence: int, begin: int, end: int) -> list[tuple[int, int]]:
    return [(sequence, p) for p in range(begin, end)]


def positions(seen: list[dict[int, float]]) -> list[list[int]]:
    return [sorted(s) for s in seen]


def fill(cache: CausalCache, sequence: int, begin: int, end: int) -> None:
    for start in range(begin, end, cache.limits.n_batch):
        step(cache, rows(sequence, start, min(start + cache.limits.n_batch, end)))


def test_a_window_of_two_shows_the_row_and_the_one_before() -> None:
    cache = make(Span(window=2))
    assert positions(step(cache, rows(0, 0, 4))) == [[0], [0, 1], [1, 2], [2, 3]]
    assert positions(step(cache, rows(0, 4, 6))) == [[3, 4], [4, 5]]


def test_a_window_of_one_shows_the_row_alone() -> None:
    cache = make(Span(window=1))
    assert positions(step(cache, rows(0, 0, 3))) == [[0], [1], [2]]
    assert positions(step(cache, rows(0, 3, 4))) == [[3]]


def test_windows_of_sequences_in_separate_batches() -> None:
    cache = make(Span(window=2), n_batch=2)
    assert step(cache, rows(0, 0, 2)) == [{0: 0}, {0: 0, 1: 1}]
    assert step(cache, rows(0, 2, 4)) == [{1: 1, 2: 2}, {2: 2, 3: 3}]
    assert step(cache, rows(1, 0, 2)) == [{0: 1000}, {0: 1000, 1: 1001}]
    assert step(cache, rows(1, 2, 4)) == [{1: 1001, 2: 1002}, {2: 1002, 3: 1003}]
    assert step(cache, rows(0, 4, 6)) == [{3: 3, 4: 4}, {4: 4, 5: 5}]


def test_chunks_show_what_is_not_before_their_begin() -> None:
    cache = make(Span(chunk=2))
    assert positions(step(cache, rows(0, 0, 4))) == [[0], [0, 1], [2], [2, 3]]
    assert positions(step(cache, rows(0, 4, 7))) == [[4], [4, 5], [6]]
    assert positions(step(cache, rows(0, 7, 9))) == [[6, 7], [8]]


def test_resuming_needs_the_window_at_that_point() -> None:
    cache = make(Span(window=5))
    fill(cache, 0, 0, PADDING)
    assert all(cache.can_resume(0, p) for p in range(PADDING + 1))
    assert not cache.can_resume(0, PADDING + 1)
    step(cache, rows(0, PADDING, PADDING + 3))
    # 32 positions made room: the window of a row at 36 begins at 32. Position 0 can always be computed again.
    assert [cache.can_resume(0, p) for p in range(38)] == [True, *[False] * 35, True, True]
    assert [resume_point(cache, 0, p) for p in (3, 35, 36, 1000)] == [0, 0, 36, PADDING + 3]


def test_resuming_a_chunk() -> None:
    cache = make(Span(chunk=4))
    fill(cache, 0, 0, PADDING)
    step(cache, rows(0, PADDING, PADDING + 6))
    assert cache.cells.firsts[0] == 32
    assert [cache.can_resume(0, p) for p in (0, 31, 32, 33, 35, 36)] == [True, False, False, True, True, True]
    cache.cells.remove(0, 0, 34)
    assert [cache.can_resume(0, p) for p in (34, 35, 36, 37)] == [False, False, True, True]


def test_going_on_after_a_resume_sees_the_same_window() -> None:
    cache = make(Span(window=8), n_batch=16)
    fill(cache, 0, 0, 1000)
    point = int(cache.cells.firsts[0]) + 7
    assert resume_point(cache, 0, point - 1) == 0
    assert resume_point(cache, 0, point) == point
    cache.remove(0, point)
    assert step(cache, rows(0, point, point + 2), [1.0, 2.0]) == [
        {**{p: float(p) for p in range(point - 7, point)}, point: 1.0},
        {**{p: float(p) for p in range(point - 6, point)}, point: 1.0, point + 1: 2.0},
    ]


def test_one_token_back_is_always_possible() -> None:
    cache = make(Span(window=PADDING - 16), n_batch=16)
    for p in range(0, 2000, 16):
        step(cache, rows(0, p, p + 16))
        assert cache.can_resume(0, p)
        assert cache.can_resume(0, p + 15)
        assert cache.cells.lengths[0] == min(p + 16, PADDING)


def test_a_point_whose_window_is_gone_leaves_nothing() -> None:
    cache = make(Span(window=8))
    fill(cache, 0, 0, 400)
    cache.remove(0, 50)
    assert cache.length(0) == 0
    assert cache.cells.n_free == cache.cells.n_cells
    assert step(cache, rows(0, 0, 1)) == [{0: 0.0}]


def test_only_window_and_batch_are_stored() -> None:
    cache = make(Span(window=100), n_sequences=3, n_batch=16)
    assert cache.cells.n_cells == 3 * PADDING
    for s in range(3):
        fill(cache, s, 0, 1000)
        assert PADDING - 32 <= cache.cells.lengths[s] <= PADDING
    cache.check_integrity()


def test_a_context_that_fits_is_kept_whole() -> None:
    cache = make(Span(window=100), n_ctx=110, n_batch=16)
    fill(cache, 0, 0, 110)
    assert cache.cells.lengths[0] == 110
    assert cache.can_resume(0, 3)


def test_idle_sequences_that_hold_a_whole_batch_leave_room_for_all_others() -> None:
    """An older engine ran out of cells here: idle sequences kept the overhang of their last batch in a common pool."""
    cache = make(Span(window=200), n_sequences=6, n_batch=56)
    assert cache.cells.n_cells == 6 * PADDING
    for _ in range(3):
        for s in range(6):
            begin = cache.length(s)
            for start in range(begin, begin + 560, 56):
                seen = step(cache, rows(s, start, start + 56))
                assert len(seen[-1]) == min(start + 56, 200)
        cache.check_integrity()
    step(cache, [(s, cache.length(s)) for s in range(6)])
    assert len(cache._views) == 1


def test_decoding_reads_about_the_window_and_not_the_home() -> None:
    cache = make(Span(window=64), n_batch=1024)
    step(cache, rows(0, 0, 1024))
    assert cache.cells.home_cells == 1280
    read = []
    for p in range(1024, 1024 + 1280):
        step(cache, rows(0, p, p + 1))
        read.append(cache._views[0].n_cells)
    # Around a boundary of views it reads two steps of cells, and all of them where the window wraps around the home.
    assert set(read) == {PADDING, 2 * PADDING, 1280}
    assert sum(read) / len(read) < 1.6 * PADDING


def test_rows_of_a_span_see_each_other() -> None:
    cache = make(Span())
    step(cache, [*rows(0, 0, 2), *rows(1, 0, 3)])
    seen = step(cache, [*rows(0, 2, 7), *rows(1, 3, 8)], bidirectional=[(1, 4), (5, 7)])
    assert positions(seen[:5]) == [[0, 1, 2], *[[0, 1, 2, 3, 4, 5]] * 3, list(range(7))]
    assert positions(seen[5:]) == [*[[0, 1, 2, 3, 4]] * 2, *[list(range(n)) for n in (6, 7, 8)]]
    assert len(cache._views) == 1


def test_a_span_is_whole_even_where_it_is_wider_than_the_window() -> None:
    cache = make(Span(window=2))
    step(cache, rows(0, 0, 3))
    assert positions(step(cache, rows(0, 3, 8), bidirectional=[(1, 4)])) == [[2, 3], [3, 4, 5, 6], [4, 5, 6], [4, 5, 6], [6, 7]]


def test_spans_last_one_step() -> None:
    cache = make(Span())
    step(cache, rows(0, 0, 4), bidirectional=[(0, 4)])
    assert positions(step(cache, rows(0, 4, 6))) == [list(range(5)), list(range(6))]


def test_a_copied_prefix_holds_the_window() -> None:
    cache = make(Span(window=20))
    fill(cache, 0, 0, 100)
    cache.copy_prefix(0, 1, 95)
    assert cache.length(1) == 95
    assert cache.can_resume(1, 95)
    seen = step(cache, [(0, 100), (1, 95)], [1.0, 2.0])
    assert seen == [{**{p: float(p) for p in range(81, 100)}, 100: 1.0}, {**{p: float(p) for p in range(76, 95)}, 95: 2.0}]
    cache.check_integrity()


def test_a_prefix_whose_window_is_gone_is_not_copied_and_the_target_is_empty() -> None:
    cache = make(Span(window=20))
    fill(cache, 0, 0, 400)
    fill(cache, 1, 0, 30)
    cache.copy_prefix(0, 1, 50)
    assert cache.length(1) == 0
    assert resume_point(cache, 1, 50) == 0


def remembering(window: int, n_rows: int = 10_000, **limits: Any) -> CausalCache:
    cache = make(Span(window=window), **limits)
    cache.remember(n_rows * ROW_BYTES, lambda: 1 << 40)
    return cache


def test_a_sequence_goes_back_to_any_point_of_its_prompt() -> None:
    cache = remembering(20)
    fill(cache, 0, 0, 1000)
    for point in (997, 700, 650, 333, 20, 1):
        assert resume_point(cache, 0, point) == point
        cache.remove(0, point)
        assert cache.length(0) == point
        first = max(point - 19, 0)
        assert step(cache, rows(0, point, point + 1), [-1.0]) == [{**{p: float(p) for p in range(first, point)}, point: -1.0}]
        cache.check_integrity()


def test_rows_go_back_to_the_places_they_had() -> None:
    """So attention adds them up in the same order, and rounds as it did."""
    cache = remembering(100)
    places = {}
    for begin in range(0, 1001, 7):
        step(cache, rows(0, begin, begin + 7))
        places[begin + 7] = dict(zip(*_placed(cache, 0), strict=True))
    for point in (959, 644, 322):  # in the middle of what was forgotten at once
        cache.copy_prefix(0, 1, point)
        for sequence in (0, 1):
            cache.remove(sequence, point)
            home = sequence * cache.cells.home_cells
            held, cells = _placed(cache, sequence)
            assert held[0] <= point - 99
            assert held[-1] == point - 1
            assert all(places[point][p] == cell - home for p, cell in zip(held, cells, strict=True) if p in places[point])
    before = _placed(cache, 1)
    fill(cache, 1, 322, 700)
    cache.remove(1, 322)
    assert _placed(cache, 1) == before, "nor does what was cut there forget them"


def _placed(cache: CausalCache, sequence: int) -> tuple[list[int], list[int]]:
    cells = cache.cells.cells_of(sequence, 0, LONG)
    return cache.cells.positions[cells].tolist(), cells.tolist()


def test_what_others_departed_from_is_shared_and_counted_once() -> None:
    cache = remembering(20, n_sequences=3)
    fill(cache, 0, 0, 600)
    n_bytes = cache.remembered_bytes
    assert n_bytes == cache.forgotten.of(0)[-1].end * ROW_BYTES > 300 * ROW_BYTES
    cache.copy_prefix(0, 1, 600)
    cache.copy_prefix(1, 2, 600)
    assert cache.remembered_bytes == n_bytes
    cache.remove(0, 0)
    assert cache.remembered_bytes == n_bytes
    assert resume_point(cache, 2, 300) == 300
    for sequence in (1, 2):
        cache.remove(sequence, 0)
    assert cache.remembered_bytes == 0


def test_answers_are_not_kept_but_what_they_push_out_of_the_window_is() -> None:
    cache = remembering(20)
    fill(cache, 0, 0, 300)
    for p in range(300, 900):
        step(cache, rows(0, p, p + 1))
    assert resume_point(cache, 0, 300) == 300
    assert resume_point(cache, 0, 500) == 300
    assert cache.forgotten.of(0)[-1].end == 300


def test_the_bound_holds_and_what_was_not_used_for_longest_goes_first() -> None:
    cache = remembering(20, 700, n_sequences=3)
    for sequence in (0, 1, 2):
        fill(cache, sequence, 0, 600)
        assert cache.remembered_bytes <= 700 * ROW_BYTES
        cache.check_integrity()
    assert resume_point(cache, 0, 200) == 0
    assert resume_point(cache, 2, 200) == 200
    cache.remove(2, 200)
    fill(cache, 0, 600, 1000)
    assert resume_point(cache, 0, 900) == 900
    assert resume_point(cache, 1, 300) < 300


def test_nothing_is_kept_that_the_machine_has_no_memory_for() -> None:
    cache = make(Span(window=20))
    spare = 100 * ROW_BYTES
    cache.remember(1 << 30, lambda: spare - cache.remembered_bytes)
    fill(cache, 0, 0, 1000)
    assert 0 < cache.remembered_bytes <= spare


def test_the_machine_is_not_asked_for_every_row() -> None:
    cache = make(Span(window=20))
    asked = []
    cache.remember(1 << 30, lambda: asked.append(1) or 1 << 30)  # type: ignore[func-returns-value]
    fill(cache, 0, 0, 4000)
    assert len(asked) == 1
    assert cache.remembered_bytes > 3000 * ROW_BYTES


def test_a_saved_sequence_brings_back_what_it_had_forgotten() -> None:
    cache = remembering(20)
    fill(cache, 0, 0, 600)
    saved = cache.save(0)
    assert saved.n_bytes == cache.saved_bytes(0) >= 600 * ROW_BYTES
    cache.remove(0, 0)
    fill(cache, 0, 0, 300)
    assert saved.resume_point(317) == 317
    cache.restore(1, saved, 317)
    assert resume_point(cache, 1, 100) == 100
    assert step(cache, rows(1, 317, 318), [7.0]) == [{**{p: float(p) for p in range(298, 317)}, 317: 7.0}]
    cache.check_integrity()


def test_after_a_shift_nothing_forgotten_comes_back() -> None:
    cache = remembering(20)
    fill(cache, 0, 0, 400)
    cache.remove(0, 4, 44)
    assert cache.remembered_bytes == 0
    assert resume_point(cache, 0, 100) == 0


def test_a_middle_long_forgotten_is_removed_by_moving_what_is_left() -> None:
    cache = make(Span(window=20))
    fill(cache, 0, 0, 400)
    cache.remove(0, 4, 44)
    assert cache.length(0) == 360
    seen = step(cache, rows(0, 360, 361), [7.0])
    assert seen == [{**{p: p + 40.0 for p in range(341, 360)}, 360: 7.0}]
    cache.check_integrity()


def test_a_middle_within_the_window_is_removed_when_what_moves_into_it_is_stored() -> None:
    cache = make(Span(window=20), n_batch=40)
    fill(cache, 0, 0, 40)
    cache.remove(0, 30, 35)
    assert step(cache, rows(0, 35, 36), [7.0]) == [{**{p: float(p + (5 if p >= 30 else 0)) for p in range(16, 35)}, 35: 7.0}]


def test_a_removal_that_pulls_forgotten_tokens_into_the_window_is_refused_and_changes_nothing() -> None:
    cache = make(Span(window=20))
    fill(cache, 0, 0, 400)
    first = int(cache.cells.firsts[0])
    with pytest.raises(NotSupported, match="no longer cached"):
        cache.remove(0, first - 5, 395)
    assert cache.length(0) == 400
    assert cache.cells.firsts[0] == first
    assert step(cache, rows(0, 400, 401)) == [{p: float(p) for p in range(381, 401)}]


def test_a_sequence_never_goes_on_where_its_window_ends() -> None:
    cache = make(Span(window=20))
    fill(cache, 0, 0, 100)
    with pytest.raises(AssertionError, match="goes on at 100"):
        cache.start_forward(batch([0], [101], [0], []))


@pytest.mark.parametrize("bad", [{"window": -1}, {"window": 4, "chunk": 4}, {"chunk": -2}])
def test_impossible_reaches(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="no way to look back"):
        Span(**bad)


class Forgetful(RuleBasedStateMachine):
    """Any operations in any order, against a dictionary that forgets nothing.

    What a row sees is never less than its window of the dictionary, and what the cache promises to resume, it can.
    """

    @initialize(
        span=st.sampled_from(
            [
                Span(window=1),
                Span(window=30),
                Span(window=97),
                Span(chunk=50),
                Span(),
            ]
        ),
        rows_kept=st.sampled_from([0, 0, 100, 400, 100_000]),
    )
    def start(self, span: Span, rows_kept: int) -> None:
        self.span = span
        self.cache = make(span, n_ctx=2000, n_sequences=3, n_batch=220)
        self.cache.remember(rows_kept * ROW_BYTES, lambda: 1 << 40)
        self.held: list[dict[int, float]] = [{} for _ in range(3)]
        self.next_value = 0.0
        self.saved: tuple[Saved, dict[int, float]] | None = None

    @rule(counts=st.lists(st.integers(0, 70), min_size=3, max_size=3), span=st.booleans())
    def forward(self, counts: list[int], span: bool) -> None:
        wanted = [(s, len(self.held[s]) + i) for s, n in enumerate(counts) for i in range(n)]
        if not wanted or any(len(h) + n > 2000 for h, n in zip(self.held, counts, strict=True)):
            return
        values = [self.next_value + i for i in range(len(wanted))]
        self.next_value += len(wanted)
        bidirectional = [(0, counts[0] // 2)] if span and counts[0] > 1 else []
        seen = step(self.cache, wanted, values, bidirectional)
        for (s, p), value in zip(wanted, values, strict=True):
            self.held[s][p] = value
        for row, ((s, p), found) in enumerate(zip(wanted, seen, strict=True)):
            first = max(int(self.span.first(p)), 0)
            visible = {k: self.held[s][k] for k in range(first, p + 1)}
            if bidirectional and row < bidirectional[0][1]:
                visible |= {k: self.held[s][k] for _, k in wanted[: bidirectional[0][1]]}
            assert {k: round(v) for k, v in found.items()} == visible

    @rule(s=st.integers(0, 2), share=st.floats(0, 1), asks=st.booleans())
    def remove_tail(self, s: int, share: float, asks: bool) -> None:
        begin = round(share * len(self.held[s]))
        point = resume_point(self.cache, s, begin)
        assert 0 <= point <= begin
        assert self.cache.can_resume(s, begin) == (point == begin)
        self.cache.remove(s, point if asks else begin)
        self.held[s] = {p: v for p, v in self.held[s].items() if p < (point if asks or point == begin else 0)}

    @rule(source=st.integers(0, 2), to=st.integers(0, 2), share=st.floats(0, 1))
    def copy(self, source: int, to: int, share: float) -> None:
        length = round(share * len(self.held[source]))
        point = resume_point(self.cache, source, length)
        self.cache.copy_prefix(source, to, point)
        if source != to:
            self.held[to] = {p: v for p, v in self.held[source].items() if p < point}

    @rule(s=st.integers(0, 2))
    def save(self, s: int) -> None:
        if self.held[s]:
            self.saved = self.cache.save(s), dict(self.held[s])
            for position in range(len(self.held[s]) + 1):
                assert self.saved[0].resume_point(position) == resume_point(self.cache, s, position)

    @precondition(lambda self: self.saved is not None)
    @rule(s=st.integers(0, 2), share=st.floats(0, 1))
    def restore(self, s: int, share: float) -> None:
        assert self.saved is not None
        saved, held = self.saved
        self.cache.remove(s, 0)
        length = saved.resume_point(round(share * len(held)))
        if length > self.cache.n_free:
            length = 0
        self.cache.restore(s, saved, length)
        self.held[s] = {p: v for p, v in held.items() if p < length}

    @precondition(lambda self: not self.span.chunk)
    @rule(s=st.integers(0, 2), a=st.floats(0, 1), b=st.floats(0, 1))
    def remove_middle(self, s: int, a: float, b: float) -> None:
        length = len(self.held[s])
        begin, end = sorted((round(a * length), round(b * length)))
        if not begin < end < length:
            return
        try:
            self.cache.remove(s, begin, end)
        except NotSupported:
            return
        kept = [v for p, v in sorted(self.held[s].items()) if not begin <= p < end]
        self.held[s] = dict(enumerate(kept))

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check_integrity()
            assert [self.cache.length(s) for s in range(3)] == [len(h) for h in self.held]
            assert all(self.cache.can_resume(s, len(h)) for s, h in enumerate(self.held))


TestForgetful = Forgetful.TestCase
TestForgetful.settings = settings(max_examples=50, stateful_step_count=20)
