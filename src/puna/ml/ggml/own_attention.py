"""Attention by Puna's own kernel: one node of ggml's graph for several ranges, which ggml's threads compute.

Keys and values of the second range and later ones are no operands of the node: they lie in the same memory as the first's,
so many bytes further on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from puna.ml.attention import Scoring
from puna.ml.ggml.attention import AtClose, Attended, joined
from puna.ml.ggml.tensor import GGMLTensor
from puna.ml.tensor import DType
from puna.native import structs
from puna.native.ggml import N_TASKS_MAX, TYPE_F32, ggml
from puna.native.kernels.library import ATTENTION, Kernels

# A node has ten operands: besides query, key, value and sinks as many masks.
MOST_RANGES = 6


class OwnAttention:
    """In place of ggml's, for the types of keys and values that the kernel reads."""

    def __init__(self, kernels: Kernels, allows: Callable[[str, str], bool]) -> None:
        self._kernels = kernels
        names = {DType.F32: "f32", DType.F16: "f16", DType.Q8_0: "q8_0", DType.Q4_0: "q4_0"}
        self._types = {int(t) for t, name in names.items() if kernels.puna_can_attend(int(t)) and allows(ATTENTION, name)}

    def takes(self, ranges: Sequence[Attended]) -> bool:
        return {structs.type_of(x.address) for to in ranges for x in (to.key, to.value)} <= self._types

    def turned(self, x: GGMLTensor, width: int) -> GGMLTensor:
        if x.strides[0] != 4 or structs.type_of(x.address) != TYPE_F32:
            x = x.cast(DType.F32).contiguous()
        operands, address = structs.pointers([x.address]), self._kernels.nodes["puna_turn_node"]
        return GGMLTensor(ggml().ggml_custom_4d(x.graph, TYPE_F32, *x.shape, operands, 1, address, N_TASKS_MAX, width), x.graph)

    def __call__(self, query: GGMLTensor, ranges: Sequence[Attended], scoring: Scoring, at_close: AtClose) -> GGMLTensor:
        """Of ranges that it takes; what lies turned meets turned queries and is turned back in the same node."""
        if query.strides[0] != 4 or structs.type_of(query.address) != TYPE_F32:
            query = query.cast(DType.F32).contiguous()
        parts = [ranges[i : i + MOST_RANGES] for i in range(0, len(ranges), MOST_RANGES)]
        return joined([self._node(query, part, scoring, at_close) for part in parts])

    def _node(self, query: GGMLTensor, ranges: Sequence[Attended], scoring: Scoring, at_close: AtClose) -> GGMLTensor:
        key, value = ranges[0].key, ranges[0].value
        n_heads, n_key_heads, width = query.shape[1], key.shape[2], value.shape[0]
        begin = ranges[0].begin
        numbers: list[int] = []
        for to in ranges:
            places = [n for x, first in ((to.key, key), (to.value, value)) for n in (_distance(x, first), x.strides[3])]
            numbers += [to.begin - begin, to.n_rows, to.n_sequences, to.key.shape[1], *places]
        n = numbers[-8] + numbers[-7] * numbers[-6]
        if begin or n < query.shape[2]:
            query = query.view((query.shape[0], n_heads, n), query.strides[1:3], begin * query.strides[2])
        sinks = [] if scoring.sinks is None else [scoring.sinks]
        described = np.array(numbers, np.int64)
        k = self._kernels
        attention = k.puna_attention_new(
            *(n_heads, n_key_heads, key.shape[0], width, len(ranges), described.ctypes.data),
            *(bool(sinks), scoring.scale, scoring.softcap, scoring.max_bias, scoring.key_turn, scoring.value_turn),
        )
        at_close(lambda: k.puna_attention_free(attention))
        operands: list[GGMLTensor | None] = [query, key, value, *(to.mask for to in ranges), *sinks]  # type: ignore[list-item]
        addresses = structs.pointers([x.address if x else None for x in operands])
        shape = k.puna_attention_floats(attention), 1, 1, 1
        node = ggml().ggml_custom_4d(
            query.graph, TYPE_F32, *shape, addresses, len(operands), k.nodes["puna_attention_node"], N_TASKS_MAX, attention
        )
        return GGMLTensor(node, query.graph).view((width * n_heads, n), (4 * width * n_heads,), 0)


def _distance(tensor: GGMLTensor, other: GGMLTensor) -> int:
    """Bytes from one part of a tensor to another part of the same."""
    (source, offset), (of_other, begin) = structs.place_of(tensor.address), structs.place_of(other.address)
    if source != of_other:
        raise ValueError("ranges of keys or values that lie in different tensors")
    return offset - begin
