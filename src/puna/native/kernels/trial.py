"""Puna's own products for the self-test: small ones, computed as nodes of a graph by ggml's threads."""

from __future__ import annotations

import math
from contextlib import ExitStack

import numpy as np

from puna.native import products, structs
from puna.native.ggml import BUFFER_USAGE_WEIGHTS, N_TASKS_MAX, STATUS_SUCCESS, TYPE_F32, TYPE_I8, TYPE_I32, ggml
from puna.native.kernels.library import Kernels


class OwnProducts:
    """In the place of ggml's: weights of a type are packed when they are read."""

    def __init__(self, cpu: products.Cpu, kernels: Kernels) -> None:
        self._cpu = cpu
        self._kernels = kernels

    def supports(self, _buffer_type: int, tensor_type: int, *, experts: bool) -> bool:
        return not experts and self._kernels.puna_packed_bytes(tensor_type, products.N_INPUTS, products.N_OUTPUTS) > 0

    def error(self, _buffer_type: int, tensor_type: int, n_columns: int | None) -> float:
        """Normalised error of one product, and of the rows that are looked up; infinite where those are wrong."""
        g, k = ggml(), self._kernels
        n, n_in, n_out = n_columns or 1, products.N_INPUTS, products.N_OUTPUTS
        data, values = products.random_weights(tensor_type, n_in * n_out)
        x = products.random_inputs((n, n_in))
        looked_up = np.arange(n, dtype=np.int32) * 5 % n_out
        with ExitStack() as stack:
            stored, computed = stack.enter_context(products.described()), stack.enter_context(products.described())
            matrix = k.puna_matrix_new(tensor_type, n_in, n_out)
            stack.callback(k.puna_matrix_free, matrix)
            weights = g.ggml_new_tensor_1d(stored, TYPE_I8, k.puna_packed_bytes(tensor_type, n_in, n_out))
            inputs = g.ggml_new_tensor_2d(computed, TYPE_F32, n_in, n)
            indices = g.ggml_new_tensor_1d(computed, TYPE_I32, n)
            kind = k.puna_rounding(tensor_type)

            def node(name: str, tensor_type: int, shape: tuple[int, int], operands: list[int], data: int) -> int:
                address = k.nodes[name]
                pointers = structs.pointers(operands)
                return int(
                    g.ggml_custom_4d(computed, tensor_type, *shape, 1, 1, pointers, len(operands), address, N_TASKS_MAX, data)
                )

            rounded = node("puna_round_node", TYPE_I8, (k.puna_rounded_bytes(kind, n_in, n), 1), [inputs], kind)
            if n > 1:
                product = node("puna_product_node", TYPE_F32, (n_out, n), [rounded, weights], matrix)
            else:
                product = node("puna_column_product_node", TYPE_F32, (n_out, n), [inputs, weights], matrix)
            rows = node("puna_rows_node", TYPE_F32, (n_in, n), [indices, weights], matrix)
            buffer = stack.enter_context(products.allocated(stored, self._cpu.plain))
            stack.enter_context(products.allocated(computed, self._cpu.plain))
            g.ggml_backend_buffer_set_usage(buffer, BUFFER_USAGE_WEIGHTS)
            k.puna_pack(tensor_type, data.ctypes.data, n_in, 0, n_out, structs.data_of(weights))
            g.ggml_backend_tensor_set(inputs, x.ctypes.data, 0, x.nbytes)
            g.ggml_backend_tensor_set(indices, looked_up.ctypes.data, 0, looked_up.nbytes)
            graph = g.ggml_new_graph_custom(computed, 16, False)
            g.ggml_build_forward_expand(graph, product)
            g.ggml_build_forward_expand(graph, rows)
            if g.ggml_backend_graph_compute(self._cpu.backend, graph) != STATUS_SUCCESS:
                return math.inf
            found, found_rows = np.empty((n, n_out), np.float32), np.empty((n, n_in), np.float32)
            g.ggml_backend_tensor_get(product, found.ctypes.data, 0, found.nbytes)
            g.ggml_backend_tensor_get(rows, found_rows.ctypes.data, 0, found_rows.nbytes)
        matrix_values = values.reshape(n_out, n_in)
        if not np.allclose(found_rows, matrix_values[looked_up], rtol=1e-5, atol=1e-6):
            return math.inf
        expected = x.astype(np.float64) @ matrix_values.T
        return float(np.sqrt(((found - expected) ** 2).sum() / (expected**2).sum()))
