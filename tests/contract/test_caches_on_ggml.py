"""Caches on the real tensor library, where numpy arrays cannot tell: graphs that are used again, reads beside writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from puna.kvcache.batch import Encoded, batch
from puna.kvcache.cache import Limits, resume_point
from puna.kvcache.causal import CausalCache
from puna.kvcache.encoder import EncoderCache
from puna.kvcache.recurrent import RecurrentCache
from puna.ml.ggml.backend import GGMLBackend
from puna.ml.tensor import DType
from puna.nn.attention import attention
from tests.tiny import write_llama

DIM, HEADS = 32, 2
Floats = npt.NDArray[np.float32]


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[GGMLBackend]:
    backend = GGMLBackend(write_llama(tmp_path / "model.gguf", n_layers=3), n_threads=2)
    yield backend
    backend.close()


class Summing:
    """Two recurrent layers whose state is the sum of what they were fed; a graph is built once for each shape."""

    def __init__(self, backend: GGMLBackend, n_sequences: int = 3) -> None:
        self.backend = backend
        self.cache = RecurrentCache(
            backend, Limits(n_sequences, 4096, 512), widths=[{"s": DIM}, {}, {"s": DIM}], n_checkpoints=2, interval=20
        )
        backend.allocate()
        self.graphs = 0
        self._built: Any = None
        self._key: Any = None

    def step(self, counts: list[tuple[int, int]], value: float) -> Floats:
        """The states of the second layer after feeding each (sequence, count) that many times the value."""
        positions = [self.cache.length(s) + i for s, n in counts for i in range(n)]
        key = self.cache.start_forward(batch([0] * len(positions), positions, [s for s, n in counts for _ in range(n)], []))
        if key != self._key:
            self._build(len(counts))
            self._key = key
        ctx, added, results = self._built
        ctx.set(added, np.repeat(np.array([[value * n] for _, n in counts], np.float32), DIM, 1))
        self.cache.set_inputs(ctx)
        assert ctx.compute()
        found = np.empty((len(counts), DIM), np.float32)
        row = 0
        for result in results:
            part = np.empty((result.shape[1], DIM), np.float32)
            ctx.get(result, part)
            found[row : row + len(part)] = part
            row += len(part)
        assert (found == found[:, :1]).all()
        self.cache.check_integrity()
        return found[:, 0]

    def _build(self, n_sequences: int) -> None:
        if self._built:
            self._built[0].close()
        self.graphs += 1
        ctx = self.backend.context(256)
        self.cache.make_inputs(ctx)
        added = ctx.input(DType.F32, DIM, n_sequences)
        results = []
        for layer in (0, 2):
            self.cache.layer(layer)
            begin = 0
            for group in self.cache.states(ctx):
                more = added.view((DIM, group.n_sequences), (4 * DIM,), 4 * DIM * begin)
                new = group.load("s") + more
                group.store("s", new)
                begin += group.n_sequences
                if layer == 2:
                    ctx.output(new)
                    results.append(new)
        self._built = ctx, added, results

    def close(self) -> None:
        self._built[0].close()


def test_states_go_from_step_to_step_in_one_graph(backend: GGMLBackend) -> None:
    model = Summing(backend)
    for i in range(1, 30):
        assert model.step([(0, 1), (1, 1)], 1.0).tolist() == [i, i]
    assert model.graphs == 1
    assert model.step([(0, 4), (1, 4), (2, 7)], 2.0).tolist() == [37, 37, 14]
    model.close()


def test_copies_checkpoints_and_undone_steps(backend: GGMLBackend) -> None:
    model = Summing(backend)
    cache = model.cache
    for _ in range(3):
        model.step([(0, 30)], 1.0)
    cache.copy_prefix(0, 1, 60)
    assert model.step([(0, 1), (1, 1)], 5.0).tolist() == [95, 65]
    cache.remove(0, 90)  # undoes the last step
    assert model.step([(0, 1)], 1.0).tolist() == [91]
    assert resume_point(cache, 0, 59) == 30
    cache.remove(0, 30)
    cache.remove(1, 0)
    assert model.step([(0, 2), (1, 2)], 1.0).tolist() == [32, 2]
    model.close()


def expected(query: Floats, key: Floats, value: Floats, seen: npt.NDArray[np.bool_]) -> Floats:
    """Attention in numpy: query [n, heads, dim], key and value [m, heads, dim], seen [n, m]."""
    scores = np.einsum("nhd,mhd->hnm", query, key)
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed: Floats = np.einsum("hnm,mhd->nhd", weights, value)
    return mixed


def test_rows_of_a_span_see_each_other(backend: GGMLBackend) -> None:
    cache = CausalCache(backend, Limits(2, 256, 64), n_kv_heads=[HEADS], head_dim_k=DIM, head_dim_v=DIM)
    backend.allocate()
    n, random = 40, np.random.default_rng(1)
    q, k, v = (random.standard_normal((n, HEADS, DIM), dtype=np.float32) * 0.5 for _ in range(3))
    rows = [*[(0, p) for p in range(25)], *[(1, p) for p in range(15)]]
    cache.start_forward(batch([0] * n, [p for _, p in rows], [s for s, _ in rows], [], bidirectional=[(5, 12), (30, 36)]))
    ctx = backend.context(64)
    cache.make_inputs(ctx)
    tensors: list[Any] = [ctx.input(DType.F32, DIM, HEADS, n) for _ in range(3)]
    cache.layer(0)
    any_ctx: Any = ctx
    mixed: Any = attention(any_ctx, tensors[0], tensors[1], tensors[2], cache, 1.0)
    ctx.output(mixed)
    for tensor, values in zip(tensors, (q, k, v), strict=True):
        ctx.set(tensor, values)
    cache.set_inputs(ctx)
    assert ctx.compute()
    found = np.empty((n, HEADS, DIM), np.float32)
    ctx.get(mixed, found)
    ctx.close()
    seen = np.array([[s == t and p >= r for t, r in rows] for s, p in rows])
    for begin, end in ((5, 12), (30, 36)):
        seen[begin:end, begin:end] = True
    np.testing.assert_allclose(found, expected(q, k, v, seen), atol=3e-3)


def store(backend: GGMLBackend, cache: EncoderCache, sequence: int, keys: Floats, values: Floats) -> None:
    """The next rows of an image that is to come."""
    n_rows, begin = len(keys), cache.n_ahead(sequence)
    ctx = backend.context(64)
    cache.make_rows(ctx, n_rows)
    key, value = (ctx.input(DType.F32, DIM, HEADS, n_rows) for _ in range(2))
    cache.layer(0)
    cache.put(ctx, key, value)
    ctx.set(key, keys)
    ctx.set(value, values)
    cache.set_rows(ctx, sequence, begin, begin + n_rows)
    assert ctx.compute()
    cache.note_rows(sequence, begin + n_rows)
    ctx.close()


def test_cross_attention_sees_its_own_image_and_nothing_where_there_is_none(backend: GGMLBackend) -> None:
    cache = EncoderCache(backend, Limits(3, 256, 64), n_encoded=40, n_kv_heads=[HEADS], head_dim=DIM)
    backend.allocate()
    random = np.random.default_rng(2)
    counts = [(0, 6), (1, 3), (2, 5)]
    n, n_new = 14, 50
    q = random.standard_normal((n, HEADS, DIM), dtype=np.float32) * 0.5
    k, v = (random.standard_normal((n_new, HEADS, DIM), dtype=np.float32) * 0.5 for _ in range(2))
    encoded = [Encoded(0, 2, 20), Encoded(2, 0, 30)]
    positions, sequences = [p for _, c in counts for p in range(c)], [s for s, c in counts for _ in range(c)]

    for sequence, rows in ((0, slice(0, 7)), (2, slice(20, 50)), (0, slice(7, 20))):
        store(backend, cache, sequence, k[rows], v[rows])

    def run(start: int, encoded: list[Encoded]) -> Floats:
        cache.start_forward(batch([0] * n, [p + start for p in positions], sequences, [], encoded=encoded))
        ctx = backend.context(64)
        cache.make_inputs(ctx)
        query = ctx.input(DType.F32, DIM, HEADS, n)
        cache.layer(0)
        parts: list[Any] = []
        for to in cache.get(ctx):
            shape = (DIM, HEADS, to.n_rows, to.n_sequences)
            width = 4 * DIM * HEADS
            part: Any = query.view(shape, (4 * DIM, width, to.n_rows * width), to.begin * width)
            mixed = part.permute(0, 2, 1, 3).flash_attention(to.key, to.value, to.mask, 1.0)
            parts.append(mixed.reshape(DIM * HEADS, to.n_rows * to.n_sequences))
        whole = parts[0]
        for part in parts[1:]:
            whole = whole.concat(part, 1)
        visible: Any = cache.visible()
        result = whole * visible
        ctx.output(result)
        ctx.set(query, q)
        cache.set_inputs(ctx)
        assert ctx.compute()
        found = np.empty((n, HEADS, DIM), np.float32)
        ctx.get(result, found)
        ctx.close()
        return found

    everything = np.ones((n, n_new), np.bool_)
    first, third = (expected(q, k[part], v[part], everything[:, part]) for part in (slice(0, 20), slice(20, 50)))
    found = run(0, encoded)
    np.testing.assert_allclose(found[2:6], first[2:6], atol=3e-3)
    np.testing.assert_allclose(found[9:], third[9:], atol=3e-3)
    assert (found[[0, 1, 6, 7, 8]] == 0).all()
    later = run(6, [])
    np.testing.assert_allclose(later[:6], first[:6], atol=3e-3)
    np.testing.assert_allclose(later[9:], third[9:], atol=3e-3)
    assert (later[6:9] == 0).all()
