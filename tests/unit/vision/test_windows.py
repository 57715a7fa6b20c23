"""Windows of cells, and attention within them against plain numpy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.ml.ggml.backend import GGMLBackend
from puna.vision.look import LookAtOnce
from puna.vision.model import Piece
from puna.vision.windows import in_windows, window_arrays, window_groups
from tests.tiny import write_llama
from tests.vision.encoding import Inputs, difference

GRIDS = [(4, 4, 4), (5, 6, 4), (9, 9, 4), (3, 2, 4), (8, 12, 2), (1, 7, 3)]
HEAD_DIM, N_HEADS, N_PATCHES = 16, 2, 4


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[GGMLBackend]:
    backend = GGMLBackend(write_llama(tmp_path / "m.gguf"), n_threads=2)
    yield backend
    backend.close()


def test_windows_of_one_size_follow_one_another() -> None:
    found = window_arrays(3, 5, 2)
    assert found["window_0"].tolist() == [[0, 1, 5, 6], [2, 3, 7, 8]]
    assert found["window_1"].tolist() == [[4, 9]]
    assert found["window_2"].tolist() == [[10, 11], [12, 13]]
    assert found["window_3"].tolist() == [[14]]
    assert in_windows(np.arange(15), found).tolist() == [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14]


@pytest.mark.parametrize("grid", GRIDS)
def test_cells_see_those_of_their_window(grid: tuple[int, int, int], backend: GGMLBackend) -> None:
    n_rows, n_columns, side = grid
    n = n_rows * n_columns
    random = np.random.default_rng(1)
    x: dict[str, Any] = {name: random.standard_normal((n, N_PATCHES * N_HEADS * HEAD_DIM)).astype(np.float32) for name in "qkv"}
    ctx = backend.context(128)
    windows = window_arrays(n_rows, n_columns, side)
    inputs = Inputs(ctx, Piece({**windows, **{name: in_windows(values, windows) for name, values in x.items()}}))
    query, key, value = (inputs[name].reshape(HEAD_DIM, N_HEADS, n * N_PATCHES) for name in "qkv")
    result = LookAtOnce(ctx)(query, key, value, window_groups(inputs, N_PATCHES))
    ctx.output(result)
    inputs.set()
    assert ctx.compute()
    found = np.empty((n, N_PATCHES * N_HEADS * HEAD_DIM), np.float32)
    found[in_windows(np.arange(n), windows)] = ctx.values(result).reshape(found.shape)
    ctx.close()

    rows, columns = np.divmod(np.arange(n), n_columns)
    window = np.repeat(rows // side * n_columns + columns // side, N_PATCHES)
    q, k, v = (x[name].reshape(n * N_PATCHES, N_HEADS, HEAD_DIM).astype(np.float64) for name in "qkv")
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(HEAD_DIM)
    scores[:, window[:, None] != window] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("hij,jhd->ihd", shares / shares.sum(-1, keepdims=True), v)
    assert difference(found.reshape(-1), expected.reshape(-1).astype(np.float32)) < 2e-3


def test_a_graph_of_whole_windows_differs_from_one_of_parts() -> None:
    """Their arrays have other shapes, by which graphs are told apart."""
    whole, parts = (Piece(dict(window_arrays(*size, 4))).key for size in ((4, 8), (2, 16)))
    assert whole != parts
