"""How the rows of an encoder's layer see one another: the one thing in it that is not done row by row.

A layer says what its rows look for, what they are found by and what they give, and which of them see which. Whoever computes
it brings the rest: all rows at once, or some of them against what all rows are found by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from puna.ml.attention import AttentionRange, Scoring
from puna.ml.backend import Context
from puna.ml.tensor import DType, Tensor


class Group(NamedTuple):
    """Rows [begin, begin + width * n_windows): windows of *width* rows that see their own; or with *n_seen*, all see the first
    so many rows of the piece.
    """

    begin: int
    width: int
    n_windows: int = 1
    n_seen: int = 0


class Kept(NamedTuple):
    """What the rows of a layer are found by and give is so wide in each of so many heads, and of this type."""

    head_dim: int
    n_heads: int
    dtype: DType = DType.F16


class Look(Protocol):
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        groups: Sequence[Group] | None = None,
        *,
        scale: float = 0.0,
        dtype: DType = DType.F16,
    ) -> Tensor:
        """Query, key and value [head_dim, n_heads, n] of the rows at hand to what they see, [head_dim * n_heads, n].

        The groups are those of all rows of the piece, in order; None: all see all. Scale 0: by the width of heads. Keys and
        values are kept as *dtype*; the products are summed in F32.
        """


def scoring(query: Tensor, scale: float) -> Scoring:
    return Scoring(scale or 1 / math.sqrt(query.shape[0]))


def attention_ranges(groups: Sequence[Group] | None, begin: int, end: int, keys: Tensor, values: Tensor) -> list[AttentionRange]:
    """What the rows [begin, end) see, counted from the first of them; keys and values [head_dim, n, n_heads] are of all rows."""
    n = keys.shape[1]
    ranges = []
    for group in [Group(0, n, n_seen=n)] if groups is None else groups:
        first, last = max(group.begin, begin), min(group.begin + group.width * group.n_windows, end)
        while first < last:
            rows, count, seen = _next(group, first, last)
            parts = [_view(x, seen, group, count) for x in (keys, values)]
            ranges.append(AttentionRange(first - begin, rows, count, *parts))
            first += rows * count
    return ranges


def _next(group: Group, first: int, last: int) -> tuple[int, int, int]:
    """Of a group's rows [first, last) what is asked for at once: rows of a window, windows, and the first row that is seen."""
    if group.n_seen:
        return last - first, 1, 0
    window, into = divmod(first - group.begin, group.width)
    n_whole = 0 if into else (last - first) // group.width
    begin = group.begin + window * group.width
    return (group.width, n_whole, begin) if n_whole else (min(group.width - into, last - first), 1, begin)


def _view(x: Tensor, begin: int, group: Group, count: int) -> Tensor:
    head_dim, n, n_heads, _ = x.shape
    if group.n_seen == n:
        return x
    _, row, head, _ = x.strides
    width = group.n_seen or group.width
    return x.view((head_dim, width, n_heads, count), (row, head, width * row), begin * row)


class LookAtOnce:
    """All rows of a piece in one graph."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        groups: Sequence[Group] | None = None,
        *,
        scale: float = 0.0,
        dtype: DType = DType.F16,
    ) -> Tensor:
        keys, values = (x.permute(0, 2, 1, 3).cast(dtype) for x in (key, value))
        ranges = attention_ranges(groups, 0, query.shape[2], keys, values)
        return self._ctx.attention(query, ranges, scoring(query, scale))
