"""Positions between the learned ones, against plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from puna.vision.interpolated import position_arrays


def between(table: Any, y: float, x: float) -> Any:
    """Of a table [side, side, k] at a place, linearly along each axis."""
    side = len(table)
    low_y, low_x = min(int(y), side - 2), min(int(x), side - 2)
    along = [(1 - (y - low_y)) * table[low_y, column] + (y - low_y) * table[low_y + 1, column] for column in (low_x, low_x + 1)]
    return (1 - (x - low_x)) * along[0] + (x - low_x) * along[1]


@pytest.mark.parametrize("grid", [(2, 2), (4, 10), (12, 6), (8, 8)])
def test_a_patch_gets_what_lies_at_its_place(grid: tuple[int, int]) -> None:
    """The first and the last place along each axis are those of the table."""
    (rows, columns), side, cell = grid, 8, 2
    table = np.random.default_rng(0).standard_normal((side, side, 5))
    arrays = position_arrays(rows, columns, side, cell)
    assert arrays["corners"].dtype == np.int32
    assert arrays["shares"].dtype == np.float32
    found = (table.reshape(-1, 5)[arrays["corners"]] * arrays["shares"][..., None]).sum(0)
    order = [
        (y + dy, x + dx)
        for y in range(0, rows, cell)
        for x in range(0, columns, cell)
        for dy in range(cell)
        for dx in range(cell)
    ]
    expected = [between(table, y * (side - 1) / (rows - 1), x * (side - 1) / (columns - 1)) for y, x in order]
    assert np.allclose(found, expected, atol=1e-5)


def test_the_trained_grid_is_left_alone() -> None:
    arrays = position_arrays(6, 6, 6, 1)
    assert np.array_equal(arrays["shares"][0], np.ones(36))
    assert np.array_equal(arrays["corners"][0], np.arange(36))


def test_a_single_row() -> None:
    assert np.allclose(position_arrays(1, 4, 4, 1)["shares"].sum(0), 1)
