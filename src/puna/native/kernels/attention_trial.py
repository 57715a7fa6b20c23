"""Puna's own attention for the self-test: small, computed as a node of a graph by ggml's threads."""

from __future__ import annotations

import ctypes
import math
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from puna.native import products, structs
from puna.native.ggml import N_TASKS_MAX, STATUS_SUCCESS, TYPE_F16, TYPE_F32, ggml
from puna.native.kernels.library import Kernels

WIDTH, N_HEADS, N_KEY_HEADS, N_CELLS = 64, 4, 2, 320


class OwnAttention:
    """As if what keys and values are held as were a type of weights, and rows of queries columns."""

    def __init__(self, cpu: products.Cpu, kernels: Kernels) -> None:
        self._cpu = cpu
        self._kernels = kernels

    def supports(self, _buffer_type: int, tensor_type: int, *, experts: bool) -> bool:
        return not experts and bool(self._kernels.puna_can_attend(tensor_type))

    def error(self, _buffer_type: int, tensor_type: int, n_columns: int | None) -> float:
        """Normalised error of what so many rows see; each sees one cell more than the row before."""
        g, k, n = ggml(), self._kernels, n_columns or 1
        data, flat = products.random_weights(tensor_type, N_CELLS * N_KEY_HEADS * WIDTH)
        held = flat.reshape(N_CELLS, N_KEY_HEADS, WIDTH)
        query = products.random_inputs((n, N_HEADS, WIDTH))
        seen = np.arange(N_CELLS) <= N_CELLS - n + np.arange(n)[:, None] - 2
        mask = np.where(seen, np.float16(0), np.float16(-np.inf))
        ranges = (ctypes.c_int64 * 8)(0, n, 1, N_CELLS, 0, 0, 0, 0)
        with ExitStack() as stack:
            computed = stack.enter_context(products.described())
            shape = N_HEADS, N_KEY_HEADS, WIDTH, WIDTH, 1
            attention = k.puna_attention_new(*shape, ctypes.addressof(ranges), False, 1 / WIDTH, 0.0, 0.0, 0, 0)
            stack.callback(k.puna_attention_free, attention)
            queries = g.ggml_new_tensor_3d(computed, TYPE_F32, WIDTH, N_HEADS, n)
            cells = g.ggml_new_tensor_2d(computed, tensor_type, WIDTH * N_KEY_HEADS, N_CELLS)
            masks = g.ggml_new_tensor_4d(computed, TYPE_F16, N_CELLS, n, 1, 1)
            _, cell_bytes, _, _ = structs.strides(cells)
            heads = g.ggml_view_3d(computed, cells, WIDTH, N_CELLS, N_KEY_HEADS, cell_bytes, cell_bytes // N_KEY_HEADS, 0)
            operands = structs.pointers([queries, heads, heads, masks])
            n_floats, address = k.puna_attention_floats(attention), k.nodes["puna_attention_node"]
            node = g.ggml_custom_4d(computed, TYPE_F32, n_floats, 1, 1, 1, operands, 4, address, N_TASKS_MAX, attention)
            stack.enter_context(products.allocated(computed, self._cpu.plain))
            for tensor, values in ((queries, query), (cells, data), (masks, mask)):
                g.ggml_backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)
            graph = g.ggml_new_graph_custom(computed, 16, False)
            g.ggml_build_forward_expand(graph, node)
            if g.ggml_backend_graph_compute(self._cpu.backend, graph) != STATUS_SUCCESS:
                return math.inf
            found = np.empty((n, N_HEADS, WIDTH), np.float32)
            g.ggml_backend_tensor_get(node, found.ctypes.data, 0, found.nbytes)
        difference = found - _expected(query, held, seen)
        return float(np.sqrt((difference**2).sum() / (_expected(query, held, seen) ** 2).sum()))


def _expected(query: products.Floats, held: products.Floats, seen: NDArray[np.bool_]) -> NDArray[np.float64]:
    cells = np.repeat(held.astype(np.float64), N_HEADS // N_KEY_HEADS, axis=1)
    scores = np.where(seen, np.einsum("nhd,mhd->hnm", query.astype(np.float64), cells) / WIDTH, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed: NDArray[np.float64] = np.einsum("hnm,mhd->nhd", weights / weights.sum(-1, keepdims=True), cells)
    return mixed
