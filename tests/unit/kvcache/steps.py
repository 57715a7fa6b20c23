"""One step of a cache on numpy arrays, and what its rows saw.

Values encode what they are: sequence * 1000 + position, plus the kv head as a fraction.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from puna.kvcache.batch import batch
from puna.kvcache.causal import CausalCache
from tests.unit.kvcache.numpy_backend import ArrayContext, ArrayTensor

HEADS, DIM = 2, 3


def step(
    cache: CausalCache, rows: list[tuple[int, int]], values: list[float] | None = None, bidirectional: Any = ()
) -> list[dict[int, float]]:
    """Store (sequence, position) rows; for each row, what it sees: position to value."""
    sequences, positions = [s for s, _ in rows], [p for _, p in rows]
    stored = values or [s * 1000.0 + p for s, p in rows]
    b = batch([0] * len(rows), positions, sequences, [], bidirectional)
    cache.start_forward(b)
    ctx: Any = ArrayContext()
    cache.make_inputs(ctx)
    cache.set_inputs(ctx)
    cache.layer(0)
    key = np.asarray(stored)[:, None, None] + np.arange(HEADS)[None, :, None] / 10 + np.zeros(DIM)
    tensors: list[Any] = [ArrayTensor(key.copy()), ArrayTensor(-key)]
    cache.put(ctx, *tensors)
    return [seen for part in cache.get(ctx) for seen in _seen(cache, part)]


def _seen(cache: CausalCache, part: Any) -> list[dict[int, float]]:
    result = []
    view = next(v for v in cache._views if v.row == part.begin)
    for s in range(part.n_sequences):
        begin = view.begin + s * view.stride
        for r in range(part.n_rows):
            visible = np.flatnonzero(part.mask.array[s, 0, r] == 0)
            keys, values = part.key.array[s][:, visible], part.value.array[s][:, visible]
            np.testing.assert_array_equal(keys, -values)
            np.testing.assert_allclose(keys[1] - keys[0], 0.1, atol=1e-3)
            result.append({int(cache.cells.positions[begin + c]): float(keys[0, i, 0]) for i, c in enumerate(visible)})
    return result


def history(sequence: int, position: int) -> dict[int, float]:
    return {p: sequence * 1000.0 + p for p in range(position + 1)}
