"""Tensors' memory on the host as numpy sees it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from puna.native.structs import data_of


def floats(tensor: int, n_rows: int, width: int) -> npt.NDArray[np.float32]:
    """The memory of a contiguous F32 tensor on the host, read-only; it must outlive the array."""
    memory: Any = (ctypes.c_float * (n_rows * width)).from_address(data_of(tensor))
    values: npt.NDArray[np.float32] = np.frombuffer(memory, np.float32).reshape(n_rows, width)
    values.flags.writeable = False
    return values
