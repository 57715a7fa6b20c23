"""Learned positions for a grid of any size, between those of the square grid that was trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from puna.ml.backend import Use
from puna.ml.tensor import Tensor
from puna.nn.declare import gguf
from puna.vision.pixels import by_cells

_CORNERS = 4  # that a place lies between


def _along(n: int, side: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Of n places from the first to the last of *side*: the two that each lies between, [2, n], and how much of each."""
    places = np.linspace(0, side - 1, n, dtype=np.float32)
    low = np.floor(places).astype(np.int64)
    share = places - low.astype(np.float32)
    return np.stack([low, np.minimum(low + 1, side - 1)]), np.stack([1 - share, share])


def position_arrays(n_rows: int, n_columns: int, side: int, cell: int) -> dict[str, npt.NDArray[np.int32 | np.float32]]:
    """For the patches of a grid cell by cell: the four trained places around each, and how much of each (bilinear, with the
    corners of both grids on one another).
    """
    (rows, row_shares), (columns, column_shares) = _along(n_rows, side), _along(n_columns, side)
    numbers = rows[:, None, :, None] * side + columns[None, :, None, :]
    shares = row_shares[:, None, :, None] * column_shares[None, :, None, :]
    flat = (x.reshape(_CORNERS, n_rows, n_columns).transpose(1, 2, 0) for x in (numbers, shares))
    corners, weights = (np.ascontiguousarray(by_cells(x, cell).T) for x in flat)
    return {"corners": corners.astype(np.int32), "shares": weights.astype(np.float32)}


@dataclass
class InterpolatedPositions:
    weight: Tensor = gguf("weight", dims="embd positions", use=Use.ROWS)

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The vectors of position_arrays' patches, [n_embd, n]."""
        corners, shares = inputs["corners"], inputs["shares"]
        n = corners.shape[0]
        found: Tensor | None = None
        for i in range(_CORNERS):
            rows = self.weight.rows(corners.view((n,), (), i * corners.strides[1]))
            part = rows * shares.view((1, n), (shares.strides[0],), i * shares.strides[1])
            found = part if found is None else found + part
        assert found is not None
        return found
