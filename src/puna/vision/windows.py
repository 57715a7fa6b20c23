"""Attention within windows of an image (Liu et al. 2021): cells see those of their own window.

Windows of one size follow one another, so that all of them attend as one batch; at the edges they are smaller. What is
where is told by the shapes of arrays that belong to the image, since a graph fits all images of the same shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from puna.ml.attention import AttentionRange, Scoring
from puna.ml.backend import Context
from puna.ml.tensor import DType, Tensor

Ints = npt.NDArray[np.int32]

_NAME = "window"
_BACK = "in_order"


def window_arrays(n_rows: int, n_columns: int, side: int) -> dict[str, Ints]:
    """For a grid of cells, numbered row by row: those of each window [n_windows, n_cells], an array for each size of window,
    and where each cell is then.
    """
    numbers = np.arange(n_rows * n_columns, dtype=np.int32).reshape(n_rows, n_columns)
    by_size: dict[tuple[int, ...], list[Ints]] = {}
    for top in range(0, n_rows, side):
        for left in range(0, n_columns, side):
            window = numbers[top : top + side, left : left + side]
            by_size.setdefault(window.shape, []).append(window.reshape(-1))
    groups = [np.stack(windows) for windows in by_size.values()]
    order = np.concatenate([group.reshape(-1) for group in groups])
    return {f"{_NAME}_{i}": group for i, group in enumerate(groups)} | {_BACK: np.argsort(order).astype(np.int32)}


def _groups(inputs: Mapping[str, Tensor]) -> list[Tensor]:
    return [inputs[name] for name in sorted(inputs) if name.startswith(f"{_NAME}_")]


def in_windows(cells: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Cells [k, n] in order to window by window."""
    parts = [cells.rows(group.reshape(group.shape[0] * group.shape[1])) for group in _groups(inputs)]
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.concat(part, 1)
    return whole


def in_order(cells: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """The way back."""
    return cells.rows(inputs[_BACK])


def window_sizes(ctx: Context, inputs: Mapping[str, Tensor], n_patches: int) -> Sequence[tuple[int, int]]:
    """(patches of a window, how many such windows follow one another), for cells of so many patches."""
    groups = _groups(inputs)
    for group in groups:
        ctx.forward(group)  # gets memory, though nothing but its shape is used
    return [(group.shape[0] * n_patches, group.shape[1]) for group in groups]


def attend_in_windows(ctx: Context, query: Tensor, key: Tensor, value: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
    """Query, key and value [head_dim, n_heads, n] to [head_dim * n_heads, n]."""
    head_dim, n_heads, n, _ = query.shape
    keys, values = (x.permute(0, 2, 1, 3).cast(DType.F16) for x in (key, value))
    ranges, begin = [], 0
    for width, count in sizes:

        def part(x: Tensor, begin: int = begin, width: int = width, count: int = count) -> Tensor:
            row, head = x.strides[1:3]
            return x.view((head_dim, width, n_heads, count), (row, head, width * row), begin * row)

        ranges.append(AttentionRange(begin, width, count, part(keys), part(values)))
        begin += width * count
    assert begin == n, f"windows of {begin} patches, and {n} of them"
    return ctx.attention(query, ranges, Scoring(1 / math.sqrt(head_dim)))
