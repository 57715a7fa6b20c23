"""Learned positions on another grid, against the formula: a triangle as wide as a step on the coarser of the two."""

from __future__ import annotations

import numpy as np
import pytest

from puna.vision.resampled import position_arrays, shares, shares_of_grid


@pytest.mark.parametrize(("n_in", "n_out"), [(16, 16), (16, 24), (16, 5), (3, 40), (7, 1), (1, 7)])
def test_a_place_takes_of_those_about_it(n_in: int, n_out: int) -> None:
    found = shares(n_in, n_out)
    scale = n_in / n_out
    for i in range(n_out):
        weights = [max(0.0, 1 - abs(j + 0.5 - (i + 0.5) * scale) / max(1.0, scale)) for j in range(n_in)]
        assert found[i] == pytest.approx(np.array(weights) / sum(weights), abs=1e-6)


def test_on_the_grid_that_they_were_learned_on_nothing_changes() -> None:
    assert np.array_equal(shares_of_grid(5, 5, 5).reshape(25, 25), np.eye(25, dtype=np.float32))


def test_a_grid_is_rows_by_columns() -> None:
    learned = np.arange(16, dtype=np.float32)  # 4 x 4: 4 times the row and the column
    found = shares_of_grid(4, 2, 8) @ learned
    assert found.shape == (2, 8)
    assert (found[1] - found[0]) == pytest.approx(np.full(8, found[1, 0] - found[0, 0]))
    assert found.mean() == pytest.approx(7.5)
    assert (np.diff(found[0])[1:-1]) == pytest.approx(np.full(5, 0.5))


def test_patches_come_cell_by_cell() -> None:
    arrays = position_arrays(3, 2, 4, 2)
    assert arrays["learned"].tolist() == list(range(9))
    shares = shares_of_grid(3, 2, 4)
    order = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert np.array_equal(arrays["shares"], [shares[place] for place in order])
