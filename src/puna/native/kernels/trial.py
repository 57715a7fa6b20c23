"""Puna's own products for the self-test: small ones, computed as nodes of a graph by ggml's threads."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from puna.native import products, structs
from puna.native.ggml import BUFFER_USAGE_WEIGHTS, N_TASKS_MAX, STATUS_SUCCESS, TYPE_F32, TYPE_I8, TYPE_I32, ggml
from puna.native.kernels.library import Kernels


class OwnProducts:
    """In the place of ggml's: weights of a type are packed when they are read."""

    def __init__(self, cpu: products.Cpu, kernels: Kernels) -> None:
        self._cpu = cpu
        self._kernels = kernels

    def supports(self, _buffer_type: int, tensor_type: int, *, experts: bool) -> bool:
        return bool(self._kernels.puna_packed_bytes(tensor_type, products.N_INPUTS, products.N_OUTPUTS) > 0)

    def error(self, _buffer_type: int, tensor_type: int, n_columns: int | None) -> float:
        """Normalised error of one product, and of the rows that are looked up; infinite where those are wrong."""
        if n_columns is None:
            return max(self._error_of_experts(tensor_type, n) for n in (1, products.N_TOKENS))
        return self._error_of_matrix(tensor_type, n_columns)

    def _error_of_matrix(self, tensor_type: int, n: int) -> float:
        g, k = ggml(), self._kernels
        n_in, n_out = products.N_INPUTS, products.N_OUTPUTS
        data, values = products.random_weights(tensor_type, n_in * n_out)
        x = products.random_inputs((n, n_in))
        looked_up = np.arange(n, dtype=np.int32) * 5 % n_out
        with ExitStack() as stack:
            stored, computed = stack.enter_context(products.described()), stack.enter_context(products.described())
            matrix = k.puna_matrix_new(tensor_type, n_in, n_out)
            stack.callback(k.puna_matrix_free, matrix)
            linear = k.linear([tensor_type], [n_out], n_in)
            stack.callback(k.puna_linear_free, linear)
            weights = g.ggml_new_tensor_1d(stored, TYPE_I8, k.puna_packed_bytes(tensor_type, n_in, n_out))
            inputs = g.ggml_new_tensor_2d(computed, TYPE_F32, n_in, n)
            indices = g.ggml_new_tensor_1d(computed, TYPE_I32, n)
            kind = k.puna_rounding(tensor_type)
            if n > 1:
                rounded_bytes = k.puna_rounded_bytes(kind, n_in, n)
                rounded = self._node(computed, "puna_round_node", TYPE_I8, (rounded_bytes,), [inputs], kind)
                product = self._node(computed, "puna_linear_node", TYPE_F32, (n_out, n), [rounded, weights], linear)
            else:
                product = self._node(computed, "puna_column_linear_node", TYPE_F32, (n_out, n), [inputs, weights], linear)
            rows = self._node(computed, "puna_rows_node", TYPE_F32, (n_in, n), [indices, weights], matrix)
            self._allocate(stack, stored, computed)
            k.puna_pack(tensor_type, data.ctypes.data, n_in, 0, n_out, structs.data_of(weights))
            found = self._computed(computed, {inputs: x, indices: looked_up}, [product, rows])
        if found is None or not np.allclose(found[1][0, 0], values.reshape(n_out, n_in)[looked_up], rtol=1e-5, atol=1e-6):
            return math.inf
        return _error(found[0], x.astype(np.float64) @ values.reshape(n_out, n_in).T)

    def _error_of_experts(self, tensor_type: int, n: int) -> float:
        g, k = ggml(), self._kernels
        n_in, n_out, n_experts, n_used = products.N_INPUTS, products.N_OUTPUTS, products.N_EXPERTS, products.N_USED
        data, values = products.random_weights(tensor_type, n_experts * n_in * n_out)
        x, chosen = products.random_inputs((n, n_used, n_in)), products.chosen_experts()[:n]
        matrix_bytes = k.puna_packed_bytes(tensor_type, n_in, n_out)
        with ExitStack() as stack:
            stored, computed = stack.enter_context(products.described()), stack.enter_context(products.described())
            experts = k.puna_experts_new(tensor_type, -1, n_in, n_out, n_experts, 0)
            stack.callback(k.puna_experts_free, experts)
            weights = g.ggml_new_tensor_1d(stored, TYPE_I8, matrix_bytes * n_experts)
            inputs = g.ggml_new_tensor_3d(computed, TYPE_F32, n_in, n_used, n)
            ids = g.ggml_new_tensor_2d(computed, TYPE_I32, n_used, n)
            shape = (n_out, n_used, n)
            if n > 1:
                ordered_bytes = k.puna_ordered_bytes(experts, n_used * n)
                ordered = self._node(computed, "puna_order_node", TYPE_I8, (ordered_bytes,), [inputs, ids], experts)
                product = self._node(computed, "puna_experts_node", TYPE_F32, shape, [ordered, weights], experts)
            else:
                product = self._node(computed, "puna_token_experts_node", TYPE_F32, shape, [inputs, ids, weights], experts)
            self._allocate(stack, stored, computed)
            for i, matrix in enumerate(np.split(data, n_experts)):
                k.puna_pack(tensor_type, matrix.ctypes.data, n_in, 0, n_out, structs.data_of(weights) + i * matrix_bytes)
            found = self._computed(computed, {inputs: x, ids: chosen}, [product])
        if found is None:
            return math.inf
        matrices = values.reshape(n_experts, n_out, n_in).astype(np.float64)
        return _error(found[0], np.einsum("tuoi,tui->tuo", matrices[chosen], x))

    def _node(self, context: int, name: str, tensor_type: int, shape: tuple[int, ...], operands: list[int], data: int) -> int:
        lengths, address = (*shape, 1, 1, 1)[:4], self._kernels.nodes[name]
        pointers = structs.pointers(operands)
        return int(ggml().ggml_custom_4d(context, tensor_type, *lengths, pointers, len(operands), address, N_TASKS_MAX, data))

    def _allocate(self, stack: ExitStack, stored: int, computed: int) -> None:
        buffer = stack.enter_context(products.allocated(stored, self._cpu.plain))
        stack.enter_context(products.allocated(computed, self._cpu.plain))
        ggml().ggml_backend_buffer_set_usage(buffer, BUFFER_USAGE_WEIGHTS)

    def _computed(self, context: int, inputs: dict[int, NDArray[Any]], results: list[int]) -> list[products.Floats] | None:
        """The results' values, or None where the library could not compute them."""
        g = ggml()
        for tensor, values in inputs.items():
            g.ggml_backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)
        graph = g.ggml_new_graph_custom(context, 16, False)
        for tensor in results:
            g.ggml_build_forward_expand(graph, tensor)
        if g.ggml_backend_graph_compute(self._cpu.backend, graph) != STATUS_SUCCESS:
            return None
        found = [np.empty(structs.shape(tensor)[::-1], np.float32) for tensor in results]
        for tensor, values in zip(results, found, strict=True):
            g.ggml_backend_tensor_get(tensor, values.ctypes.data, 0, values.nbytes)
        return found


def _error(found: products.Floats, expected: NDArray[np.float64]) -> float:
    difference = found.reshape(expected.shape) - expected
    return float(np.sqrt((difference**2).sum() / (expected**2).sum()))
