"""Learned positions for grids of patches other than the one that they were learned on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def shares(n_in: int, n_out: int) -> Floats:
    """What each of n_out places along a side takes of each of n_in, [n_out, n_in].

    Between the two nearest by their distances, where centres are halves; with fewer places out than in, of so many more that
    none is passed over.
    """
    scale = n_in / n_out
    centres = (np.arange(n_out) + 0.5) * scale
    distances = np.abs(np.arange(n_in) + 0.5 - centres[:, None]) / max(scale, 1.0)
    weights = np.maximum(0.0, 1.0 - distances)
    found: Floats = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    return found


def shares_of_grid(n_side: int, rows: int, columns: int) -> Floats:
    """What each place of a grid takes of those of a square, [rows, columns, n_side * n_side]."""
    found: Floats = np.einsum("ri,cj->rcij", shares(n_side, rows), shares(n_side, columns))
    return found.reshape(rows, columns, n_side * n_side)
