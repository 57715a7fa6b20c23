"""Masks against the plain comparison of every row with every cell, bit for bit, and what building one takes."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.kvcache.batch import batch
from puna.kvcache.cache import Limits
from puna.kvcache.causal import CausalCache
from puna.kvcache.cells import END
from puna.kvcache.masks import show
from puna.kvcache.span import Span
from tests.unit.kvcache.numpy_backend import ArrayBackend, ArrayContext


def plain(positions: npt.NDArray[np.int32], held: npt.NDArray[np.int32], span: Span) -> npt.NDArray[np.float16]:
    seen = held <= positions[:, None]
    if span.is_bounded:
        seen &= held >= span.first(positions[:, None])
    return np.where(seen, np.float16(0), np.float16(-np.inf))


all_spans = st.one_of(
    st.just(Span()),
    st.builds(Span, window=st.integers(1, 80)),
    st.builds(Span, chunk=st.integers(1, 80)),
)


@st.composite
def held_positions(draw: st.DrawFn) -> list[int]:
    """In the order of the cells: stretches that follow each other anyhow, with holes."""
    order = draw(st.lists(st.integers(0, 9), max_size=10, unique=True))
    size = draw(st.integers(1, 40))
    cells = [p for i in order for p in (range(i * size, (i + 1) * size) if i % 3 else [END] * size)]
    return [END if draw(st.integers(0, 30)) == 0 else p for p in cells] or [END]


@given(held_positions(), st.integers(0, 400), st.integers(1, 60), all_spans, st.booleans())
def test_a_mask_is_the_plain_comparison_bit_for_bit(held: list[int], first: int, n_rows: int, span: Span, has_gaps: bool) -> None:
    positions = np.arange(first, first + n_rows, dtype=np.int32) * (2 if has_gaps else 1)
    cells = np.array(held, np.int32)
    mask = np.full((n_rows, len(cells)), 7, np.float16)  # all of it must be written
    show(mask, positions, cells, span)
    np.testing.assert_array_equal(mask.view(np.uint16), plain(positions, cells, span).view(np.uint16))


@given(st.lists(st.integers(0, 300), min_size=1, max_size=120, unique=True), st.integers(0, 300), st.integers(1, 40), all_spans)
def test_scattered_cells(held: list[int], first: int, n_rows: int, span: Span) -> None:
    positions, cells = np.arange(first, first + n_rows, dtype=np.int32), np.array(held, np.int32)
    mask = np.full((n_rows, len(cells)), 7, np.float16)
    show(mask, positions, cells, span)
    np.testing.assert_array_equal(mask.view(np.uint16), plain(positions, cells, span).view(np.uint16))


class HostContext(ArrayContext):
    """The last input, which is the mask, can be written where it lies."""

    def input(self, dtype: Any, *shape: int) -> Any:
        tensor = super().input(dtype, *shape)
        self.mask, self.bytes = tensor, bytearray(2 * tensor.array.size)
        return tensor

    def memory(self, tensor: Any) -> Any:
        assert tensor is self.mask
        return memoryview(self.bytes)


@pytest.mark.parametrize("window", [0, 512])
def test_a_mask_is_written_where_it_is_read_without_another_of_its_size(window: int) -> None:
    n_batch, n_ctx = 512, 8192
    backend: Any = ArrayBackend()
    limits = Limits(1, n_ctx, n_batch)
    cache = CausalCache(backend, limits, n_kv_heads=[1], head_dim_k=1, head_dim_v=1, span=Span(window))
    for begin in range(0, n_ctx, n_batch):
        cache.start_forward(batch([0] * n_batch, range(begin, begin + n_batch), [0] * n_batch, []))
    ctx: Any = HostContext()
    cache.make_inputs(ctx)
    tracemalloc.start()
    try:
        cache.set_inputs(ctx)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(ctx.bytes) == 2 * n_batch * (8192 if not window else 1024)
    n_compared = n_batch * (n_batch if not window else 2 * n_batch)
    assert most < 4 * n_compared + 64 * n_ctx, "something of the mask's size was made beside it"
    written = np.frombuffer(ctx.bytes, np.float16).reshape(n_batch, -1)
    begin = cache._views[0].begin
    held = np.where(cache.cells.members[0], cache.cells.positions, END)[begin : begin + written.shape[1]].astype(np.int32)
    positions = np.arange(n_ctx - n_batch, n_ctx, dtype=np.int32)
    np.testing.assert_array_equal(written.view(np.uint16), plain(positions, held, cache.span).view(np.uint16))


def test_a_mask_for_a_device_is_made_in_the_same_memory_every_time() -> None:
    backend: Any = ArrayBackend()
    cache = CausalCache(backend, Limits(1, 1024, 64), n_kv_heads=[1], head_dim_k=1, head_dim_v=1)
    ctx: Any = ArrayContext()
    staged = set()
    for begin in range(0, 256, 64):
        cache.start_forward(batch([0] * 64, range(begin, begin + 64), [0] * 64, []))
        cache.make_inputs(ctx)
        cache.set_inputs(ctx)
        staged.add(cache._staging.ctypes.data)
    assert len(staged) == 1
