"""ggml's encoders of weights: rows of 16 or 32 bits become blocks of fewer."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Any

import numpy as np
import numpy.typing as npt

from puna.native.ggml import TYPE_BF16, TYPE_F16, TYPE_F32, ggml

_AT_ONCE = 1 << 20  # weights of one piece of work: some megabytes as floats


def is_sound(data: memoryview, tensor_type: int) -> bool:
    """Whether all of these weights are numbers."""
    values = np.frombuffer(data, np.uint8)
    found: bool = ggml().ggml_validate_row_data(tensor_type, values.ctypes.data, values.nbytes)
    return found


def encode(data: memoryview, source: int, target: int, width: int, pool: Executor) -> npt.NDArray[np.uint8]:
    """Rows of *width* weights in the type *source* (F32, F16 or BF16), in the type *target*.

    Errors: ValueError for another source, or where the encoder's result is not sound.
    """
    g = ggml()
    values = _as_numbers(data, source)
    n_rows, row_bytes = len(values) // width, int(g.ggml_row_size(target, width))
    encoded = np.empty(n_rows * row_bytes, np.uint8)

    def piece(begin: int, end: int) -> None:
        floats = _floats(values[begin * width : end * width], source)
        address = encoded.ctypes.data + begin * row_bytes
        g.ggml_quantize_chunk(target, floats.ctypes.data, address, 0, end - begin, width, None)

    step = max(1, _AT_ONCE // width)
    list(pool.map(lambda begin: piece(begin, min(begin + step, n_rows)), range(0, n_rows, step)))
    if not is_sound(encoded.data, target):
        raise ValueError("its numbers cannot be written in this type")
    return encoded


def _as_numbers(data: memoryview, source: int) -> npt.NDArray[Any]:
    kinds = {TYPE_F32: np.float32, TYPE_F16: np.float16, TYPE_BF16: np.uint16}
    if source not in kinds:
        raise ValueError("only weights of 16 or 32 bits are encoded anew")
    return np.frombuffer(data, kinds[source])


def _floats(values: npt.NDArray[Any], source: int) -> npt.NDArray[np.float32]:
    if source == TYPE_BF16:  # the upper half of a float
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(values, np.float32)
