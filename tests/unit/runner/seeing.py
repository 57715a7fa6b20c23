"""A model that checks what it sees: of every row, in every layer, each visible token and its position.

It runs over the real caches on numpy arrays. A key is a token and its position, a recurrent state a hash of all tokens so
far; the next token follows from what the row sees, so that an answer depends on all of it, and can be told beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tests.unit.kvcache.numpy_backend import ArrayBackend, ArrayContext, ArrayTensor

from puna.kvcache.batch import Batch, runs
from puna.kvcache.cache import Limits
from puna.kvcache.causal import CausalCache
from puna.kvcache.layered import LayeredCache
from puna.kvcache.recurrent import RecurrentCache
from puna.kvcache.span import Span

N_VOCAB = 128
END = 0  # the token that ends an answer
NEVER = 1 << 30  # a position that is not reached
DIM = 2

FULL, WINDOW, CHUNK = Span(), Span(window=24), Span(chunk=32)
STATE = None  # of a layer that is recurrent

Layer = Span | None

# One layer of each kind that a model has.
KINDS: dict[str, list[Layer]] = {
    "full": [FULL],
    "windows": [WINDOW],
    "windows and full": [WINDOW, FULL],
    "chunks and full": [CHUNK, FULL],
    "recurrent": [STATE],
    "recurrent and full": [STATE, FULL],
    "recurrent, windows and full": [STATE, WINDOW, FULL],
}

_PRIME = 4093  # the hash of a state is below it, so that F32 holds it


def make_cache(layers: Sequence[Layer], limits: Limits) -> Any:
    """As models make theirs: a part for each kind of layer."""
    backend: Any = MovingBackend(fill=0.0)
    parts: list[Any] = []
    for i, layer in enumerate(layers):
        if layer is STATE:
            widths = [{"hash": DIM} if k == i else {} for k in range(len(layers))]
            parts.append(RecurrentCache(backend, limits, widths=widths, interval=64))
        else:
            heads = [1 if k == i else 0 for k in range(len(layers))]
            shift: Any = Moved
            parts.append(CausalCache(backend, limits, n_kv_heads=heads, head_dim_k=DIM, head_dim_v=DIM, span=layer, shift=shift))
    return parts[0] if len(parts) == 1 else LayeredCache(parts, range(len(layers)), limits.max_sequences)


class Moved:
    """Keys [DIM, heads, m] whose positions change by so much; computed when the graph is, since changes are its input."""

    def __init__(self, _layer: int, keys: ArrayTensor, changes: ArrayTensor) -> None:
        self._keys = keys
        self._changes = changes

    def copy_to(self, keys: ArrayTensor) -> Moved:
        assert keys is self._keys
        return self

    def run(self) -> None:
        self._keys.array[..., 1] += self._changes.array[:, None]


class MovingContext(ArrayContext):
    def __init__(self) -> None:
        self._moves: list[Moved] = []

    def forward(self, tensor: ArrayTensor | Moved) -> None:
        if isinstance(tensor, Moved):
            self._moves.append(tensor)
        else:
            super().forward(tensor)

    def compute(self) -> bool:
        for move in self._moves:
            move.run()
        return True


class MovingBackend(ArrayBackend):
    def context(self, max_nodes: int) -> ArrayContext:
        del max_nodes
        return MovingContext()


def next_token(layers: Sequence[Layer], tokens: Sequence[int]) -> int:
    """What the model says after these tokens."""
    held = np.array(tokens, np.int64)
    total = 0
    for layer in layers:
        if layer is STATE:
            total += state_hash(0, tokens)
        else:
            first = max(layer.first(len(tokens) - 1), 0)
            total += digest(held[first:], np.arange(first, len(tokens)))
    return total % N_VOCAB


def digest(tokens: Any, positions: Any) -> int:
    return int(((tokens + 1) * (7 * positions + 13)).sum())


def state_hash(start: int, tokens: Sequence[int]) -> int:
    for token in tokens:
        start = (31 * start + token + 1) % _PRIME
    return start


class SeeingModel:
    """A forward pass. Of a sequence, *history* is what it should hold; its rows are NaN from *spoilt_from* on."""

    def __init__(
        self, cache: Any, layers: Sequence[Layer], history: Callable[[int], Sequence[int]], spoilt_from: Callable[[int], int]
    ) -> None:
        self._cache = cache
        self._layers = layers
        self._history = history
        self._spoilt_from = spoilt_from
        self.n_tokens = 0
        self.n_steps = 0
        self.faults: list[AssertionError] = []
        self.on_step: Callable[[Batch], None] = lambda _batch: None  # may raise

    def __call__(self, batch: Batch) -> Any:
        self._begin(batch)
        self.on_step(batch)
        self.n_tokens += batch.n_tokens
        self.n_steps += 1
        try:
            self._check_rows(batch)
            return self._logits(batch, self._totals(batch))
        except AssertionError as fault:
            self.faults.append(fault)
            raise

    def close(self) -> None:
        """There is nothing to close."""

    def _begin(self, batch: Batch) -> None:
        """Errors: CacheFull."""
        self._cache.start_forward(batch)

    def _check_rows(self, batch: Batch) -> None:
        for sequence, begin, end in runs(batch.sequences):
            history = self._history(sequence)[batch.positions[begin] : batch.positions[begin] + end - begin]
            assert list(batch.tokens[begin:end]) == list(history), f"sequence {sequence} is fed what is not its own"

    def _totals(self, batch: Batch) -> Any:
        """[n_tokens] what follows from what each row sees; NaN for one that sees NaN."""
        ctx: Any = ArrayContext()
        self._cache.make_inputs(ctx)
        self._cache.set_inputs(ctx)
        totals = np.zeros(batch.n_tokens)
        for i, layer in enumerate(self._layers):
            self._cache.layer(i)
            totals += self._states(ctx, batch) if layer is STATE else self._attention(ctx, batch, layer)
        return totals

    def _logits(self, batch: Batch, totals: Any) -> Any:
        logits = np.zeros((batch.n_outputs, N_VOCAB), np.float32)
        for row, total in zip(logits, totals[batch.outputs], strict=True):
            if np.isnan(total):
                row[:] = np.nan
            else:
                row[int(total) % N_VOCAB] = 1
        return logits

    def _is_spoilt(self, batch: Batch) -> Any:
        return batch.positions >= [self._spoilt_from(int(s)) for s in batch.sequences]

    def _attention(self, ctx: Any, batch: Batch, span: Span) -> Any:
        key = np.stack([batch.tokens, batch.positions], axis=-1).astype(np.float32)[:, None, :]
        key[self._is_spoilt(batch)] = np.nan
        value = np.repeat(-key[..., :1], DIM, axis=-1)  # values do not change when positions do
        made: Any = ArrayTensor(key), ArrayTensor(value)
        self._cache.put(ctx, *made)
        totals = np.full(batch.n_tokens, -1.0)
        for part in self._cache.get(ctx):
            for i in range(part.n_sequences):
                begin = part.begin + i * part.n_rows
                rows = slice(begin, begin + part.n_rows)
                seen, keys, values = (part.mask.array[i, 0] == 0, part.key.array[i, 0], part.value.array[i, 0])
                totals[rows] = self._check(int(batch.sequences[begin]), batch.positions[rows], seen, keys, values, span)
        assert (np.isnan(totals) | (totals >= 0)).all(), "a row sees nothing"
        return totals

    def _check(self, sequence: int, wanted: Any, seen: Any, keys: Any, values: Any, span: Span) -> Any:
        """What the rows of a sequence at these positions see; [n_rows] what follows from it."""
        any_seen = np.flatnonzero(seen.any(0))
        seen, keys, values = seen[:, any_seen], keys[any_seen], values[any_seen]
        begin, end = max(int(span.first(int(wanted[0]))), 0), int(wanted[-1]) + 1
        if self._spoilt_from(sequence) < end and np.isnan(keys).any():
            return np.where((seen & np.isnan(keys[:, 0])).any(1), np.nan, 0)
        tokens, positions = keys[:, 0], keys[:, 1]
        assert (values == -tokens[:, None]).all(), f"sequence {sequence}: keys and values are not of the same tokens"
        order = np.argsort(positions)
        rows = f"sequence {sequence}, rows {wanted[0]} to {end - 1}"
        assert positions[order].tolist() == list(range(begin, end)), f"{rows} see {positions[order]}"
        assert tokens[order].tolist() == list(self._history(sequence)[begin:end]), f"{rows} see other tokens"
        visible = (positions <= wanted[:, None]) & (positions >= span.first(wanted)[:, None])
        visible |= self._sees_beyond(sequence, wanted, positions)
        assert (seen == visible).all(), f"{rows}: the mask is not that of {span}"
        return [digest(tokens[row].astype(np.int64), positions[row].astype(np.int64)) for row in seen]

    def _sees_beyond(self, sequence: int, wanted: Any, positions: Any) -> Any:
        """[n_rows, n] which of these later positions rows see all the same: none, in text."""
        return np.zeros((len(wanted), len(positions)), bool)

    def _states(self, ctx: Any, batch: Batch) -> Any:
        totals = np.full(batch.n_tokens, -1.0)
        is_spoilt = self._is_spoilt(batch)
        for group in self._cache.states(ctx):
            before = group.load("hash").array
            after = np.empty_like(before)
            for i in range(group.n_sequences):
                rows = range(group.begin + i * group.n_rows, group.begin + (i + 1) * group.n_rows)
                sequence, start = int(batch.sequences[rows[0]]), int(batch.positions[rows[0]])
                value, count = float(before[i, 0]), before[i, 1]
                if not (self._spoilt_from(sequence) < start and np.isnan(value)):
                    assert count == start, f"sequence {sequence}: a state of {count} tokens before token {start}"
                    assert value == state_hash(0, self._history(sequence)[:start]), f"sequence {sequence}, state at {start}"
                for row in rows:
                    value = np.nan if np.isnan(value) or is_spoilt[row] else state_hash(int(value), [int(batch.tokens[row])])
                    totals[row] = value
                after[i] = value, start + group.n_rows
            group.store("hash", ArrayTensor(after))
        return totals
