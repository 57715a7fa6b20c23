"""Quantised matrices in the order of Puna's own products, and those products as nodes of ggml's graphs.

The one place that decides which weights are multiplied by ``puna.native.kernels`` instead of by ggml. A packed matrix is
bytes to ggml; it is multiplied by nodes of its own kind, which ggml's threads compute. Models see no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from puna.gguf.reader import TensorInfo
from puna.ml.backend import Use
from puna.ml.ggml.devices import BufferType, cpu
from puna.ml.ggml.tensor import GGMLTensor
from puna.ml.tensor import DType
from puna.native import structs
from puna.native.ggml import N_TASKS_MAX, TYPE_F32, TYPE_I8, ggml
from puna.native.kernels.library import PLACE, Kernels


class Packer:
    """What is packed, how, and into which memory: the CPU's own, under another name."""

    def __init__(self, kernels: Kernels, allows: Callable[[str, str], bool]) -> None:
        self._kernels = kernels
        self._allows = allows
        self.buffer_type = BufferType(cpu().plain.address, PLACE, is_host=True)
        self.roundings = Roundings(kernels)
        self.n_matrices = 0

    def takes(self, info: TensorInfo, use: Use, *, is_tied: bool) -> bool:
        """A table of rows only where it is a matrix as well: otherwise few of its rows are ever read from the file."""
        if use is not Use.MATRIX and not (use is Use.ROWS and is_tied):
            return False
        return len(info.shape) == 2 and self.n_bytes(info) > 0 and self._allows(PLACE, info.type.ggml_name)

    def n_bytes(self, info: TensorInfo) -> int:
        return int(self._kernels.puna_packed_bytes(int(info.type), *info.shape))

    def describe(self, context: int, info: TensorInfo) -> int:
        """The tensor that holds the packed matrix."""
        return int(ggml().ggml_new_tensor_1d(context, TYPE_I8, self.n_bytes(info)))

    @property
    def instructions(self) -> str:
        return self._kernels.instructions

    @property
    def max_nodes(self) -> int:
        """How many nodes this can add to a graph that uses every weight once."""
        return 2 * self.n_matrices

    def pack(self, source: int, parts: Sequence[TensorInfo], target: int) -> None:
        """Rows of the file that begins at *source* into the tensor *target*, those of all parts one after another."""
        first, packed = 0, structs.data_of(target)
        for part in parts:
            n_in, n_rows = part.shape
            self._kernels.puna_pack(int(part.type), source + part.offset, n_in, first, n_rows, packed)
            first += n_rows

    def matrix(self, address: int, info: TensorInfo) -> PackedMatrix:
        self.n_matrices += 1
        return PackedMatrix(address, info, self._kernels, self.roundings)


class Roundings:
    """Activations rounded once for all matrices that multiply them, in each graph."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._of: dict[int, dict[tuple[int, int], int]] = {}  # by graph; by tensor and kind

    def begin(self, graph: int) -> None:
        """A new graph: those at the same address before it are gone."""
        self._of[graph] = {}

    def node(self, x: GGMLTensor, kind: int) -> int:
        known = self._of.setdefault(x.graph, {})
        if (x.address, kind) not in known:
            known[x.address, kind] = self._new(x, kind)
        return known[x.address, kind]

    def _new(self, x: GGMLTensor, kind: int) -> int:
        n_in, *lengths = x.shape
        n_bytes = self._kernels.puna_rounded_bytes(kind, n_in, lengths[0] * lengths[1] * lengths[2])
        function = self._kernels.nodes["puna_round_node"]
        operands = structs.pointers([x.address])
        return int(ggml().ggml_custom_4d(x.graph, TYPE_I8, n_bytes, 1, 1, 1, operands, 1, function, N_TASKS_MAX, kind))


class PackedMatrix(GGMLTensor):
    """As receiver of mul_mat and rows, and of nothing else."""

    __slots__ = ("_kernels", "_matrix", "_rounding", "_roundings", "_shape")

    def __init__(self, address: int, info: TensorInfo, kernels: Kernels, roundings: Roundings) -> None:
        super().__init__(address)
        n_in, n_rows = info.shape
        self._shape = (n_in, n_rows, 1, 1)
        self._kernels = kernels
        self._roundings = roundings
        self._rounding = int(kernels.puna_rounding(int(info.type)))
        self._matrix = int(kernels.puna_matrix_new(int(info.type), n_in, n_rows))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self._shape

    def mul_mat(self, x: GGMLTensor) -> GGMLTensor:
        if structs.type_of(x.address) != TYPE_F32:
            x = x.cast(DType.F32)
        if x.strides[0] != 4:
            x = x.contiguous()
        if x.shape[1:] == (1, 1, 1):
            return self._node("puna_column_product_node", x.graph, x.address, (self._shape[1], 1, 1, 1))
        rounded = self._roundings.node(x, self._rounding)
        return self._node("puna_product_node", x.graph, rounded, (self._shape[1], *x.shape[1:]))

    def rows(self, indices: GGMLTensor) -> GGMLTensor:
        n, *others = indices.shape
        if others != [1, 1, 1]:
            raise ValueError(f"rows of a packed matrix, named by {list(indices.shape)} indices")
        return self._node("puna_rows_node", indices.graph, indices.address, (self._shape[0], n, 1, 1))

    def _node(self, function: str, graph: int, operand: int, shape: tuple[int, ...]) -> GGMLTensor:
        operands = structs.pointers([operand, self.address])
        address = self._kernels.nodes[function]
        node = ggml().ggml_custom_4d(graph, TYPE_F32, *shape, operands, 2, address, N_TASKS_MAX, self._matrix)
        return GGMLTensor(node, graph)

    def free(self) -> None:
        """When no graph that multiplies it will be computed any more."""
        self._kernels.puna_matrix_free(self._matrix)
