"""Attention over random keys and values: computed by a backend, and in double precision, for tests and bench."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from puna.gguf.types import TensorType
from puna.ml.attention import AttentionRange, Scoring
from puna.ml.backend import row_bytes
from puna.ml.ggml.backend import GGMLBackend
from puna.ml.tensor import DType
from puna.ml.turning import hadamard
from puna.native import products
from tests.tiny import quantize

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Rows:
    """Of n_sequences sequences so many rows each; a sequence's cells begin *stride* after the one's before."""

    n_rows: int
    n_cells: int
    n_sequences: int = 1
    begin: int = 0  # first cell
    stride: int = 0
    hidden: float = 0.3  # share of the cells that a row does not see, besides those that it must not


@dataclass(frozen=True)
class Case:
    ranges: tuple[Rows, ...]
    head_dim: int = 64
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim_v: int = 0  # 0: as the keys'
    dtype: DType = DType.F16
    softcap: float = 0.0
    max_bias: float = 0.0
    has_sinks: bool = False
    values_in_keys: bool = False
    is_masked: bool = True  # otherwise there is no mask, and every row sees every cell
    seed: int = 0
    least_cells: int = 0  # of the pool
    key_turn: int = 0
    value_turn: int = 0

    @property
    def width_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def n(self) -> int:
        return sum(r.n_rows * r.n_sequences for r in self.ranges)

    @property
    def n_cells(self) -> int:
        """The library checks a view's end as if its sequences followed each other without overlap."""
        needed = max(r.begin + max(r.stride, r.n_cells) * (r.n_sequences - 1) + r.n_cells for r in self.ranges)
        return max(needed, self.least_cells)

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


def _stored(values: Floats, dtype: DType) -> tuple[NDArray[np.uint8], Floats]:
    """As a cache holds rows, and what they then are."""
    if dtype is DType.F32:
        return values.view(np.uint8).reshape(-1), values
    if dtype is DType.F16:
        half = values.astype(np.float16)
        return half.view(np.uint8).reshape(-1), half.astype(np.float32)
    data = quantize(values, TensorType(int(dtype))).reshape(-1)
    return data, products.decode(int(dtype), data, values.size).reshape(values.shape)


class Data:
    """What a case's tensors hold."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(case.seed)
        self.case = case
        self.query = rng.standard_normal((case.n, case.n_heads, case.head_dim), np.float32)
        widths = [case.head_dim] if case.values_in_keys else [case.head_dim, case.width_v]
        rows = [rng.standard_normal((case.n_cells, case.n_kv_heads * width), np.float32) for width in widths]
        self.stored, values = zip(*(_stored(r, case.dtype) for r in rows), strict=True)
        self.key = values[0].reshape(case.n_cells, case.n_kv_heads, case.head_dim)
        whole = self.key[..., : case.width_v] if case.values_in_keys else values[1]
        self.value = whole.reshape(case.n_cells, case.n_kv_heads, case.width_v)
        self.sinks = rng.standard_normal(case.n_heads).astype(np.float32) * 2
        self.masks = [self._mask(r, rng) for r in case.ranges]

    def _mask(self, r: Rows, rng: Any) -> NDArray[np.float16]:
        """[n_sequences, n_rows, n_cells]; every row sees one cell at least."""
        if not self.case.is_masked:
            return np.zeros((r.n_sequences, r.n_rows, r.n_cells), np.float16)
        seen = rng.random((r.n_sequences, 1, r.n_cells)) >= r.hidden
        last = max(0, r.n_cells - r.n_rows) + np.arange(r.n_rows)[:, None]
        seen = np.repeat(seen, r.n_rows, 1) & (np.arange(r.n_cells) <= last)
        seen[..., 0] = True
        distance = np.arange(r.n_cells) - last if self.case.max_bias else 0.0
        return np.where(seen, np.broadcast_to(distance, seen.shape), -np.inf).astype(np.float16)

    def each_range(self) -> Iterator[tuple[int, Rows]]:
        """With the number of its first row."""
        row = 0
        for r in self.case.ranges:
            yield row, r
            row += r.n_rows * r.n_sequences

    def rows_alone(self, index: int, sequence: int, begin: int, end: int) -> tuple[slice, Data]:
        """Rows of one sequence of a range as a case of its own over the same cells; which of all rows these are."""
        first, r = list(self.each_range())[index]
        alone = copy(self)
        rows = Rows(end - begin, r.n_cells, begin=r.begin + sequence * r.stride)
        alone.case = replace(self.case, ranges=(rows,), least_cells=self.case.n_cells)
        of_all = slice(first + sequence * r.n_rows + begin, first + sequence * r.n_rows + end)
        alone.query, alone.masks = self.query[of_all], [self.masks[index][sequence : sequence + 1, begin:end]]
        return of_all, alone

    def spoilt(self, cells: NDArray[np.int64], of_keys: float, of_values: float) -> Data:
        """The same but for one value, or one block of them, of each head in these cells: it is no finite number, or zero."""
        case, other = self.case, copy(self)
        widths = [case.head_dim] if case.values_in_keys else [case.head_dim, case.width_v]
        stored = []
        for held, width, value in zip(self.stored, widths, (of_keys, of_values), strict=False):
            kind = np.float32 if case.dtype is DType.F32 else np.float16
            n_bytes = row_bytes(case.dtype, width)
            heads = held.copy().reshape(case.n_cells, case.n_kv_heads, n_bytes)
            if value:
                heads[cells, :, : kind().nbytes] = np.frombuffer(kind(value).tobytes(), np.uint8)
            stored.append(heads.reshape(-1))
        other.stored = tuple(stored)
        return other

    def expected(self) -> NDArray[np.float64]:
        """[n, n_heads, head_dim_v] in double precision."""
        case, parts = self.case, []
        group = case.n_heads // case.n_kv_heads
        slopes = _slopes(case.n_heads, case.max_bias)
        row = 0
        for r, mask in zip(case.ranges, self.masks, strict=True):
            for s in range(r.n_sequences):
                cells = slice(r.begin + s * r.stride, r.begin + s * r.stride + r.n_cells)
                key, value = (np.repeat(x[cells].astype(np.float64), group, axis=1) for x in (self.key, self.value))
                query = _turned(self.query[row : row + r.n_rows].astype(np.float64), case.key_turn)
                row += r.n_rows
                scores = np.einsum("nhd,mhd->hnm", query, key) * case.scale
                if case.softcap:
                    scores = case.softcap * np.tanh(scores / case.softcap)
                with np.errstate(invalid="ignore"):
                    scores = scores + slopes[:, None, None] * mask[s].astype(np.float64)
                largest = scores.max(-1, keepdims=True)
                if case.has_sinks:
                    largest = np.maximum(largest, self.sinks[:, None, None])
                weights = np.exp(scores - largest)
                total = weights.sum(-1, keepdims=True)
                if case.has_sinks:
                    total = total + np.exp(self.sinks[:, None, None] - largest)
                parts.append(_turned(np.einsum("hnm,mhd->nhd", weights / total, value), case.value_turn))
        return np.concatenate(parts)


def _turned(x: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    return (x.reshape(-1, width) @ hadamard(width).astype(np.float64)).reshape(x.shape) if width else x


def _slopes(n_heads: int, max_bias: float) -> NDArray[np.float64]:
    if not max_bias:
        return np.ones(n_heads)
    n = 1 << (n_heads.bit_length() - 1)
    first, second = 2.0 ** (-max_bias / n), 2.0 ** (-max_bias / 2 / n)
    return np.array([first ** (h + 1) if h < n else second ** (2 * (h - n) + 1) for h in range(n_heads)])


@contextmanager
def prepared(backend: GGMLBackend, data: Data, n_layers: int = 1) -> Iterator[Any]:
    """A graph that computes the case so often; give what is called to compute and to read it. The backend is then allocated."""
    case = data.case
    widths = [case.head_dim] if case.values_in_keys else [case.head_dim, case.width_v]  # of a head in each pool
    pools = [[backend.storage(0, case.dtype, w * case.n_kv_heads, case.n_cells) for w in widths] for _ in range(n_layers)]
    backend.allocate()
    for layer in pools:
        for pool, stored in zip(layer, data.stored, strict=True):
            backend.write(pool, 0, stored)
    ctx = backend.context(64 + n_layers * (16 + 16 * len(case.ranges)))
    query = ctx.input(DType.F32, case.head_dim, case.n_heads, case.n)
    sinks = ctx.input(DType.F32, case.n_heads)
    masks = [ctx.input(DType.F16, r.n_cells, r.n_rows, 1, r.n_sequences) for r in case.ranges]
    for tensor in (query, sinks, *masks) if case.is_masked else (query, sinks):
        ctx.forward(tensor)
    outputs = []
    for layer in pools:
        ranges, row = [], 0
        for r, mask in zip(case.ranges, masks, strict=True):
            parts = []
            for pool, held, width in ((layer[0], widths[0], case.head_dim), (layer[-1], widths[-1], case.width_v)):
                cell, head = row_bytes(case.dtype, held * case.n_kv_heads), row_bytes(case.dtype, held)
                shape = (width, r.n_cells, case.n_kv_heads, r.n_sequences)
                parts.append(ctx.use(pool).view(shape, (cell, head, r.stride * cell), r.begin * cell))
            ranges.append(AttentionRange(row, r.n_rows, r.n_sequences, parts[0], parts[1], mask if case.is_masked else None))
            row += r.n_rows * r.n_sequences
        scoring = Scoring(
            case.scale, case.softcap, sinks if case.has_sinks else None, case.max_bias, case.key_turn, case.value_turn
        )
        outputs.append(ctx.attention(query, ranges, scoring))
        ctx.output(outputs[-1])

    def run() -> None:
        ctx.set(query, data.query)
        ctx.set(sinks, data.sinks)
        for mask, values in zip(masks, data.masks, strict=True) if case.is_masked else ():
            ctx.set(mask, values)
        assert ctx.compute()

    def result() -> Floats:
        found = np.empty((case.n, case.n_heads, case.width_v), np.float32)
        ctx.get(outputs[-1], found)
        return found

    try:
        yield run, result
    finally:
        ctx.close()
