"""Keys and values turned before they are quantised, so that no single channel sets the scale of its block.

The turn is an orthonormal Walsh-Hadamard matrix, which is its own inverse: queries turned alike give the same products
with the keys, and what attention mixes from turned values is turned back. llama.cpp does the same (pull request 21038),
keys by the widest matrix that divides a head, values by 64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from puna.ml.backend import Context
from puna.ml.tensor import DType, Tensor

NARROWEST = 64


class Rotation:
    """A turn of every *width* channels of a head; an input of the graph, since it must lie where the keys do."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._matrix = hadamard(width)
        self.input: Tensor | None = None

    def make_input(self, ctx: Context) -> None:
        self.input = ctx.input(DType.F32, self.width, self.width)
        ctx.forward(self.input)  # gets memory, even where no layer of this graph uses it

    def set_input(self, ctx: Context) -> None:
        assert self.input is not None
        ctx.set(self.input, self._matrix)

    def __call__(self, x: Tensor) -> Tensor:
        """X [dim, heads, n] turned; dim is a multiple of the width."""
        assert self.input is not None, "make_inputs comes before the model's forward"
        dim, heads, n, _ = x.shape
        pieces = x.contiguous().reshape(self.width, dim // self.width, heads, n)
        return self.input.mul_mat(pieces).reshape(dim, heads, n)


def key_rotation(dim: int) -> Rotation | None:
    """For heads of this width; None where 64 does not divide it."""
    if dim % NARROWEST:
        return None
    return Rotation(dim & -dim)


def value_rotation(dim: int) -> Rotation | None:
    return None if dim % NARROWEST else Rotation(NARROWEST)


def hadamard(width: int) -> npt.NDArray[np.float32]:
    """Orthonormal and symmetric; width is a power of two."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.ascontiguousarray(matrix / np.float32(np.sqrt(width)), np.float32)
