"""Recurrent states on numpy arrays: a state is the sum and the count of the values it has seen.

Follows the scenarios of an older engine's checkpoint tests, with what differs here: a state after token p is one of length
p + 1; restoring is part of remove and needs no pending mark; a checkpoint is complete by construction, since it is the slot
that a step wrote for all layers; and a range in the middle is refused, where that engine moved positions under a state
that still contained the removed tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from puna.kvcache.batch import batch
from puna.kvcache.cache import Limits, resume_point
from puna.kvcache.causal import CausalCache, NotSupported
from puna.kvcache.checkpoints import Checkpoints
from puna.kvcache.layered import LayeredCache
from puna.kvcache.recurrent import RecurrentCache
from puna.kvcache.span import Span
from tests.unit.kvcache.numpy_backend import ArrayBackend, ArrayContext, ArrayTensor
from tests.unit.kvcache.steps import DIM, HEADS

WIDTHS = [{"conv": 3, "sum": 2}, {}, {"sum": 2}]
STATE_BYTES = 4 * (3 + 2 + 2)


def make(n_sequences: int = 3, n_checkpoints: int = 2, interval: int = 50, n_shared: int = 1000) -> RecurrentCache:
    """Room for n_shared checkpoints of all sequences together."""
    backend: Any = ArrayBackend(fill=0.0)
    limits = Limits(n_sequences, 10_000, 10_000)
    n_bytes = n_shared * STATE_BYTES
    return RecurrentCache(
        backend, limits, widths=WIDTHS, n_checkpoints=n_checkpoints, interval=interval, checkpoint_bytes=n_bytes
    )


def step(cache: Any, counts: list[tuple[int, int]], value: float = 1.0, *, aborts: bool = False) -> list[tuple[float, float]]:
    """Feed each (sequence, count) that many tokens of the value; (sum, count) of each sequence's state before it."""
    positions = [cache.length(s) + i for s, n in counts for i in range(n)]
    b = batch([0] * len(positions), positions, [s for s, n in counts for _ in range(n)], [])
    cache.start_forward(b)
    ctx: Any = ArrayContext()
    cache.make_inputs(ctx)
    cache.set_inputs(ctx)
    before: list[tuple[float, float]] = []
    for layer in (0, 2):
        cache.layer(layer)
        before = []
        rows = 0
        for group in cache.states(ctx):
            assert group.begin == rows
            rows += group.n_rows * group.n_sequences
            old = group.load("sum").array
            before += [(float(total), float(n)) for total, n in old]
            new = old + np.array([value * group.n_rows, group.n_rows])
            group.store("sum", ArrayTensor(np.full_like(old, np.nan) if aborts else new))
            if layer == 0:
                conv = group.load("conv").array
                np.testing.assert_array_equal(conv[:, 0], old[:, 0])
                group.store("conv", ArrayTensor(np.repeat(new[:, :1], 3, axis=1)))
        assert rows == len(positions)
    cache.check_integrity()
    return before


def peek(cache: Any, sequence: int) -> tuple[float, float]:
    """The state that the sequence's next token will find."""
    return step(cache, [(sequence, 1)])[0]


def test_a_state_goes_from_step_to_step() -> None:
    cache = make()
    assert step(cache, [(0, 5)], 2.0) == [(0, 0)]
    assert step(cache, [(0, 1)], 3.0) == [(10, 5)]
    assert peek(cache, 0) == (13, 6)


def test_sequences_with_different_numbers_of_tokens_share_a_step() -> None:
    cache = make()
    assert step(cache, [(0, 4), (1, 4), (2, 1)]) == [(0, 0)] * 3
    assert [g[1:] for g in cache._groups] == [(4, 2), (1, 1)]
    assert step(cache, [(0, 1), (1, 7), (2, 1)], 10.0) == [(4, 4), (4, 4), (1, 1)]
    assert step(cache, [(1, 1), (2, 1)]) == [(74, 11), (11, 2)]


def test_a_copy_grows_apart_from_its_source() -> None:
    cache = make()
    step(cache, [(0, 5)])
    cache.copy_prefix(0, 1, 5)
    assert step(cache, [(0, 1), (1, 1)], 10.0) == [(5, 5)] * 2
    assert step(cache, [(0, 1)], 100.0) == [(15, 6)]
    assert peek(cache, 1) == (15, 6)
    assert peek(cache, 0) == (115, 7)


def test_the_last_step_can_be_undone_also_when_it_was_aborted() -> None:
    cache = make()
    step(cache, [(0, 5)])
    step(cache, [(0, 3)], aborts=True)
    assert resume_point(cache, 0, 5) == 5
    cache.remove(0, 5)
    assert peek(cache, 0) == (5, 5)


def test_an_aborted_first_step_leaves_the_state_before_any_token() -> None:
    cache = make()
    step(cache, [(0, 3)], aborts=True)
    cache.remove(0, 0)
    assert peek(cache, 0) == (0, 0)


def test_a_new_owner_of_a_slot_finds_nothing_of_the_old_one() -> None:
    cache = make(n_sequences=1, n_checkpoints=0)
    for _ in range(5):
        step(cache, [(0, 9)], 7.0)
    cache.remove(0, 0)
    assert peek(cache, 0) == (0, 0)


def grown(cache: RecurrentCache, lengths: list[int]) -> None:
    for length in lengths:
        step(cache, [(0, length - cache.length(0))])


def test_checkpoints_are_kept_at_intervals_the_oldest_go_first() -> None:
    cache = make(interval=50)
    grown(cache, [50, 60, 100, 110, 120, 150, 160, 170])
    assert [resume_point(cache, 0, n) for n in (49, 99, 100, 149, 150, 165, 170, 999)] == [0, 0, 100, 100, 150, 160, 170, 170]


def test_the_end_of_a_prompt_is_kept() -> None:
    cache = make(interval=1000)
    grown(cache, [40, 70, *range(71, 80)])
    assert resume_point(cache, 0, 75) == 70
    cache.remove(0, 70)
    assert peek(cache, 0) == (70, 70)


def test_shortly_before_the_end_of_a_prompt_is_kept_instead_of_the_end() -> None:
    cache = make(interval=1000)
    grown(cache, [40, 62, 70, 71, 72, 73])
    assert [resume_point(cache, 0, n) for n in (61, 62, 69, 71, 72)] == [0, 62, 62, 62, 72]
    cache.remove(0, 62)
    assert peek(cache, 0) == (62, 62)


def test_what_another_sequence_took_is_kept_for_the_next() -> None:
    cache = make(interval=1000)
    grown(cache, [40])
    cache.copy_prefix(0, 1, 40)
    for _ in range(3):
        step(cache, [(0, 30), (1, 30)])
    assert [resume_point(cache, s, 50) for s in (0, 1)] == [40, 40]
    cache.copy_prefix(1, 2, 50)
    assert peek(cache, 2) == (40, 40)


def test_short_beginnings_are_not_kept() -> None:
    cache = make(interval=1)
    grown(cache, [10, 12, 14, 15])
    assert resume_point(cache, 0, 13) == 0


@pytest.mark.parametrize(("target", "kept"), [(120, 110), (105, 100), (55, 50), (49, 0), (150, 150), (1000, 150)])
def test_restoring_finds_the_furthest_state_up_to_the_target(target: int, kept: int) -> None:
    cache = make(n_checkpoints=3, interval=40)
    grown(cache, [50, 100, 110, 150])
    assert resume_point(cache, 0, target) == kept
    cache.remove(0, kept)
    assert cache.length(0) == kept
    assert peek(cache, 0) == (kept, kept)


def test_restoring_forgets_what_came_later() -> None:
    cache = make(n_checkpoints=5, interval=20)
    grown(cache, [20, 40, 60, 80, 100])
    cache.remove(0, 40)
    assert [resume_point(cache, 0, n) for n in (25, 35, 100)] == [20, 20, 40]
    cache.remove(0, 0)
    assert resume_point(cache, 0, 100) == 0


def test_removing_to_where_no_state_is_held_leaves_nothing() -> None:
    cache = make()
    grown(cache, [30, 31, 32])
    cache.remove(0, 10)
    assert cache.length(0) == 0
    assert peek(cache, 0) == (0, 0)


def test_the_middle_cannot_be_removed_and_nothing_changes() -> None:
    cache = make()
    grown(cache, [30, 31])
    with pytest.raises(NotSupported, match="in the middle"):
        cache.remove(0, 5, 20)
    assert peek(cache, 0) == (31, 31)


def test_a_prefix_is_copied_as_far_as_a_state_is_held() -> None:
    cache = make(interval=50)
    grown(cache, [60, 90, 100, 101])
    cache.copy_prefix(0, 1, 95)
    assert cache.length(1) == 60
    assert peek(cache, 1) == (60, 60)


def test_a_copied_checkpoint_outlives_its_source_and_a_target_s_own_are_gone() -> None:
    cache = make(interval=50)
    grown(cache, [60, 90, 100])
    step(cache, [(1, 70)], 9.0)
    step(cache, [(1, 5)], 9.0)
    cache.copy_prefix(0, 1, 100)
    cache.remove(0, 0)
    step(cache, [(0, 500)], 3.0)
    assert [resume_point(cache, 1, n) for n in (60, 75, 95)] == [60, 60, 90]
    cache.remove(1, 60)
    assert peek(cache, 1) == (60, 60)


def test_no_checkpoints_at_all() -> None:
    books = Checkpoints(max_sequences=1, n_kept=0, interval=1)
    assert books.n_slots == 3
    for _ in range(5):
        books.advance(0, 100)
        books.check_integrity()
    assert [books.restore_point(0, n) for n in (399, 400, 450, 500)] == [0, 400, 400, 500]


@pytest.mark.parametrize("n_shared", [0, 1, 5, 100])
def test_slots_never_run_out(n_shared: int) -> None:
    cache = make(n_sequences=4, n_checkpoints=3, interval=16, n_shared=n_shared)
    for n in (20, 40, 17, 33, 18):
        step(cache, [(s, n) for s in range(4)])
    for s in (1, 2, 3):
        cache.copy_prefix(0, s, 110)
        for n in (16, 30, 40, 50, 60):
            step(cache, [(t, n) for t in range(s + 1)])


def test_large_states_have_fewer_checkpoints() -> None:
    backend: Any = ArrayBackend(fill=0.0)
    n_values = 1 << 20

    def n_slots(n_bytes: int) -> int:
        widths = [{"s": n_values // 2}, {"s": n_values // 2}]
        cache = RecurrentCache(backend, Limits(2, 100, 100), widths=widths, n_checkpoints=3, checkpoint_bytes=n_bytes)
        return cache.checkpoints.n_slots

    assert [n_slots(n * 4 * n_values) for n in (0, 1, 5, 100)] == [5, 6, 10, 11]


def test_who_holds_most_gives_up_its_oldest() -> None:
    cache = make(n_sequences=2, n_checkpoints=4, interval=20, n_shared=2)
    grown(cache, [20, 40, 60, 80, 100])  # four slots of its own and the room that is shared
    for count in (30, 30, 30):
        step(cache, [(1, count)])
    assert [resume_point(cache, 1, n) for n in (30, 60, 90)] == [30, 60, 90]
    assert [resume_point(cache, 0, n) for n in (20, 40, 60, 100)] == [0, 0, 60, 100]


def test_a_step_of_all_sequences_can_be_undone_in_the_smallest_room() -> None:
    cache = make(n_shared=0)
    for _ in range(3):
        step(cache, [(0, 20), (1, 20), (2, 20)])
    step(cache, [(0, 5), (1, 5), (2, 5)], aborts=True)
    for s in range(3):
        cache.remove(s, 60)
    assert step(cache, [(0, 1), (1, 1), (2, 1)]) == [(60, 60)] * 3


def test_saved_states_come_back_and_those_before_the_newest_where_there_is_room() -> None:
    cache = make(n_sequences=3, n_checkpoints=2, interval=20, n_shared=2)
    grown(cache, [20, 40, 60])
    saved = cache.save(0)
    assert [saved.resume_point(n) for n in (19, 39, 59, 60)] == [0, 20, 40, 60]
    cache.remove(0, 0)
    for _ in range(3):
        step(cache, [(0, 30), (2, 25)], 9.0)  # all slots but two are used
    cache.restore(1, saved, 60)
    assert [resume_point(cache, 1, n) for n in (20, 40, 60)] == [0, 40, 60]
    assert peek(cache, 1) == (60, 60)
    cache.remove(1, 40)
    assert peek(cache, 1) == (40, 40)


def test_the_state_to_go_on_from_takes_the_room_of_another_s_checkpoint() -> None:
    cache = make(n_sequences=2, n_checkpoints=4, interval=20, n_shared=0)
    step(cache, [(1, 20)], 3.0)
    saved = cache.save(1)
    cache.remove(1, 0)
    grown(cache, [20, 40, 60, 80])  # all four slots
    cache.restore(1, saved, 20)
    assert peek(cache, 1) == (60, 20)
    assert [resume_point(cache, 0, n) for n in (20, 80)] == [0, 80]


def test_a_state_that_no_checkpoint_would_be_made_of_is_not_saved() -> None:
    cache = make(interval=1000)
    grown(cache, [40, 70, 71, 72])
    assert cache.saved_bytes(0) == 2 * STATE_BYTES
    assert [cache.save(0).resume_point(n) for n in (69, 70, 71, 72)] == [0, 70, 70, 72]


def test_reserving_takes_nothing() -> None:
    cache = make(n_sequences=3)
    assert cache.start_reserve(10) == ((0, 3, 2), (6, 4, 1))
    assert [cache.length(s) for s in range(3)] == [0, 0, 0]
    cache.check_integrity()


class AnyOrder(RuleBasedStateMachine):
    """Any operations in any order: the state is that of the values that a list per sequence holds."""

    @initialize(n_checkpoints=st.integers(0, 3), interval=st.sampled_from([1, 30, 1000]), n_shared=st.sampled_from([0, 2, 99]))
    def start(self, n_checkpoints: int, interval: int, n_shared: int) -> None:
        self.cache = self.build(n_checkpoints, interval, n_shared)
        self.held: list[list[float]] = [[], [], []]
        self.value = 0.0
        self.saved: Any = None

    def build(self, n_checkpoints: int, interval: int, n_shared: int) -> Any:
        return make(3, n_checkpoints, interval, n_shared)

    @rule(counts=st.lists(st.integers(0, 40), min_size=3, max_size=3), aborts=st.booleans())
    def forward(self, counts: list[int], aborts: bool) -> None:
        rows = [(s, n) for s, n in enumerate(counts) if n]
        if not rows:
            return
        self.value += 1
        lengths = [len(h) for h in self.held]
        before = step(self.cache, rows, self.value, aborts=aborts)
        assert before == [(sum(self.held[s]), len(self.held[s])) for s, _ in rows]
        for s, n in rows:
            if aborts:
                self.cache.remove(s, lengths[s])
            else:
                self.held[s] += [self.value] * n

    @rule(s=st.integers(0, 2), share=st.floats(0, 1), asks=st.booleans())
    def remove_tail(self, s: int, share: float, asks: bool) -> None:
        begin = round(share * len(self.held[s]))
        point = resume_point(self.cache, s, begin)
        assert self.cache.can_resume(s, begin) == (point == begin)
        self.cache.remove(s, point if asks else begin)
        del self.held[s][point if asks or point == begin else 0 :]

    @rule(source=st.integers(0, 2), to=st.integers(0, 2), share=st.floats(0, 1))
    def copy(self, source: int, to: int, share: float) -> None:
        length = round(share * len(self.held[source]))
        point = resume_point(self.cache, source, length)
        self.cache.copy_prefix(source, to, length)
        if source != to:
            self.held[to] = self.held[source][:point]

    @rule(s=st.integers(0, 2))
    def save(self, s: int) -> None:
        """What can be resumed at stays so, but for the state before the newest if the next step would drop it."""
        held = self.held[s]
        if not held:
            return
        self.saved = self.cache.save(s), list(held)
        assert self.saved[0].n_bytes == self.cache.saved_bytes(s)
        for position in range(len(held) + 1):
            now, then = resume_point(self.cache, s, position), self.saved[0].resume_point(position)
            assert then == now or (then < now and now == resume_point(self.cache, s, len(held) - 1))

    @precondition(lambda self: self.saved is not None)
    @rule(s=st.integers(0, 2), share=st.floats(0, 1))
    def restore(self, s: int, share: float) -> None:
        saved, held = self.saved
        self.cache.remove(s, 0)
        length = saved.resume_point(round(share * len(held)))
        self.cache.restore(s, saved, length)
        self.held[s] = held[:length]

    @rule(s=st.integers(0, 2), a=st.floats(0, 1), b=st.floats(0, 1))
    def remove_middle(self, s: int, a: float, b: float) -> None:
        begin, end = sorted((round(a * len(self.held[s])), round(b * len(self.held[s]))))
        if begin < end < len(self.held[s]):
            with pytest.raises(NotSupported):
                self.cache.remove(s, begin, end)

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check_integrity()
            assert [self.cache.length(s) for s in range(3)] == [len(h) for h in self.held]


class Hybrid(AnyOrder):
    """The same, with full attention and a window beside the recurrent layers: all parts stay of one length."""

    def build(self, n_checkpoints: int, interval: int, n_shared: int) -> Any:
        backend: Any = ArrayBackend(fill=0.0)
        limits = Limits(3, 4000, 120)

        def attention(span: Span) -> CausalCache:
            return CausalCache(backend, limits, n_kv_heads=[HEADS], head_dim_k=DIM, head_dim_v=DIM, span=span)

        parts: list[Any] = [
            make(3, n_checkpoints, interval, n_shared),
            attention(Span()),
            attention(Span(window=40)),
        ]
        return LayeredCache(parts, [0, 1, 0, 2], 3)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=25)
TestHybrid = Hybrid.TestCase
TestHybrid.settings = settings(max_examples=40, stateful_step_count=25)
