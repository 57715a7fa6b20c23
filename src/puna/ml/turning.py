"""The matrix that channels are turned by before they are quantised, and queries to meet turned keys."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt


@cache
def hadamard(width: int) -> npt.NDArray[np.float32]:
    """Orthonormal and symmetric (Walsh 1923); width is a power of two."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.ascontiguousarray(matrix / np.float32(np.sqrt(width)), np.float32)
