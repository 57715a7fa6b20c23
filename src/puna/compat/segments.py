"""A batch cut into what libllama computes at once: tokens or rows that are embeddings, and rows that see each other apart."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import numpy as np
import numpy.typing as npt

from puna.kvcache.batch import Batch, Embedded, runs

Ints = npt.NDArray[np.int32]


class Kind(Enum):
    TOKENS = "tokens"
    ROWS = "rows"
    BOTH_WAYS = "both ways"  # rows that see each other, also the later ones


def segments(batch: Batch) -> Iterator[tuple[Kind, Ints]]:
    """Rows that go together, in an order in which each sequence's come one after another."""
    if batch.embedded is None:
        yield Kind.TOKENS, np.arange(batch.n_tokens, dtype=np.int32)
        return
    kinds = [Kind.TOKENS] * batch.n_tokens
    for row in batch.embedded.rows:
        kinds[row] = Kind.ROWS
    for begin, end in batch.bidirectional:
        kinds[begin:end] = [Kind.BOTH_WAYS] * (end - begin)
    bounds = {bound for both in batch.bidirectional for bound in both}
    waiting = [_runs_of_kind(kinds, begin, end, bounds) for _, begin, end in runs(batch.sequences)]
    while any(waiting):
        first = [parts.pop(0) for parts in waiting if parts]
        for kind in Kind:
            rows = [np.arange(begin, end, dtype=np.int32) for is_of, begin, end in first if is_of is kind]
            if rows:
                yield kind, np.concatenate(rows)


def _runs_of_kind(kinds: list[Kind], begin: int, end: int, bounds: set[int]) -> list[tuple[Kind, int, int]]:
    """Of the rows [begin, end), cut at *bounds* too."""
    found: list[tuple[Kind, int, int]] = []
    for row in range(begin, end):
        if found and found[-1][0] is kinds[row] and row not in bounds:
            found[-1] = (kinds[row], found[-1][1], row + 1)
        else:
            found.append((kinds[row], row, row + 1))
    return found


def part(batch: Batch, rows: Ints) -> Batch:
    """These rows of a batch as one of its own."""
    outputs = np.flatnonzero(np.isin(rows, batch.outputs)).astype(np.int32)
    embedded = None
    if batch.embedded is not None:
        chosen = np.isin(batch.embedded.rows, rows)
        if chosen.any():
            places = np.searchsorted(rows, batch.embedded.rows[chosen]).astype(np.int32)
            embedded = Embedded(places, np.ascontiguousarray(batch.embedded.values[chosen]))
    axes = None if batch.axes is None else np.ascontiguousarray(batch.axes[:, rows])
    return Batch(batch.tokens[rows], batch.positions[rows], batch.sequences[rows], outputs, embedded=embedded, axes=axes)
