"""Cross attention on numpy arrays: rows see what their sequence's last image gave, and no other's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from puna.errors import BadRequest
from puna.kvcache.batch import Encoded, batch
from puna.kvcache.cache import Limits, resume_point
from puna.kvcache.encoder import EncoderCache
from tests.unit.kvcache.numpy_backend import ArrayBackend, ArrayContext, ArrayTensor

HEADS, DIM, ROOM = 2, 3, 300


def make(n_sequences: int = 3) -> EncoderCache:
    backend: Any = ArrayBackend(fill=0.0)
    return EncoderCache(backend, Limits(n_sequences, 1000, 1000), n_encoded=ROOM, n_kv_heads=[0, HEADS], head_dim=DIM)


def step(
    cache: EncoderCache, counts: list[tuple[int, int]], images: list[tuple[int, int, list[float]]] | None = None
) -> list[list[float]]:
    """Feed each (sequence, count) that many tokens, with images (sequence, position, values); what each row sees."""
    positions = [cache.length(s) + i for s, n in counts for i in range(n)]
    encoded = [Encoded(s, p, len(values)) for s, p, values in images or []]
    b = batch([0] * len(positions), positions, [s for s, n in counts for _ in range(n)], [], encoded=encoded)
    for s, _, values in images or []:
        store(cache, s, values)
    cache.start_forward(b)
    ctx: Any = ArrayContext()
    cache.make_inputs(ctx)
    cache.set_inputs(ctx)
    cache.layer(1)
    visible: Any = cache.visible()
    result: list[list[float]] = []
    parts: list[Any] = cache.get(ctx)
    if visible is None:
        assert not parts
        cache.check_integrity()
        return [[] for _ in positions]
    for part in parts:
        for s in range(part.n_sequences):
            for r in range(part.n_rows):
                cells = np.flatnonzero(part.mask.array[s, 0, r] == 0)
                assert len(cells), "a row without a cell would have no softmax"
                keys, negated = part.key.array[s][0, cells, 0], part.value.array[s][1, cells, 2]
                np.testing.assert_array_equal(keys, -negated)
                result.append(keys.tolist() if visible.array[len(result), 0] else [])
    cache.check_integrity()
    return result


def store(cache: EncoderCache, sequence: int, values: list[float], n: int = 2) -> None:
    """What is missing of an image that comes next, so many rows at once."""
    while (begin := cache.n_ahead(sequence)) < len(values):
        part = np.array(values[begin : begin + n])
        ctx: Any = ArrayContext()
        cache.make_rows(ctx, len(part))
        cache.layer(1)
        key = part[:, None, None] + np.zeros((HEADS, DIM))
        tensors: list[Any] = [ArrayTensor(key), ArrayTensor(-key)]
        cache.set_rows(ctx, sequence, begin, begin + len(part))
        cache.put(ctx, *tensors)
        cache.note_rows(sequence, begin + len(part))
        cache.check_integrity()


def test_rows_see_the_image_from_its_token_on() -> None:
    cache = make()
    assert step(cache, [(0, 4)], [(0, 2, [7.0, 8.0])]) == [[], [], [7.0, 8.0], [7.0, 8.0]]
    assert step(cache, [(0, 1)]) == [[7.0, 8.0]]


def test_each_sequence_sees_its_own_image_or_none() -> None:
    cache = make()
    seen = step(cache, [(0, 2), (1, 2), (2, 2)], [(0, 0, [1.0]), (2, 1, [2.0, 3.0])])
    assert seen == [[1.0], [1.0], [], [], [], [2.0, 3.0]]
    assert len(cache._views) == 1
    assert step(cache, [(0, 1), (1, 1), (2, 1)]) == [[1.0], [], [2.0, 3.0]]


def test_a_step_without_images_fits_the_graph_of_the_one_before() -> None:
    cache = make()
    step(cache, [(0, 3)], [(0, 0, [1.0])])
    first = cache.start_forward(batch([0], [3], [0], []))
    assert first == cache.start_forward(batch([0], [4], [0], []))


def test_a_later_image_takes_the_place_and_cannot_be_gone_back_behind() -> None:
    cache = make()
    step(cache, [(0, 10)], [(0, 2, [1.0, 2.0, 3.0])])
    step(cache, [(0, 5)])
    assert step(cache, [(0, 5)], [(0, 15, [9.0])]) == [[9.0]] * 5
    assert [resume_point(cache, 0, p) for p in (1, 2, 3, 12, 15, 16, 20)] == [1, 2, 2, 2, 2, 16, 20]
    cache.remove(0, 2)
    assert step(cache, [(0, 2)], [(0, 3, [4.0])]) == [[], [4.0]]


def test_where_no_row_sees_anything_nothing_is_asked() -> None:
    cache = make()
    step(cache, [(0, 5), (1, 3)])
    assert cache.visible() is None
    assert cache._views == ()
    step(cache, [(0, 1), (1, 1)], [(1, 3, [1.0])])
    assert cache.visible() is not None


def test_removing_its_token_forgets_the_image() -> None:
    cache = make()
    step(cache, [(0, 10)], [(0, 5, [1.0])])
    cache.remove(0, 6)
    assert step(cache, [(0, 1)]) == [[1.0]]
    cache.remove(0, 5)
    assert step(cache, [(0, 1)]) == [[]]


def test_a_removed_middle_moves_or_drops_the_image() -> None:
    cache = make()
    step(cache, [(0, 10), (1, 10)], [(0, 8, [1.0]), (1, 3, [2.0])])
    for s in (0, 1):
        cache.remove(s, 2, 6)
    assert cache.length(0) == 6
    assert step(cache, [(0, 1), (1, 1)]) == [[1.0], []]
    assert [resume_point(cache, 0, p) for p in (3, 5)] == [3, 5]


def test_a_copied_prefix_takes_the_image_along() -> None:
    cache = make()
    step(cache, [(0, 10)], [(0, 5, [1.0, 2.0])])
    cache.copy_prefix(0, 1, 8)
    cache.copy_prefix(0, 2, 4)
    cache.remove(0, 0)
    step(cache, [(0, 1)], [(0, 0, [5.0])])
    assert step(cache, [(1, 1), (2, 1)]) == [[1.0, 2.0], []]


def test_a_prefix_whose_image_was_replaced_is_not_copied() -> None:
    cache = make()
    step(cache, [(0, 15)], [(0, 2, [1.0])])
    step(cache, [(0, 5)], [(0, 15, [9.0])])
    cache.copy_prefix(0, 1, 12)
    assert cache.length(1) == 0


def test_an_image_that_is_too_large_is_refused_and_changes_nothing() -> None:
    cache = make()
    ctx: Any = ArrayContext()
    cache.make_rows(ctx, ROOM + 1)
    with pytest.raises(BadRequest, match="301 encoder rows"):
        cache.set_rows(ctx, 0, 0, ROOM + 1)
    assert cache.n_ahead(0) == 0
    cache.check_integrity()
    assert cache.length(0) == 0


def test_rows_before_an_image_that_takes_another_s_place_belong_to_the_step_before() -> None:
    cache = make()
    step(cache, [(0, 5)], [(0, 2, [1.0])])
    with pytest.raises(AssertionError, match="begins with the image"):
        step(cache, [(0, 3)], [(0, 6, [2.0])])


def test_reserving_takes_the_largest_and_changes_nothing() -> None:
    cache = make()
    cache.start_reserve(20)
    cache.check_integrity()
    assert step(cache, [(0, 1)]) == [[]]


def test_a_step_needs_all_rows_of_its_image() -> None:
    cache = make()
    store(cache, 0, [1.0, 2.0])
    assert cache.n_ahead(0) == 2
    with pytest.raises(AssertionError, match="before all of its rows are stored"):
        cache.start_forward(batch([0], [0], [0], [], encoded=[Encoded(0, 0, 3)]))
    store(cache, 0, [1.0, 2.0, 3.0])
    assert step(cache, [(0, 1)], [(0, 0, [1.0, 2.0, 3.0])]) == [[1.0, 2.0, 3.0]]
    assert cache.n_ahead(0) == 0


def test_others_see_theirs_while_an_image_is_stored() -> None:
    cache = make()
    step(cache, [(1, 2)], [(1, 0, [7.0])])
    store(cache, 0, [1.0, 2.0])
    assert step(cache, [(1, 1)]) == [[7.0]]
    assert step(cache, [(0, 2), (1, 1)], [(0, 0, [1.0, 2.0, 3.0])]) == [[1.0, 2.0, 3.0]] * 2 + [[7.0]]


@pytest.mark.parametrize("how", ["nothing is removed", "the tail goes", "all of it goes", "another's is copied"])
def test_what_was_stored_for_somebody_who_left_is_forgotten(how: str) -> None:
    cache = make()
    step(cache, [(0, 4), (1, 4)])
    store(cache, 0, [1.0, 2.0])
    if how == "another's is copied":
        cache.copy_prefix(1, 0, 4)
    else:
        cache.remove(0, {"nothing is removed": 4, "the tail goes": 2, "all of it goes": 0}[how])
    cache.check_integrity()
    assert cache.n_ahead(0) == 0
    at = cache.length(0)
    assert step(cache, [(0, 1)], [(0, at, [9.0])]) == [[9.0]]


def test_a_later_image_that_never_came_costs_what_follows_the_earlier_alone() -> None:
    cache = make()
    step(cache, [(0, 10)], [(0, 4, [1.0, 2.0])])
    store(cache, 0, [9.0])
    assert [resume_point(cache, 0, p) for p in (2, 4, 6, 10)] == [2, 4, 4, 4]
    cache.copy_prefix(0, 1, 10)
    assert cache.length(1) == 0
    cache.remove(0, resume_point(cache, 0, 10))
    cache.check_integrity()
    assert cache.length(0) == 4
    assert step(cache, [(0, 1)]) == [[]]
    assert step(cache, [(0, 1)], [(0, 5, [3.0])]) == [[3.0]]


class AnyOrder(RuleBasedStateMachine):
    """Any operations in any order, against a dictionary of images by position."""

    @initialize()
    def start(self) -> None:
        self.cache = make()
        self.lengths = [0, 0, 0]
        self.images: list[dict[int, list[float]]] = [{}, {}, {}]
        self.value = 0.0

    @rule(counts=st.lists(st.integers(0, 6), min_size=3, max_size=3), sizes=st.lists(st.integers(0, 5), min_size=3, max_size=3))
    def forward(self, counts: list[int], sizes: list[int]) -> None:
        rows = [(s, n) for s, n in enumerate(counts) if n]
        if not rows or any(length + n > 1000 for length, n in zip(self.lengths, counts, strict=True)):
            return
        images = []
        for s, n in rows:
            if sizes[s]:
                self.value += 10
                values = [self.value + i for i in range(sizes[s])]
                images.append((s, self.lengths[s] + (0 if self.images[s] else n // 2), values))
        seen = step(self.cache, rows, images)
        for s, p, values in images:
            self.images[s][p] = values
        wanted = [self._visible(s, self.lengths[s] + i) for s, n in rows for i in range(n)]
        for s, n in rows:
            self.lengths[s] += n
        assert seen == wanted

    @rule(s=st.integers(0, 2), n=st.integers(1, 5), finds=st.booleans())
    def give_up(self, s: int, n: int, finds: bool) -> None:
        """An image is stored, in part or whole, and never comes."""
        store(self.cache, s, [-1.0] * n)
        point = resume_point(self.cache, s, self.lengths[s])
        self.cache.remove(s, point if finds else self.lengths[s])
        self._cut(s, point if finds or point == self.lengths[s] else 0)

    def _visible(self, s: int, position: int) -> list[float]:
        return self.images[s][max(found)] if (found := [p for p in self.images[s] if p <= position]) else []

    def _cut(self, s: int, length: int) -> None:
        self.lengths[s] = length
        self.images[s] = {p: v for p, v in self.images[s].items() if p < length}

    @rule(s=st.integers(0, 2), share=st.floats(0, 1), asks=st.booleans())
    def remove_tail(self, s: int, share: float, asks: bool) -> None:
        begin = round(share * self.lengths[s])
        point = resume_point(self.cache, s, begin)
        assert self.cache.can_resume(s, begin) == (point == begin)
        self.cache.remove(s, point if asks else begin)
        self._cut(s, point if asks or point == begin else 0)

    @rule(source=st.integers(0, 2), to=st.integers(0, 2), share=st.floats(0, 1))
    def copy(self, source: int, to: int, share: float) -> None:
        length = round(share * self.lengths[source])
        can = self.cache.can_resume(source, length)
        self.cache.copy_prefix(source, to, length)
        if source != to:
            self.images[to] = dict(self.images[source])
            self._cut(to, length if can else 0)

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check_integrity()
            assert [self.cache.length(s) for s in range(3)] == self.lengths


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=20)
