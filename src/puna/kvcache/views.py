"""Which parts of the pool a batch reads: each sequence its own range, several at once where the ranges are alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from puna.kvcache.cells import padded

# Views grow in steps of this many cells, so a graph fits this many steps of decoding.
PADDING = 256

# Reading one more masked cell costs about what a visible one does: sequences share a call if at most this share is waste.
MAX_WASTE = 0.25


class View(NamedTuple):
    """Part of the pool that a group of sequences reads; hashable, since graphs are built for it."""

    row: int  # first row of the batch
    n_rows: int  # rows of each sequence
    n_sequences: int
    begin: int  # first cell of the first sequence
    stride: int  # cells from one sequence's begin to the next's
    n_cells: int  # of each sequence


class Range(NamedTuple):
    """The rows [row, end_row) of one sequence, and the cells [begin, end) that they see."""

    row: int
    end_row: int
    begin: int
    end: int

    def padded(self) -> Range:
        """As much of the pool as views would read for it."""
        return Range(self.row, self.end_row, self.begin // PADDING * PADDING, padded(self.end, PADDING))


def plan(ranges: Iterable[Range], n_cells: int) -> list[View]:
    """Views that cover all rows in order; n_cells, the size of the pool, is a multiple of PADDING."""
    views: list[View] = []
    lengths: list[int] = []
    for wanted in ranges:
        row, end_row, begin, end = wanted.padded()
        length, n_rows = end - begin, end_row - row
        merged = _merge(views[-1], lengths, begin, length, n_rows, n_cells) if views else None
        if merged:
            views[-1] = merged
            lengths.append(length)
        else:
            views.append(View(row, n_rows, 1, begin, 0, length))
            lengths = [length]
    return views


def _merge(view: View, lengths: list[int], begin: int, length: int, n_rows: int, n_cells: int) -> View | None:
    """The view with one sequence more, if that keeps its distances equal and wastes little."""
    n = view.n_sequences + 1
    stride = begin - (view.begin + (n - 2) * view.stride)
    longest = max(view.n_cells, length)
    # The library checks a view's end as if its sequences followed each other without overlap.
    fits = max(begin + longest, view.begin + n * longest) <= n_cells
    is_even = stride > 0 and (n == 2 or stride == view.stride)
    waste = 1 - (sum(lengths) + length) / (longest * n)
    if n_rows != view.n_rows or not is_even or not fits or waste > MAX_WASTE:
        return None
    return View(view.row, n_rows, n, view.begin, stride, longest)
