"""Places along the axes of M-RoPE (Wang et al. 2024): of patches in an encoder, and of an image's rows among tokens.

Patches come cell by cell, as ``puna.vision.pixels.patches`` cuts them; a cell becomes a row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from puna.kvcache.batch import N_AXES
from puna.ml.tensor import RopeOptions, SectionOrder, Sections
from puna.vision.model import Placed
from puna.vision.pixels import by_cells

Ints = npt.NDArray[np.int32]


def patch_places(n_rows: int, n_columns: int, cell: int) -> Ints:
    """Row and column of each patch, [4, n]; an encoder uses two of the axes."""
    grid = np.stack([*np.mgrid[:n_rows, :n_columns], *np.zeros((2, n_rows, n_columns))], -1).astype(np.int32)
    return np.ascontiguousarray(by_cells(grid, cell).T)


def patch_rope(head_dim: int, base: float) -> RopeOptions:
    """Half of a head's pairs turn by the row of a patch and half by its column, with the same frequencies."""
    quarter = head_dim // 4
    return RopeOptions(head_dim, base=base, sections=Sections((quarter, quarter, 0, 0), SectionOrder.APART))


def placed(n_rows: int, n_columns: int, begin: int, padding: int, end: int) -> Placed:
    """An image of so many rows and columns of cells between the tokens *begin* and *end*.

    Its rows stand at one time, each at its own height and width; what follows goes on behind the furthest of them.
    """
    n, n_further = n_rows * n_columns, max(n_rows, n_columns)
    axes = np.zeros((N_AXES, n + 2), np.int32)
    axes[:3, 1:-1] = 1
    axes[1:3, 1:-1] += np.indices((n_rows, n_columns), np.int32).reshape(2, n)
    axes[:3, -1] = 1 + n_further
    return Placed(
        tokens=[begin, *[padding] * n, end],
        rows=[-1, *range(n), -1],
        axes=axes,
        n_positions=n_further + 2,
    )
