"""Learned positions for grids of other sizes, resampled as an image would be: areas of both grids lie on one another, so that
with fewer places than were learned none is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from puna.ml.backend import Use
from puna.ml.tensor import Tensor
from puna.nn.declare import gguf
from puna.vision.pixels import by_cells

Floats = npt.NDArray[np.float32]


def shares(n_in: int, n_out: int) -> Floats:
    """What each of n_out places along a side takes of each of n_in, [n_out, n_in].

    Of the two nearest by their distances, centres being halves; with fewer places out than in, of so many more.
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


def position_arrays(side: int, n_rows: int, n_columns: int, cell: int) -> dict[str, npt.NDArray[np.int32 | np.float32]]:
    """For the patches of a grid cell by cell, where a square of so many was learned."""
    shares = by_cells(shares_of_grid(side, n_rows, n_columns), cell)
    return {"learned": np.arange(side**2, dtype=np.int32), "shares": shares.astype(np.float32)}


@dataclass
class ResampledPositions:
    weight: Tensor = gguf("weight", dims="embd positions", use=Use.ROWS)

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The vectors of position_arrays' patches, [n_embd, n]."""
        return self.weight.rows(inputs["learned"]).permute(1, 0, 2, 3).contiguous().mul_mat(inputs["shares"])
