"""Several caches as one: an operation that one part refuses changes none of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from puna.kvcache.batch import batch
from puna.kvcache.cache import UNLIMITED, Limits, resume_point
from puna.kvcache.causal import CausalCache, NotSupported
from puna.kvcache.cells import CacheFull
from puna.kvcache.encoder import EncoderCache
from puna.kvcache.layered import LayeredCache
from puna.kvcache.recurrent import RecurrentCache
from puna.kvcache.span import Span
from tests.unit.kvcache.numpy_backend import ArrayBackend, ArrayContext, ArrayTensor
from tests.unit.kvcache.steps import DIM, HEADS

FULL, WINDOW, RECURRENT = 0, 1, 2
KINDS = [WINDOW, WINDOW, FULL, WINDOW]


def make(n_pool: int = 0, kinds: list[int] = KINDS, n_ctx: int = 2000) -> LayeredCache:
    backend: Any = ArrayBackend(fill=0.0)
    limits = Limits(2, n_ctx, 64, n_pool)

    def attention(kind: int, span: Span) -> CausalCache:
        heads = [HEADS if k == kind else 0 for k in kinds]
        shift: Any = lambda _layer, keys, _changes: keys  # noqa: E731
        return CausalCache(backend, limits, n_kv_heads=heads, head_dim_k=DIM, head_dim_v=DIM, span=span, shift=shift)

    parts: list[Any] = [attention(FULL, Span()), attention(WINDOW, Span(window=30))]
    if RECURRENT in kinds:
        parts.append(RecurrentCache(backend, limits, widths=[{"s": 1} if k == RECURRENT else {} for k in kinds]))
    return LayeredCache(parts, kinds, 2)


def rows(sequence: int, begin: int, end: int) -> Any:
    return batch([0] * (end - begin), range(begin, end), [sequence] * (end - begin), [])


def fill(cache: LayeredCache, sequence: int, begin: int, end: int) -> None:
    for start in range(begin, end, 64):
        cache.start_forward(rows(sequence, start, min(start + 64, end)))
    cache.check_integrity()


def held(cache: LayeredCache) -> Any:
    return [(part.cells.positions.tolist(), part.cells.members.tolist()) for part in cache.parts if isinstance(part, CausalCache)]


def test_each_layer_reads_its_own_part() -> None:
    cache = make()
    fill(cache, 0, 0, 100)
    cache.start_forward(rows(0, 100, 101))
    ctx: Any = ArrayContext()
    cache.make_inputs(ctx)
    cache.set_inputs(ctx)
    seen = []
    for i in range(4):
        cache.layer(i)
        key: Any = ArrayTensor(np.ones((1, HEADS, DIM)))
        cache.put(ctx, key, key)
        mask: Any = cache.get(ctx)[0].mask
        seen.append(int((mask.array == 0).sum()))
    assert seen == [30, 30, 101, 30]


def test_a_part_without_room_refuses_for_all() -> None:
    cache = make(n_pool=512, n_ctx=512)
    fill(cache, 0, 0, 300)
    fill(cache, 1, 0, 180)
    assert cache.n_free == 32
    before = held(cache)
    with pytest.raises(CacheFull, match="33 more tokens"):
        cache.start_forward(rows(1, 180, 213))
    assert held(cache) == before
    fill(cache, 1, 180, 212)


def test_room_is_what_the_parts_share_that_do_not_forget() -> None:
    """A window has room of its own in each sequence: however long they grow, that is no bound, and none of it is free."""
    cache = make(n_pool=2048)
    assert (cache.n_cells, cache.n_free) == (2048, 2048)
    fill(cache, 0, 0, 1500)
    assert cache.n_free == 548
    assert cache.n_freed([0]) == 1500
    cache.copy_prefix(0, 1, 1500, by_reference=True)
    assert (cache.n_free, cache.n_freed([0])) == (548, 0)
    window = cache.parts[WINDOW]
    assert (window.n_cells, window.n_free, window.n_freed([0, 1])) == (0, UNLIMITED, 0)


def test_a_part_that_cannot_move_refuses_for_all() -> None:
    cache = make()
    fill(cache, 0, 0, 400)
    before = held(cache)
    with pytest.raises(NotSupported, match="no longer cached"):
        cache.remove(0, 100, 390)
    assert held(cache) == before
    cache.remove(0, 10, 300)
    assert cache.length(0) == 110
    cache.check_integrity()


def test_recurrent_layers_refuse_the_middle_for_all() -> None:
    cache = make(kinds=[RECURRENT, FULL, WINDOW])
    fill(cache, 0, 0, 100)
    before = held(cache)
    with pytest.raises(NotSupported, match="recurrent"):
        cache.remove(0, 1, 5)
    assert held(cache) == before


def test_all_resume_where_the_most_forgetful_can() -> None:
    cache = make(kinds=[RECURRENT, FULL, WINDOW])
    fill(cache, 0, 0, 100)  # states after 64 and 100
    assert not cache.can_resume(0, 90)
    assert resume_point(cache, 0, 90) == 64
    cache.remove(0, 64)
    fill(cache, 0, 64, 70)
    assert [part.length(0) for part in cache.parts] == [70, 70, 70]


def test_removing_to_where_one_part_has_nothing_empties_all() -> None:
    cache = make()
    fill(cache, 0, 0, 400)
    assert resume_point(cache, 0, 100) == 0
    cache.remove(0, 100)
    assert [part.length(0) for part in cache.parts] == [0, 0]


def test_a_prefix_is_copied_as_far_as_all_can_resume() -> None:
    cache = make(kinds=[RECURRENT, FULL, WINDOW])
    fill(cache, 0, 0, 100)
    cache.copy_prefix(0, 1, 90)
    assert cache.length(1) == 64
    cache.check_integrity()


def test_all_parts_come_back_or_none() -> None:
    cache = make(n_pool=512, n_ctx=512, kinds=[RECURRENT, FULL, WINDOW])
    fill(cache, 0, 0, 150)
    fill(cache, 0, 150, 154)
    saved = cache.save(0)
    assert saved.n_bytes == cache.saved_bytes(0) > 0
    assert [saved.resume_point(n) for n in (128, 149, 152, 154)] == [0, 0, 150, 154]
    cache.remove(0, 0)
    fill(cache, 1, 0, 400)
    before, states = held(cache), [list(s) for s in recurrent(cache).checkpoints.states]
    with pytest.raises(CacheFull):
        cache.restore(0, saved, 154)
    assert held(cache) == before
    assert recurrent(cache).checkpoints.states == states
    cache.remove(1, 0)
    cache.restore(0, saved, 150)
    assert [part.length(0) for part in cache.parts] == [150, 150, 150]
    cache.check_integrity()


def recurrent(cache: LayeredCache) -> RecurrentCache:
    return next(part for part in cache.parts if isinstance(part, RecurrentCache))


def test_where_one_part_cannot_be_saved_nothing_is() -> None:
    backend: Any = ArrayBackend(fill=0.0)
    limits = Limits(2, 512, 64)
    full = CausalCache(backend, limits, n_kv_heads=[HEADS, 0], head_dim_k=DIM, head_dim_v=DIM)
    cache = LayeredCache([full, EncoderCache(backend, limits, n_encoded=4, n_kv_heads=[0, HEADS], head_dim=DIM)], [0, 1], 2)
    fill(cache, 0, 0, 100)
    assert cache.saved_bytes(0) == 0


def test_a_part_without_layers_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="part without layers"):
        make(kinds=[FULL, FULL])
