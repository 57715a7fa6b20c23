"""Logarithms of probabilities against a softmax in double precision, at the edges of what float32 holds too."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.sample.logprobs import LOWEST, logprobs, top_logprobs

EDGES: list[list[float]] = [
    [1000.0, 999.0, 998.0],
    [0.0] * 5,
    [-500.0, -501.0, -499.5],
    [500.0, 501.0, -500.0],
    [1.0, 2.0, 3.0],
    [2.0, 5.0, 1.0, 4.0, 3.0],
    [-3.0],
    [1e-30, -1e-30],
]


def reference(row: Any) -> Any:
    x = np.asarray(row, np.float64)
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


@pytest.mark.parametrize("row", EDGES)
def test_they_are_the_logarithm_of_the_softmax(row: list[float]) -> None:
    values = np.array(row, np.float32)
    found = logprobs(values, range(len(row)))
    assert found == pytest.approx(reference(values), abs=1e-5)
    assert all(value <= 1e-6 for value in found)
    assert sum(math.exp(value) for value in found) == pytest.approx(1, abs=1e-5)


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=300))
def test_so_they_are_for_any_row(row: list[float]) -> None:
    values = np.array(row, np.float32)
    expected = np.maximum(reference(values), LOWEST)
    assert logprobs(values, range(len(row))) == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_a_vocabulary_of_a_quarter_million_loses_no_precision() -> None:
    row = np.random.default_rng(0).normal(0, 5, 262_144).astype(np.float32)
    assert logprobs(row, range(1000)) == pytest.approx(reference(row)[:1000], abs=1e-5)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([np.nan, 0.0, 0.0], [LOWEST, -math.log(2), -math.log(2)]),
        ([-np.inf, 0.0], [LOWEST, 0.0]),
        ([np.inf, 0.0], [0.0, LOWEST]),
        ([np.nan, -np.inf], [LOWEST, LOWEST]),
    ],
)
def test_what_is_no_number_stays_finite(row: list[float], expected: list[float]) -> None:
    assert logprobs(np.array(row, np.float32), range(len(row))) == pytest.approx(expected)


def test_the_likeliest_come_first_and_the_chosen_one_stands_apart() -> None:
    row = np.array([2.0, 5.0, 1.0, 4.0, 3.0], np.float32)
    own, top = top_logprobs(row, 2, 3)
    assert [entry.token for entry in top] == [1, 3, 4]
    assert [entry.logprob for entry in top] == pytest.approx(reference(row)[[1, 3, 4]], abs=1e-6)
    assert own == pytest.approx(reference(row)[2], abs=1e-6)


@pytest.mark.parametrize(("n_top", "n_found"), [(0, 0), (2, 2), (20, 3)])
def test_there_are_no_more_than_asked_for_nor_than_are_possible(n_top: int, n_found: int) -> None:
    row = np.array([1.0, 2.0, -np.inf, 3.0], np.float32)
    assert len(top_logprobs(row, 0, n_top)[1]) == n_found


def test_the_row_is_not_changed() -> None:
    row = np.array([np.nan, np.inf, 1.0], np.float32)
    before = row.copy()
    top_logprobs(row, 2, 2)
    assert np.array_equal(row, before, equal_nan=True)
