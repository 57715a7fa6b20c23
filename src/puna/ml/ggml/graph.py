"""One graph: built node by node, given memory once, computed many times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from puna.errors import OutOfMemory, PunaError
from puna.ml.attention import Scoring
from puna.ml.ggml.attention import Attended, Attention, fused
from puna.ml.ggml.own_attention import OwnAttention
from puna.ml.ggml.tensor import GGMLTensor
from puna.ml.tensor import DType
from puna.ml.turning import hadamard
from puna.native import arrays, structs
from puna.native.ggml import STATUS_ABORTED, STATUS_SUCCESS, ggml


class GGMLContext:
    """Describes up to max_nodes tensors in *arena*, which the backend lends until close.

    Tensors given to it are GGMLTensors of the same backend; the protocol it fills cannot say so.
    """

    def __init__(
        self,
        scheduler: int,
        max_nodes: int,
        arena: npt.NDArray[np.uint8],
        attend: Attention = fused,
        own_attention: OwnAttention | None = None,
    ) -> None:
        self._attend = attend
        self._own_attention = own_attention
        self._turns: dict[int, GGMLTensor] = {}  # matrices by width, set before every compute
        self.scheduler = scheduler
        self._arena = arena
        self.address = structs.new_context(arena.size, arena.ctypes.data)
        self._graph = ggml().ggml_new_graph_custom(self.address, max_nodes, False)
        self._is_allocated = False
        self._n_bytes: dict[int, int] = {}  # of each input
        self._on_host: dict[int, memoryview] = {}  # inputs that can be written where they are; once they have memory
        self._values: dict[int, npt.NDArray[np.float32]] = {}
        self._at_close: list[Callable[[], object]] = []

    @staticmethod
    def arena_bytes(max_nodes: int) -> int:
        g = ggml()
        return int(max_nodes * g.ggml_tensor_overhead() + g.ggml_graph_overhead_custom(max_nodes, False))

    def input(self, dtype: DType, *shape: int) -> GGMLTensor:
        g = ggml()
        new = (g.ggml_new_tensor_1d, g.ggml_new_tensor_2d, g.ggml_new_tensor_3d, g.ggml_new_tensor_4d)[len(shape) - 1]
        node = new(self.address, int(dtype), *shape)
        g.ggml_set_input(node)
        self._n_bytes[node] = g.ggml_nbytes(node)
        return GGMLTensor(node, self.address)

    def use(self, tensor: Any) -> GGMLTensor:
        return GGMLTensor(tensor.address, self.address)

    def forward(self, tensor: Any) -> None:
        ggml().ggml_build_forward_expand(self._graph, tensor.address)

    def attention(self, query: Any, ranges: Sequence[Attended], scoring: Scoring) -> GGMLTensor:
        own = self._own_attention
        if own and own.takes(ranges):
            return own(query, ranges, scoring, self._at_close.append)
        if scoring.key_turn:
            query = self.turn(query, scoring.key_turn)
        mixed = self._attend(query, ranges, scoring, self._at_close.append)
        return self.turn(mixed, scoring.value_turn) if scoring.value_turn else mixed

    def turn(self, x: Any, width: int) -> GGMLTensor:
        if self._own_attention:
            return self._own_attention.turned(x, width)
        if width not in self._turns:
            self._turns[width] = self.input(DType.F32, width, width)
        n_in, *others = x.shape
        pieces = x.contiguous().reshape(width, n_in // width * math.prod(others))
        return self._turns[width].mul_mat(pieces).reshape(n_in, *others)

    def output(self, tensor: Any) -> None:
        ggml().ggml_set_output(tensor.address)
        self.forward(tensor)

    def reserve(self) -> None:
        if not ggml().ggml_backend_sched_reserve(self.scheduler, self._graph):
            raise OutOfMemory("no memory for the working buffers of the largest batch")

    def set(self, tensor: Any, values: npt.NDArray[Any]) -> None:
        """values: C-contiguous, of the tensor's type; the same number of bytes."""
        self.allocate()
        address = tensor.address
        expected = self._n_bytes[address]
        if values.nbytes != expected or not values.flags.c_contiguous:
            raise ValueError(f"an input of {expected} bytes was given {values.nbytes}")
        memory = self._on_host.get(address)
        if memory is not None:
            memory[:] = values.data.cast("B")
        else:
            ggml().ggml_backend_tensor_set(address, values.ctypes.data, 0, expected)

    def memory(self, tensor: Any) -> memoryview | None:
        self.allocate()
        return self._on_host.get(tensor.address)

    def allocate(self) -> None:
        if self._is_allocated:
            return
        ggml().ggml_backend_sched_reset(self.scheduler)
        if not ggml().ggml_backend_sched_alloc_graph(self.scheduler, self._graph):
            raise OutOfMemory("no memory for the working buffers of this batch")
        self._is_allocated = True
        for address, n_bytes in self._n_bytes.items():
            if structs.is_on_host(address):
                self._on_host[address] = structs.memory(address, n_bytes)

    def compute(self) -> bool:
        self.allocate()
        for width, matrix in self._turns.items():
            self.set(matrix, hadamard(width))
        status = ggml().ggml_backend_sched_graph_compute(self.scheduler, self._graph)
        if status == STATUS_ABORTED:
            return False
        if status != STATUS_SUCCESS:
            raise PunaError(f"the tensor library could not compute this batch (status {status})")
        return True

    def get(self, tensor: Any, out: npt.NDArray[np.float32]) -> None:
        ggml().ggml_backend_tensor_get(tensor.address, out.ctypes.data, 0, out.nbytes)

    def values(self, tensor: Any) -> npt.NDArray[np.float32]:
        known = self._values.get(tensor.address)
        if known is not None:
            return known
        width, n, _, _ = tensor.shape
        if structs.is_on_host(tensor.address):
            values = self._values[tensor.address] = arrays.floats(tensor.address, n, width)
            return values
        out = np.empty((n, width), np.float32)
        self.get(tensor, out)
        return out

    @property
    def n_nodes(self) -> int:
        return int(ggml().ggml_graph_n_nodes(self._graph))

    @property
    def graph(self) -> int:
        return int(self._graph)

    def close(self) -> None:
        if self.address:
            ggml().ggml_free(self.address)
            self.address = 0
            while self._at_close:
                self._at_close.pop()()
