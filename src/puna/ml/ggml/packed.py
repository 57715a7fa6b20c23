"""Quantised matrices in the order of Puna's own products, and those products as nodes of ggml's graphs.

The one place that decides which weights are multiplied by ``puna.native.kernels`` instead of by ggml. A packed matrix is
bytes to ggml; it is multiplied by nodes of its own kind, which ggml's threads compute. Models see no difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from puna.gguf.reader import TensorInfo
from puna.ml.backend import Use
from puna.ml.ggml.devices import BufferType, cpu
from puna.ml.ggml.packed_linear import GATES, MOST_MATRICES, STRIPE, Ask, Linears, PackedProduct, normalised
from puna.ml.ggml.tensor import GGMLTensor
from puna.ml.tensor import DType, Gate
from puna.native import structs
from puna.native.ggml import N_TASKS_MAX, TYPE_F32, TYPE_I8, ggml
from puna.native.kernels.library import PLACE, Kernels
from puna.native.pages import zero_pages


class Packer:
    """What is packed, how, and into which memory: the CPU's own, under another name."""

    def __init__(self, kernels: Kernels, allows: Callable[[str, str], bool], *, has_adapters: bool = False) -> None:
        self._kernels = kernels
        self._allows = allows
        self.buffer_type = BufferType(cpu().plain.address, PLACE, is_host=True)
        self.roundings = Roundings(kernels)
        self.linears = Linears(kernels, self.roundings.node, rounds_gates=not has_adapters)  # which multiply what is gated, too
        self.n_matrices = 0

    def takes(self, info: TensorInfo, use: Use, *, is_tied: bool) -> bool:
        """A table of rows only where it is a matrix as well: otherwise few of its rows are ever read from the file."""
        if use not in (Use.MATRIX, Use.EXPERTS) and not (use is Use.ROWS and is_tied):
            return False
        n_axes = 3 if use is Use.EXPERTS else 2
        return len(info.shape) == n_axes and self.n_bytes(info) > 0 and self._allows(PLACE, info.type.ggml_name)

    def n_bytes(self, info: TensorInfo) -> int:
        n_in, n_rows, *n_experts = info.shape
        return int(self._kernels.puna_packed_bytes(int(info.type), n_in, n_rows)) * math.prod(n_experts)

    def describe(self, context: int, info: TensorInfo) -> int:
        """The tensor that holds the packed matrix."""
        return int(ggml().ggml_new_tensor_1d(context, TYPE_I8, self.n_bytes(info)))

    @property
    def instructions(self) -> str:
        return self._kernels.instructions

    @property
    def max_nodes(self) -> int:
        """How many nodes this can add to a graph that uses every weight once."""
        return 4 * self.n_matrices  # an input rounded, a product, and the products that take its place with what is added

    def pack(self, source: int, parts: Sequence[TensorInfo], target: int) -> None:
        """Rows of the file that begins at *source* into the tensor *target*, those of all parts one after another.

        Of several experts those of the first, of all parts, come before those of the second.
        """
        kind, n_in = int(parts[0].type), parts[0].shape[0]
        n_experts = math.prod(parts[0].shape[2:])
        all_rows = sum(part.shape[1] for part in parts)
        matrix_bytes = self._kernels.puna_packed_bytes(kind, n_in, all_rows)
        for expert in range(n_experts):
            first, packed = 0, structs.data_of(target) + expert * matrix_bytes
            for part in parts:
                rows = source + part.offset + expert * (part.n_bytes // n_experts)
                self._kernels.puna_pack(kind, rows, n_in, first, part.shape[1], packed)
                first += part.shape[1]

    def is_of(self, source: int, parts: Sequence[TensorInfo], packed: int) -> bool:
        """Whether the matrix packed at this address has the rows of the file that begins at *source*; a few are compared."""
        kind, n_in = int(parts[0].type), parts[0].shape[0]
        n_experts, all_rows, first = math.prod(parts[0].shape[2:]), sum(part.shape[1] for part in parts), 0
        matrix_bytes = self._kernels.puna_packed_bytes(kind, n_in, all_rows)
        stripe = np.frombuffer(zero_pages(self._kernels.puna_packed_bytes(kind, n_in, 1)), np.uint8)
        expected, found = np.empty(n_in, np.float32), np.empty(n_in, np.float32)
        for part in parts:
            row_bytes = part.n_bytes // (part.shape[1] * n_experts)
            for expert, row in ((0, 0), (n_experts - 1, part.shape[1] - 1)):
                at = source + part.offset + (expert * part.shape[1] + row) * row_bytes
                self._kernels.puna_pack(kind, at, n_in, 0, 1, stripe.ctypes.data)
                self._kernels.puna_unpack(kind, stripe.ctypes.data, n_in, 0, expected.ctypes.data)
                self._kernels.puna_unpack(kind, packed + expert * matrix_bytes, n_in, first + row, found.ctypes.data)
                if found.tobytes() != expected.tobytes():  # also where they are no numbers
                    return False
            first += part.shape[1]
        return True

    def matrix(self, address: int, info: TensorInfo) -> PackedMatrix | PackedExperts:
        self.n_matrices += 1
        return PackedExperts(address, info, self._kernels, self.roundings) if len(info.shape) > 2 else self._matrix(address, info)

    def _matrix(self, address: int, info: TensorInfo) -> PackedMatrix:
        return PackedMatrix(address, info, self._kernels, self.linears)

    def free(self) -> None:
        """When no graph will be computed any more."""
        self.roundings.free()
        self.linears.free()


class Roundings:
    """Activations rounded once for all matrices that multiply them, in each graph."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._of: dict[int, dict[tuple[int, ...], int]] = {}  # by graph; by tensor and kind, or what they are ordered by
        self._normalisers: dict[tuple[int, float], int] = {}

    def begin(self, graph: int) -> None:
        """A new graph: those at the same address before it are gone."""
        self._of[graph] = {}

    def node(self, x: GGMLTensor, kind: int) -> int:
        known = self._of.setdefault(x.graph, {})
        key = (x.address, kind)
        if key not in known:
            gated = x.rounded(kind) if isinstance(x, PackedProduct) else None
            known[key] = self._rounded(x, kind) if gated is None else gated
        return known[key]

    def _rounded(self, x: GGMLTensor, kind: int) -> int:
        n_bytes, norm = self._kernels.puna_rounded_bytes(kind, x.shape[0], math.prod(x.shape[1:])), normalised(x)
        if norm is None:
            return self._new("puna_round_node", x.graph, [x.address], n_bytes, kind)
        operands = [norm.source.address, norm.weight.address]
        return self._new("puna_normalise_node", x.graph, operands, n_bytes, self._normaliser(kind, norm.eps))

    def _normaliser(self, kind: int, eps: float) -> int:
        if (kind, eps) not in self._normalisers:
            self._normalisers[kind, eps] = self._kernels.puna_normaliser_new(kind, eps)
        return self._normalisers[kind, eps]

    def free(self) -> None:
        """When no graph with such a node will be computed any more."""
        for native in self._normalisers.values():
            self._kernels.puna_normaliser_free(native)
        self._normalisers.clear()

    def ordered(self, x: GGMLTensor, experts: GGMLTensor, matrices: PackedExperts) -> int:
        """Brought together by expert as well; experts I32 [n_used, n]."""
        known = self._of.setdefault(x.graph, {})
        n_experts = matrices.shape[2]
        key = (x.address, matrices.rounding, experts.address, n_experts)
        if key not in known:
            n_bytes = self._kernels.puna_ordered_bytes(matrices.native, math.prod(experts.shape))
            known[key] = self._new("puna_order_node", x.graph, [x.address, experts.address], n_bytes, matrices.native)
        return known[key]

    def _new(self, name: str, graph: int, inputs: Sequence[int], n_bytes: int, data: int) -> int:
        function, operands = self._kernels.nodes[name], structs.pointers(inputs)
        return int(ggml().ggml_custom_4d(graph, TYPE_I8, n_bytes, 1, 1, 1, operands, len(inputs), function, N_TASKS_MAX, data))


class PackedMatrix(GGMLTensor):
    """As a weight to multiply with, and as a table of rows."""

    __slots__ = ("_kernels", "_linears", "_matrix", "_shape", "rounding", "tensor_type")

    def __init__(self, address: int, info: TensorInfo, kernels: Kernels, linears: Linears) -> None:
        super().__init__(address)
        n_in, n_rows = info.shape
        self._shape = (n_in, n_rows, 1, 1)
        self._kernels = kernels
        self._linears = linears
        self.tensor_type = int(info.type)
        self.rounding = int(kernels.puna_rounding(self.tensor_type))
        self._matrix = int(kernels.puna_matrix_new(self.tensor_type, n_in, n_rows))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self._shape

    def mul_mat(self, x: GGMLTensor) -> GGMLTensor:
        return PackedProduct(self._linears, Ask(_columns_of_floats(x), [self]))

    def multiply(self, x: GGMLTensor, weights: Sequence[GGMLTensor], *, is_precise: bool = False) -> list[GGMLTensor]:
        packed = [weight for weight in weights if isinstance(weight, PackedMatrix)]
        if not 1 < len(packed) == len(weights) <= MOST_MATRICES:
            return super().multiply(x, weights, is_precise=is_precise)
        ask = Ask(_columns_of_floats(x), packed)
        whole = GGMLTensor(self._linears.node(ask), x.graph)
        lengths, strides, begin = whole.shape[1:], whole.strides[1:], 0
        parts: list[GGMLTensor] = []
        for n_rows in ask.rows:
            parts.append(whole.view((n_rows, *lengths), strides, 4 * begin))
            begin += n_rows
        return parts

    def multiply_gated(self, x: GGMLTensor, weights: Sequence[GGMLTensor], gate: Gate) -> GGMLTensor:
        packed = [weight for weight in weights if isinstance(weight, PackedMatrix)]
        ask = Ask(x, packed, gate)
        if len(packed) < len(weights) or not ask.can_be_gated:
            return super().multiply_gated(x, weights, gate)
        return PackedProduct(self._linears, replace(ask, x=_columns_of_floats(x)))

    def rows(self, indices: GGMLTensor) -> GGMLTensor:
        n, *others = indices.shape
        if others != [1, 1, 1]:
            raise ValueError(f"rows of a packed matrix, named by {list(indices.shape)} indices")
        operands, address = structs.pointers([indices.address, self.address]), self._kernels.nodes["puna_rows_node"]
        shape = (self._shape[0], n, 1, 1)
        node = ggml().ggml_custom_4d(indices.graph, TYPE_F32, *shape, operands, 2, address, N_TASKS_MAX, self._matrix)
        return GGMLTensor(node, indices.graph)

    def free(self) -> None:
        """When no graph that multiplies it will be computed any more."""
        self._kernels.puna_matrix_free(self._matrix)


class PackedExperts(GGMLTensor):
    """Many matrices of one shape, as receiver of mul_mat_id and of nothing else."""

    __slots__ = ("_gated", "_kernels", "_roundings", "_shape", "native", "rounding", "tensor_type")

    def __init__(self, address: int, info: TensorInfo, kernels: Kernels, roundings: Roundings) -> None:
        super().__init__(address)
        n_in, n_rows, n_experts = info.shape
        self._shape = (n_in, n_rows, n_experts, 1)
        self._kernels = kernels
        self._roundings = roundings
        self.tensor_type = int(info.type)
        self.rounding = int(kernels.puna_rounding(self.tensor_type))
        self.native = int(kernels.puna_experts_new(self.tensor_type, -1, n_in, n_rows, n_experts, 0))
        self._gated: dict[tuple[int, Gate], int] = {}  # by the type of up and the gate

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self._shape

    def mul_mat_id(self, x: GGMLTensor, experts: GGMLTensor) -> GGMLTensor:
        return self._node(x, [self], experts, self._shape[1], self.native)

    def multiply_gated_by_expert(
        self, x: GGMLTensor, weights: Sequence[GGMLTensor], experts: GGMLTensor, gate: Gate
    ) -> GGMLTensor:
        """In one node where both are packed and rounded alike; both halves of one stack must begin with a stripe."""
        packed = [weight for weight in weights if isinstance(weight, PackedExperts) and weight.rounding == self.rounding]
        fits = self._shape[1] % (2 * STRIPE) == 0 if len(weights) == 1 else weights[-1].shape == self._shape
        if len(packed) < len(weights) or not fits:
            return super().multiply_gated_by_expert(x, weights, experts, gate)
        up_type, n_rows = (-1, self._shape[1] // 2) if len(packed) == 1 else (packed[1].tensor_type, self._shape[1])
        if (up_type, gate) not in self._gated:
            n_in, _, n_experts, _ = self._shape
            native = self._kernels.puna_experts_new(self.tensor_type, up_type, n_in, n_rows, n_experts, GATES[gate])
            self._gated[up_type, gate] = int(native)
        return self._node(x, [packed[0], packed[-1]], experts, n_rows, self._gated[up_type, gate])

    def _node(self, x: GGMLTensor, weights: Sequence[GGMLTensor], experts: GGMLTensor, n_rows: int, native: int) -> GGMLTensor:
        x = _columns_of_floats(x)
        n_used, n, *_ = experts.shape
        if n == 1:
            function, operands = "puna_token_experts_node", [x.address, experts.address]
        else:
            function, operands = "puna_experts_node", [self._roundings.ordered(x, experts, self)]
        operands += [weight.address for weight in weights]
        pointers, address = structs.pointers(operands), self._kernels.nodes[function]
        shape = (n_rows, n_used, n, 1)
        node = ggml().ggml_custom_4d(x.graph, TYPE_F32, *shape, pointers, len(operands), address, N_TASKS_MAX, native)
        return GGMLTensor(node, x.graph)

    def free(self) -> None:
        """When no graph that multiplies it will be computed any more."""
        for native in (self.native, *self._gated.values()):
            self._kernels.puna_experts_free(native)


def _columns_of_floats(x: GGMLTensor) -> GGMLTensor:
    """With the values of a column next to each other."""
    if structs.type_of(x.address) != TYPE_F32:
        x = x.cast(DType.F32)
    return x if x.strides[0] == 4 else x.contiguous()
