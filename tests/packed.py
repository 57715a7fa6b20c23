"""Puna's own products outside of graphs, and ggml's on the same weights, for tests and bench."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from puna.native import products
from puna.native.ggml import STATUS_SUCCESS, TYPE_F32, ggml
from puna.native.kernels.library import Kernels

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

TYPES = {name: products.weight_types()[name] for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "mxfp4")}
TYPES_OF_256 = {name: products.weight_types()[name] for name in ("q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_xs")}
FLOATS = {name: products.weight_types()[name] for name in ("f32", "f16", "bf16")}
QUANTISED = TYPES | TYPES_OF_256
ALL_TYPES = QUANTISED | FLOATS


WITH_GGML = 2e-6  # the same rounding of activations, sums in another order


def rounded_for(name: str, x: Floats) -> Floats:
    """What ggml rounds activations to before it does as Puna does: only those that multiply F16."""
    return x.astype(np.float16).astype(np.float32) if name == "f16" else x


def block_of(name: str) -> int:
    return 256 if name in TYPES_OF_256 else 32


def aligned(n_bytes: int, fill: int = 0) -> Bytes:
    """Memory that begins a line of the cache, as a packed matrix must."""
    memory = np.full(n_bytes + 64, fill, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + n_bytes]


def pack(kernels: Kernels, tensor_type: int, data: Bytes, n_in: int, n_rows: int, parts: tuple[int, ...] = ()) -> Bytes:
    """*parts*: numbers of rows that come one after another. What is beyond the last row is anything."""
    packed = aligned(kernels.puna_packed_bytes(tensor_type, n_in, n_rows), fill=0xEE)
    row_bytes, first = data.size // n_rows, 0
    for count in parts or (n_rows,):
        kernels.puna_pack(tensor_type, data.ctypes.data + first * row_bytes, n_in, first, count, packed.ctypes.data)
        first += count
    return packed


class Matrix:
    """Packed weights and what multiplies them."""

    def __init__(self, kernels: Kernels, tensor_type: int, packed: Bytes, n_in: int, n_rows: int) -> None:
        self._kernels, self._type, self._packed, self._n_in, self._n_rows = kernels, tensor_type, packed, n_in, n_rows
        self._matrix = kernels.puna_matrix_new(tensor_type, n_in, n_rows)

    def times(self, x: Floats) -> Floats:
        """X [n, n_in] to [n, n_rows], with the guard behind the result untouched."""
        n = len(x)
        rounded = aligned(self._kernels.puna_rounded_bytes(self._kernels.puna_rounding(self._type), self._n_in, n))
        result = np.full(n * self._n_rows + 64, 12345.0, np.float32)
        self._kernels.puna_round(self._type, x.ctypes.data, self._n_in, n, rounded.ctypes.data)
        self._kernels.puna_multiply(self._matrix, self._packed.ctypes.data, rounded.ctypes.data, n, result.ctypes.data)
        assert (result[-64:] == 12345.0).all(), "written beyond the end"
        return result[:-64].reshape(n, self._n_rows)

    def close(self) -> None:
        self._kernels.puna_matrix_free(self._matrix)


@contextmanager
def matrix(kernels: Kernels, tensor_type: int, data: Bytes, n_in: int, n_rows: int) -> Iterator[Matrix]:
    opened = Matrix(kernels, tensor_type, pack(kernels, tensor_type, data, n_in, n_rows), n_in, n_rows)
    try:
        yield opened
    finally:
        opened.close()


def ggml_product(cpu: Any, tensor_type: int, data: Bytes, x: Floats, n_rows: int) -> Floats:
    """By ggml on its plain memory."""
    g = ggml()
    n, n_in = x.shape
    with products.described() as stored, products.described() as computed:
        weights = g.ggml_new_tensor_2d(stored, tensor_type, n_in, n_rows)
        inputs = g.ggml_new_tensor_2d(computed, TYPE_F32, n_in, n)
        product = g.ggml_mul_mat(computed, weights, inputs)
        with products.allocated(stored, cpu.plain), products.allocated(computed, cpu.plain):
            g.ggml_backend_tensor_set(weights, data.ctypes.data, 0, data.nbytes)
            g.ggml_backend_tensor_set(inputs, x.ctypes.data, 0, x.nbytes)
            graph = g.ggml_new_graph_custom(computed, 16, False)
            g.ggml_build_forward_expand(graph, product)
            assert g.ggml_backend_graph_compute(cpu.backend, graph) == STATUS_SUCCESS
            result = np.empty((n, n_rows), np.float32)
            g.ggml_backend_tensor_get(product, result.ctypes.data, 0, result.nbytes)
    return result


def error(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """Normalised: the root of summed squares over that of what is expected."""
    difference = found.astype(np.float64) - expected
    return float(np.sqrt((difference**2).sum() / (expected.astype(np.float64) ** 2).sum()))
