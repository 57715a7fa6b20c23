"""A handle on a ggml_tensor: its address, and the graph that new nodes go to."""

from __future__ import annotations

from collections.abc import Sequence

from puna.ml.tensor import DType, Gate, RopeOptions, SectionOrder
from puna.native import structs
from puna.native.ggml import (
    PREC_F32,
    ROPE_TYPE_IMROPE,
    ROPE_TYPE_MROPE,
    ROPE_TYPE_NEOX,
    ROPE_TYPE_NORMAL,
    ROPE_TYPE_VISION,
    ggml,
)

_SECTION_TYPES = {
    SectionOrder.IN_TURN: ROPE_TYPE_MROPE,
    SectionOrder.INTERLEAVED: ROPE_TYPE_IMROPE,
    SectionOrder.APART: ROPE_TYPE_VISION,
}


class GGMLTensor:
    """``graph`` is the ggml_context's address, 0 for weights and stored tensors: they join the other operand's graph."""

    __slots__ = ("address", "graph")

    def __init__(self, address: int, graph: int = 0) -> None:
        self.address = address
        self.graph = graph

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return structs.shape(self.address)

    @property
    def strides(self) -> tuple[int, int, int, int]:
        return structs.strides(self.address)

    def beside(self, other: GGMLTensor) -> GGMLTensor:
        return GGMLTensor(self.address, other.graph)

    def __add__(self, other: GGMLTensor) -> GGMLTensor:
        graph = self.graph or other.graph
        return GGMLTensor(ggml().ggml_add(graph, self.address, other.address), graph)

    def __mul__(self, other: GGMLTensor) -> GGMLTensor:
        graph = self.graph or other.graph
        return GGMLTensor(ggml().ggml_mul(graph, self.address, other.address), graph)

    def __sub__(self, other: GGMLTensor) -> GGMLTensor:
        graph = self.graph or other.graph
        return GGMLTensor(ggml().ggml_sub(graph, self.address, other.address), graph)

    def __truediv__(self, other: GGMLTensor) -> GGMLTensor:
        graph = self.graph or other.graph
        return GGMLTensor(ggml().ggml_div(graph, self.address, other.address), graph)

    def scale(self, factor: float, bias: float = 0.0) -> GGMLTensor:
        if bias:
            return GGMLTensor(ggml().ggml_scale_bias(self.graph, self.address, factor, bias), self.graph)
        return GGMLTensor(ggml().ggml_scale(self.graph, self.address, factor), self.graph)

    def mul_mat(self, x: GGMLTensor) -> GGMLTensor:
        graph = x.graph or self.graph
        return GGMLTensor(ggml().ggml_mul_mat(graph, self.address, x.address), graph)

    def products(self, weights: Sequence[GGMLTensor], *, is_precise: bool = False) -> list[GGMLTensor]:
        return weights[0].multiply(self, weights, is_precise=is_precise)

    def gated_product(self, weights: Sequence[GGMLTensor], gate: Gate) -> GGMLTensor:
        return weights[0].multiply_gated(self, weights, gate)

    def expert_products(self, weights: Sequence[GGMLTensor], experts: GGMLTensor) -> list[GGMLTensor]:
        return [weight.mul_mat_id(self, experts) for weight in weights]

    def gated_expert_product(self, weights: Sequence[GGMLTensor], experts: GGMLTensor, gate: Gate) -> GGMLTensor:
        return weights[0].multiply_gated_by_expert(self, weights, experts, gate)

    def multiply_gated_by_expert(
        self, x: GGMLTensor, weights: Sequence[GGMLTensor], experts: GGMLTensor, gate: Gate
    ) -> GGMLTensor:
        found = [weight.mul_mat_id(x, experts) for weight in weights]
        return gate.of_halves(*found) if len(found) == 1 else gate.of(*found)

    def multiply(self, x: GGMLTensor, weights: Sequence[GGMLTensor], *, is_precise: bool = False) -> list[GGMLTensor]:
        """The products of x, self being the first of the weights: how they are computed is the weights' matter."""
        found = [weight.mul_mat(x) for weight in weights]
        for product in found if is_precise else ():
            ggml().ggml_prec_set_acc(product.address, PREC_F32)
        return found

    def multiply_gated(self, x: GGMLTensor, weights: Sequence[GGMLTensor], gate: Gate) -> GGMLTensor:
        found = self.multiply(x, weights)
        return gate.of_halves(*found) if len(found) == 1 else gate.of(*found)

    def mul_mat_id(self, x: GGMLTensor, experts: GGMLTensor) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_mul_mat_id(x.graph, self.address, x.address, experts.address), x.graph)

    def add_id(self, bias: GGMLTensor, experts: GGMLTensor) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_add_id(self.graph, self.address, bias.address, experts.address), self.graph)

    def rows(self, indices: GGMLTensor) -> GGMLTensor:
        graph = indices.graph
        return GGMLTensor(ggml().ggml_get_rows(graph, self.address, indices.address), graph)

    def set_rows(self, source: GGMLTensor, indices: GGMLTensor) -> GGMLTensor:
        graph = source.graph
        return GGMLTensor(ggml().ggml_set_rows(graph, self.address, source.address, indices.address), graph)

    def rms_norm(self, eps: float, weight: GGMLTensor | None = None) -> GGMLTensor:
        normalised = GGMLTensor(ggml().ggml_rms_norm(self.graph, self.address, eps), self.graph)
        return normalised if weight is None else Normalised((normalised * weight).address, self, weight, eps)

    def norm(self, eps: float) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_norm(self.graph, self.address, eps), self.graph)

    def l2_norm(self, eps: float) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_l2_norm(self.graph, self.address, eps), self.graph)

    def silu(self) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_silu(self.graph, self.address), self.graph)

    def gelu(self) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_gelu(self.graph, self.address), self.graph)

    def gelu_erf(self) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_gelu_erf(self.graph, self.address), self.graph)

    def gelu_quick(self) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_gelu_quick(self.graph, self.address), self.graph)

    def relu(self) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_relu(self.graph, self.address), self.graph)

    def swiglu(self, up: GGMLTensor | None = None) -> GGMLTensor:
        if up is None:
            return GGMLTensor(ggml().ggml_swiglu(self.graph, self.address), self.graph)
        return GGMLTensor(ggml().ggml_swiglu_split(self.graph, self.address, up.address), self.graph)

    def geglu(self, up: GGMLTensor | None = None) -> GGMLTensor:
        if up is None:
            return GGMLTensor(ggml().ggml_geglu(self.graph, self.address), self.graph)
        return GGMLTensor(ggml().ggml_geglu_split(self.graph, self.address, up.address), self.graph)

    def swiglu_clamped(self, up: GGMLTensor, alpha: float, limit: float) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_swiglu_oai(self.graph, self.address, up.address, alpha, limit), self.graph)

    def tanh(self) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_tanh(self.graph, self.address), self.graph)

    def sigmoid(self) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_sigmoid(self.graph, self.address), self.graph)

    def exp(self) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_exp(self.graph, self.address), self.graph)

    def log(self) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_log(self.graph, self.address), self.graph)

    def floor(self) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_floor(self.graph, self.address), self.graph)

    def softplus(self) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_softplus(self.graph, self.address), self.graph)

    def square(self) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_sqr(self.graph, self.address), self.graph)

    def sqrt(self) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_sqrt(self.graph, self.address), self.graph)

    def clamp(self, low: float, high: float) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_clamp(self.graph, self.address, low, high), self.graph)

    def softmax(self) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_soft_max(self.graph, self.address), self.graph)

    def softmax_masked(
        self, mask: GGMLTensor | None, scale: float, sinks: GGMLTensor | None = None, max_bias: float = 0.0
    ) -> GGMLTensor:
        """Softmax(scale * self + mask) over axis 0; self [m, n, n_heads, s], mask F16 [m, n, 1, s], sinks F32 [n_heads]."""
        node = ggml().ggml_soft_max_ext(self.graph, self.address, mask.address if mask else None, scale, max_bias)
        if sinks is not None:
            ggml().ggml_soft_max_add_sinks(node, sinks.address)
        return GGMLTensor(node, self.graph)

    def sum_rows(self) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_sum_rows(self.graph, self.address), self.graph)

    def cumsum(self) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_cumsum(self.graph, self.address), self.graph)

    def top_k(self, k: int) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_argsort_top_k(self.graph, self.address, k), self.graph)

    def repeat(self, *shape: int) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_repeat_4d(self.graph, self.address, *shape), self.graph)

    def pad(self, a: int, b: int = 0, c: int = 0, d: int = 0) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_pad(self.graph, self.address, a, b, c, d), self.graph)

    def rope(self, positions: GGMLTensor, options: RopeOptions, factors: GGMLTensor | None = None) -> GGMLTensor:
        o, g = options, ggml()
        operands = self.graph, self.address, positions.address, factors.address if factors else None
        stretch = o.original_ctx, o.base, o.scale, o.ext_factor, o.attn_factor, o.beta_fast, o.beta_slow
        if o.sections is None:
            node = g.ggml_rope_ext(*operands, o.n_dims, ROPE_TYPE_NEOX if o.neox else ROPE_TYPE_NORMAL, *stretch)
            if o.begin:
                g.ggml_rope_set_offset(node, o.begin)
        else:
            # Where the axes are apart the library counts the pairs as dimensions.
            n_dims = o.n_dims // 2 if o.sections.order is SectionOrder.APART else o.n_dims
            n_pairs = structs.ints(o.sections.n_pairs)
            node = g.ggml_rope_multi(*operands, n_dims, n_pairs, _SECTION_TYPES[o.sections.order], *stretch)
        return GGMLTensor(node, self.graph)

    def flash_attention(
        self,
        key: GGMLTensor,
        value: GGMLTensor,
        mask: GGMLTensor | None,
        scale: float,
        softcap: float = 0.0,
        sinks: GGMLTensor | None = None,
        max_bias: float = 0.0,
    ) -> GGMLTensor:
        """Shapes as in puna.ml.attention, but self is [head_dim, n, n_heads, s] and the result [head_dim_v, n_heads, n, s]."""
        operands = (self.address, key.address, value.address, mask.address if mask else None)
        node = ggml().ggml_flash_attn_ext(self.graph, *operands, scale, max_bias, softcap)
        ggml().ggml_prec_set_acc(node, PREC_F32)
        if sinks is not None:
            ggml().ggml_flash_attn_ext_add_sinks(node, sinks.address)
        return GGMLTensor(node, self.graph)

    def ssm_conv(self, kernel: GGMLTensor) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_ssm_conv(self.graph, self.address, kernel.address), self.graph)

    def ssm_scan(
        self, x: GGMLTensor, dt: GGMLTensor, a: GGMLTensor, b: GGMLTensor, c: GGMLTensor, slots: GGMLTensor
    ) -> GGMLTensor:
        operands = (self, x, dt, a, b, c, slots)
        return GGMLTensor(ggml().ggml_ssm_scan(x.graph, *(t.address for t in operands), 1), x.graph)

    def gated_delta_net(
        self, query: GGMLTensor, key: GGMLTensor, value: GGMLTensor, decay: GGMLTensor, beta: GGMLTensor
    ) -> GGMLTensor:
        operands = (query, key, value, decay, beta, self)
        return GGMLTensor(ggml().ggml_gated_delta_net(value.graph, *(t.address for t in operands), 1), value.graph)

    def reshape(self, *shape: int) -> GGMLTensor:
        function = (ggml().ggml_reshape_1d, ggml().ggml_reshape_2d, ggml().ggml_reshape_3d, ggml().ggml_reshape_4d)[
            len(shape) - 1
        ]
        return GGMLTensor(function(self.graph, self.address, *shape), self.graph)

    def unflatten(self, a: int, b: int) -> GGMLTensor:
        shape, strides = self.shape, self.strides
        if a * b != shape[0] or shape[2] * shape[3] != 1:
            raise ValueError(f"{list(shape)} are no columns of {a} x {b}")
        return self.view((a, b, shape[1]), (strides[0] * a, strides[1]), 0)

    def flatten(self) -> GGMLTensor:
        shape, strides = self.shape, self.strides
        if strides[1] != strides[0] * shape[0] or shape[3] != 1:
            raise ValueError(f"columns of {list(shape)} with strides {list(strides)} are not contiguous")
        return self.view((shape[0] * shape[1], shape[2]), (strides[2],), 0)

    def permute(self, a: int, b: int, c: int, d: int) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_permute(self.graph, self.address, a, b, c, d), self.graph)

    def contiguous(self) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_cont(self.graph, self.address), self.graph)

    def cast(self, dtype: DType) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_cast(self.graph, self.address, int(dtype)), self.graph)

    def view(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> GGMLTensor:
        function = (ggml().ggml_view_1d, ggml().ggml_view_2d, ggml().ggml_view_3d, ggml().ggml_view_4d)[len(shape) - 1]
        return GGMLTensor(function(self.graph, self.address, *shape, *strides, offset), self.graph)

    def copy_to(self, target: GGMLTensor) -> GGMLTensor:
        graph = self.graph or target.graph
        return GGMLTensor(ggml().ggml_cpy(graph, self.address, target.address), graph)

    def concat(self, other: GGMLTensor, axis: int) -> GGMLTensor:
        return GGMLTensor(ggml().ggml_concat(self.graph, self.address, other.address, axis), self.graph)


class Normalised(GGMLTensor):
    """A vector over its root mean square, times a weight; what multiplies it may do that on the way."""

    __slots__ = ("eps", "source", "weight")

    def __init__(self, address: int, source: GGMLTensor, weight: GGMLTensor, eps: float) -> None:
        super().__init__(address, source.graph)
        self.source = source
        self.weight = weight
        self.eps = eps
