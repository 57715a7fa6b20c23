"""Products of packed matrices as single nodes: of several matrices with one input, the norm before and the sums after included.

A norm is done by what multiplies: the tensor that stands for it (Normalised) is then asked for by nobody and not computed.
What is added to a product is done by a node that takes the product's place, in the same way, and so is the rounding of what is
gated for the product that comes next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from puna.ml.ggml.tensor import GGMLTensor, Normalised
from puna.ml.tensor import Gate
from puna.native import structs
from puna.native.ggml import N_TASKS_MAX, TYPE_F32, TYPE_I8, ggml
from puna.native.kernels.library import Kernels

MOST_MATRICES = 4  # of one node
_MOST_ADDENDS = 2
GATES = {None: 0, Gate.SILU: 1, Gate.GELU: 2}  # the numbers of the kernels
STRIPE = 16  # rows that lie together


class Packed(Protocol):
    """A packed matrix [n_in, n_rows]."""

    address: int
    tensor_type: int
    rounding: int  # of what it multiplies

    @property
    def shape(self) -> tuple[int, int, int, int]: ...


Rounded = Callable[[GGMLTensor, int], int]  # the node with a tensor's values rounded in this way


def normalised(x: GGMLTensor) -> Normalised | None:
    """X as a norm that the kernels can do themselves."""
    if not isinstance(x, Normalised) or x.weight.shape != (x.source.shape[0], 1, 1, 1):
        return None
    is_plain = structs.type_of(x.source.address) == structs.type_of(x.weight.address) == TYPE_F32 and x.source.strides[0] == 4
    return x if is_plain else None


@dataclass(frozen=True)
class Ask:
    """What one node computes."""

    x: GGMLTensor
    weights: Sequence[Packed]
    gate: Gate | None = None
    addends: tuple[GGMLTensor, ...] = ()
    output: int = -1  # the rounding of what is gated; negative: it stays as it is

    @property
    def n_columns(self) -> int:
        return math.prod(self.x.shape[1:])

    @property
    def rows(self) -> list[int]:
        """How many each matrix gives; one that holds gate and up counts as both."""
        rows = [weight.shape[1] for weight in self.weights]
        return [rows[0] // 2] * 2 if self.gate and len(rows) == 1 else rows

    @property
    def can_be_gated(self) -> bool:
        """Both halves of one matrix must begin with a stripe; two matrices are as long as each other."""
        rows = self.rows
        return len(rows) == 2 and rows[0] == rows[1] and (len(self.weights) == 2 or rows[0] % STRIPE == 0)


class Linears:
    """The nodes, and what the kernels are told of each kind of them."""

    def __init__(self, kernels: Kernels, rounded: Rounded, *, rounds_gates: bool) -> None:
        """*rounds_gates*: what is gated is asked for by products alone, and need not be there unrounded."""
        self._kernels = kernels
        self._rounds_gates = rounds_gates
        self._rounded = rounded
        self._natives: dict[tuple[object, ...], int] = {}

    def node(self, ask: Ask) -> int:
        weights = list(ask.weights) * (len(ask.rows) // len(ask.weights))
        norm = normalised(ask.x) if ask.n_columns == 1 else None
        native = self._native(weights, ask, norm.eps if norm else -1.0)
        if ask.n_columns > 1:
            function = "puna_linear_node"
            kinds = dict.fromkeys(weight.rounding for weight in weights)
            operands = [self._rounded(ask.x, kind) for kind in kinds]
        else:
            function = "puna_column_linear_node"
            operands = [norm.source.address, norm.weight.address] if norm else [ask.x.address]
        operands += [weight.address for weight in weights] + [addend.address for addend in ask.addends]
        n_rows = ask.rows[0] if ask.gate else sum(ask.rows)
        pointers, address = structs.pointers(operands), self._kernels.nodes[function]
        kind, lengths = TYPE_F32, (n_rows, *ask.x.shape[1:])
        if ask.output >= 0:
            n_bytes = self._kernels.puna_rounded_bytes(ask.output, n_rows, ask.n_columns)
            kind, lengths = TYPE_I8, (-(-n_bytes // ask.n_columns), ask.n_columns, 1, 1)
        return int(ggml().ggml_custom_4d(ask.x.graph, kind, *lengths, pointers, len(operands), address, N_TASKS_MAX, native))

    def rounded(self, ask: Ask, kind: int) -> int | None:
        """A node with what is gated rounded for the next product; None where that is another node's work."""
        if not self._rounds_gates or ask.gate is None or ask.addends or ask.n_columns == 1:
            return None
        return self.node(replace(ask, output=kind))

    def _native(self, weights: Sequence[Packed], ask: Ask, eps: float) -> int:
        """Kept until the end: nodes of the same kind share it, as they are computed one after another."""
        types, n_in = [weight.tensor_type for weight in weights], weights[0].shape[0]
        key = (*types, *ask.rows, n_in, ask.gate, eps, ask.output)
        if key not in self._natives:
            self._natives[key] = self._kernels.linear(types, ask.rows, n_in, GATES[ask.gate], eps, ask.output)
        return self._natives[key]

    def free(self) -> None:
        """When no graph with such a node will be computed any more."""
        for native in self._natives.values():
            self._kernels.puna_linear_free(native)
        self._natives.clear()


class PackedProduct(GGMLTensor):
    """A product that takes in what is added to it."""

    __slots__ = ("_ask", "_linears")

    def __init__(self, linears: Linears, ask: Ask) -> None:
        super().__init__(linears.node(ask), ask.x.graph)
        self._linears = linears
        self._ask = ask

    def rounded(self, kind: int) -> int | None:
        """A node with it rounded, which takes its place."""
        return self._linears.rounded(self._ask, kind)

    def __add__(self, other: GGMLTensor) -> GGMLTensor:
        ask = self._ask
        is_plain = structs.type_of(other.address) == TYPE_F32 and other.strides[0] == 4
        shape = self.shape
        fits = other.shape in (shape, (shape[0], 1, 1, 1)) and shape[2:] == (1, 1)
        if not (is_plain and fits) or len(ask.addends) == _MOST_ADDENDS:
            return super().__add__(other)
        return PackedProduct(self._linears, replace(ask, addends=(*ask.addends, other)))

    __radd__ = __add__
