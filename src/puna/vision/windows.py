"""Attention within windows of an image (Liu et al. 2021): cells see those of their own window.

Windows of one size follow one another, so that all of them attend as one batch; at the edges they are smaller. What is
where is told by the shapes of arrays that belong to the image, since a graph fits all images of the same shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from puna.ml.tensor import Tensor
from puna.vision.look import Group

Ints = npt.NDArray[np.int32]

_NAME = "window"


def window_arrays(n_rows: int, n_columns: int, side: int) -> dict[str, Ints]:
    """For a grid of cells, numbered row by row: those of each window [n_windows, n_cells], an array for each size of window."""
    numbers = np.arange(n_rows * n_columns, dtype=np.int32).reshape(n_rows, n_columns)
    by_size: dict[tuple[int, ...], list[Ints]] = {}
    for top in range(0, n_rows, side):
        for left in range(0, n_columns, side):
            window = numbers[top : top + side, left : left + side]
            by_size.setdefault(window.shape, []).append(window.reshape(-1))
    groups = [np.stack(windows) for windows in by_size.values()]
    return {f"{_NAME}_{i}": group for i, group in enumerate(groups)}


def in_windows(cells: npt.NDArray[Any], windows: Mapping[str, Ints]) -> npt.NDArray[Any]:
    """Something of each cell, [n, ...] in order, window by window."""
    found: npt.NDArray[Any] = cells[np.concatenate([windows[name].reshape(-1) for name in _names(windows)])]
    return found


def _names(arrays: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in arrays if name.startswith(f"{_NAME}_"))


def window_groups(inputs: Mapping[str, Tensor], n_patches: int) -> list[Group]:
    """Who sees whom among cells of so many patches."""
    groups, begin = [], 0
    for name in _names(inputs):
        width, count, _, _ = inputs[name].shape
        groups.append(Group(begin, width * n_patches, count))
        begin += width * n_patches * count
    return groups
