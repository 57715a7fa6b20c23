"""Rotary positions along several axes, against double precision and against the rotation along one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from puna.kvcache.batch import text_axes
from puna.ml.ggml.backend import GGMLBackend
from puna.ml.tensor import DType, RopeOptions, SectionOrder, Sections
from tests.tiny import write_llama

HEAD_DIM, N_HEADS, N = 32, 3, 7
BASE = 1000.0

Floats = npt.NDArray[Any]

CASES = {
    "in turn": (Sections((4, 6, 6, 0)), 32),
    "in turn, a part of each head": (Sections((2, 3, 3, 0)), 16),
    "in turn, four axes": (Sections((4, 4, 4, 4)), 32),
    "in turn, fewer than there are pairs": (Sections((2, 3, 3, 0)), 32),
    "interleaved": (Sections((6, 5, 5, 0), SectionOrder.INTERLEAVED), 32),
    "interleaved, a part of each head": (Sections((4, 2, 2, 0), SectionOrder.INTERLEAVED), 16),
    "apart": (Sections((8, 8, 8, 8), SectionOrder.APART), 32),
}


def axis_of(pair: int, sections: Sections) -> int:
    """Of a pair; those beyond the sections begin anew with the first."""
    n_pairs, pair = sections.n_pairs, pair % sum(sections.n_pairs)
    if sections.order is SectionOrder.INTERLEAVED:
        axis = pair % 3
        return axis if pair < 3 * n_pairs[axis] else 3
    return next(axis for axis in range(4) if pair < sum(n_pairs[: axis + 1]))


def rotated(x: Floats, axes: Floats, sections: Sections, n_dims: int) -> Floats:
    """X [n, n_heads, head_dim] with positions [4, n], pair by pair."""
    y, half = x.astype(np.float64), n_dims // 2
    for pair in range(half):
        axis = axis_of(pair, sections)
        apart = sections.order is SectionOrder.APART
        step = (pair - sum(sections.n_pairs[:axis])) / (half / 2) if apart else pair / half
        angle = (axes[axis] * BASE**-step)[:, None]
        first, second = x[..., pair].astype(np.float64), x[..., pair + half].astype(np.float64)
        y[..., pair] = first * np.cos(angle) - second * np.sin(angle)
        y[..., pair + half] = first * np.sin(angle) + second * np.cos(angle)
    return y


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[GGMLBackend]:
    backend = GGMLBackend(write_llama(tmp_path / "m.gguf"), n_threads=1)
    yield backend
    backend.close()


def turned(backend: GGMLBackend, x: Floats, positions: Floats, options: RopeOptions) -> Floats:
    ctx = backend.context(32)
    given = ctx.input(DType.F32, HEAD_DIM, N_HEADS, N)
    places = ctx.input(DType.I32, positions.size)
    y = given.rope(places, options).reshape(HEAD_DIM, N_HEADS * N)
    ctx.output(y)
    ctx.set(given, x)
    ctx.set(places, np.ascontiguousarray(positions, np.int32))
    assert ctx.compute()
    found: Floats = ctx.values(y).reshape(N, N_HEADS, HEAD_DIM).copy()
    ctx.close()
    return found


@pytest.mark.parametrize("case", CASES)
def test_each_pair_turns_by_the_position_on_its_axis(case: str, backend: GGMLBackend) -> None:
    sections, n_dims = CASES[case]
    random = np.random.default_rng(3)
    x = random.standard_normal((N, N_HEADS, HEAD_DIM)).astype(np.float32)
    axes = random.integers(0, 50, (4, N))
    found = turned(backend, x, axes, RopeOptions(n_dims, base=BASE, sections=sections))
    assert np.abs(found - rotated(x, axes, sections, n_dims)).max() < 1e-4


@pytest.mark.parametrize("case", ["in turn", "in turn, a part of each head", "interleaved"])
def test_text_turns_as_along_one_axis(case: str, backend: GGMLBackend) -> None:
    """All of its pairs belong to axes that text moves along at once."""
    sections, n_dims = CASES[case]
    x = np.random.default_rng(4).standard_normal((N, N_HEADS, HEAD_DIM)).astype(np.float32)
    positions = np.arange(5, 5 + N, dtype=np.int32)
    plain = RopeOptions(n_dims, neox=True, base=BASE, scale=0.5, ext_factor=1.0, original_ctx=64)
    found = turned(backend, x, text_axes(positions), replace(plain, neox=False, sections=sections))
    assert np.allclose(found, turned(backend, x, positions, plain), atol=1e-6)


@pytest.mark.parametrize("neox", [False, True])
def test_a_part_in_the_middle_of_a_head(backend: GGMLBackend, neox: bool) -> None:
    random = np.random.default_rng(5)
    x = random.standard_normal((N, N_HEADS, HEAD_DIM), np.float32)
    positions = random.integers(0, 50, N).astype(np.int32)
    options = RopeOptions(n_dims=8, neox=neox, base=BASE, scale=0.5)
    found = turned(backend, x, positions, replace(options, begin=16))
    moved = turned(backend, np.roll(x, -16, -1), positions, options)
    assert np.array_equal(found, np.roll(moved, 16, -1))
    assert np.array_equal(found[..., :16], x[..., :16])
    assert not np.array_equal(found[..., 16:24], x[..., 16:24])
