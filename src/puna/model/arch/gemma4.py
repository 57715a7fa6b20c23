"""Gemma 4 (Gemma Team 2026), the language part: E2B, E4B, 26B-A4B and 31B.

Of the Gemma family. Layers that see everything have wider heads, may have fewer keys, and rotate only some pairs; values
are normalised too, and may be the keys before their norm. In the small models each token brings every layer a short
vector, and the last layers attend to what earlier ones have cached; in the one with experts these stand beside the MLP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.kvcache.span import Span
from puna.ml.backend import Backend, Use
from puna.ml.tensor import RopeOptions, Tensor
from puna.model.decoder import RopeFactors, Step
from puna.model.gemma import GemmaDecoder, GemmaOptions
from puna.model.per_layer import PerLayerGate, PerLayerInputs, part
from puna.model.routing import routing_of
from puna.model.shared_keys import check_own_keys, donors
from puna.nn.attention import attention
from puna.nn.declare import gguf
from puna.nn.experts import ExpertLinear, Gating, PackedGateUp, SeparateGateUp, choose, weighted_sum
from puna.nn.layers import Embedding, Linear, RMSNorm
from puna.nn.mlp import GeGLU

WINDOW_BASE = 10000.0  # of the rotation, in files that do not say


@dataclass(frozen=True)
class Options(GemmaOptions):
    """head_dim and rope are those of layers that see everything."""

    window_head_dim: int = 0
    window_rope_dims: int = 0
    n_given: int = 0  # values of a token's vector for each layer; 0: none
    donors: list[int] = field(default_factory=list)  # per layer, whose keys and values it attends to

    period: ClassVar[int] = 6
    default_logit_cap: ClassVar[float] = 30.0

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        o, meta = super().read(file), file.metadata
        head_dim = meta.integer("attention.key_length_swa", o.head_dim)
        values = o.head_dim_v, meta.integer("attention.value_length_swa", head_dim)
        if values != (o.head_dim, head_dim) or head_dim < 1:
            raise FileFormatError(f"{file.path}: heads of {o.head_dim} and {head_dim} values cannot mix {values}")
        rotated = meta.integer("rope.dimension_count_swa", o.rope.n_dims)
        base = meta.number("rope.freq_base_swa", meta.number("rope.local.freq_base", WINDOW_BASE))
        if not (0 < rotated <= head_dim and rotated % 2 == 0 and math.isfinite(base) and base > 0):
            raise FileFormatError(f"{file.path}: layers with a window cannot rotate {rotated} of {head_dim} with the base {base}")
        n_given = meta.integer("embedding_length_per_layer_input", 0)
        if n_given < 0:
            raise FileFormatError(f"{file.path}: {meta.full_key('embedding_length_per_layer_input')} {n_given} is not usable")
        routing = routing_of(file, is_normalised=True)
        return replace(
            o,
            scale=1.0,
            n_kv_heads=_n_kv_heads(file, o),
            window_base=base,
            window_head_dim=head_dim,
            window_rope_dims=rotated,
            n_given=n_given,
            donors=donors(file, o.is_windowed, 0),
            routing=replace(routing, gating=Gating.SOFTMAX) if routing else None,
        )

    def head_dim_of(self, layer: int) -> int:
        return self.window_head_dim if self.is_windowed[layer] else self.head_dim

    def rope_of(self, layer: int) -> RopeOptions:
        """Layers with a window are not stretched."""
        n_dims, base, factor = self.window_rope_dims, self.window_base, self.rope.attn_factor
        return RopeOptions(n_dims, neox=True, base=base, attn_factor=factor) if self.is_windowed[layer] else self.rope

    def cached(self, layer: int) -> tuple[int, int, int]:
        n_heads, head_dim = self.n_kv_heads[layer], self.head_dim_of(layer)
        return n_heads if self.donors[layer] == layer else 0, head_dim, head_dim

    def model_dims(self) -> dict[str, int]:
        given = {"given": self.n_given, "given_all": self.n_given * self.n_layers}
        return {**super().model_dims(), **given, "pairs": self.head_dim // 2}

    def dims(self, layer: int) -> dict[str, int]:
        head_dim = self.head_dim_of(layer)
        q, k = (n * head_dim for n in (self.n_heads[layer], self.n_kv_heads[layer]))
        return {**super().dims(layer), "head": head_dim, "q": q, "k": k, "v": k, "mixed": q}


def _n_kv_heads(file: GGUFFile, o: GemmaOptions) -> list[int]:
    """Per layer; the ancestor's files state those of layers that see everything apart."""
    n_global = file.metadata.integer("attention.global_head_count_kv", 0)
    found = [n_global if n_global and not w else n for n, w in zip(o.n_kv_heads, o.is_windowed, strict=True)]
    if any(n < 1 or heads % n for n, heads in zip(found, o.n_heads, strict=True)):
        raise FileFormatError(f"{file.path}: {o.n_heads[:8]} heads cannot share {found[:8]} key/value heads")
    return found


def rotate(x: Tensor, step: Step, o: Options) -> Tensor:
    """Only layers that see everything have factors."""
    factors = None if o.is_windowed[step.layer] else step.factors
    return x.rope(step.inputs.positions, o.rope_of(step.layer), factors)


@dataclass
class Keys:
    key: Linear = gguf("attn_k", dims="embd k")
    key_norm: RMSNorm = gguf("attn_k_norm", dims="head")
    value: Linear | None = gguf("attn_v", dims="embd v", optional=True)

    def __call__(self, x: Tensor, step: Step, o: Options) -> tuple[Tensor, Tensor]:
        shape = o.head_dim_of(step.layer), o.n_kv_heads[step.layer], x.shape[1]
        key = self.key(x).reshape(*shape)
        value = self.value(x).reshape(*shape) if self.value else key
        return rotate(self.key_norm(key, o.eps), step, o), value.rms_norm(o.eps)


@dataclass
class Attention:
    """Layers that use others' keys and values may have weights for their own; they stay unused."""

    keys: Keys | None
    query: Linear = gguf("attn_q", dims="embd q")
    query_norm: RMSNorm = gguf("attn_q_norm", dims="head")
    output: Linear = gguf("attn_output", dims="mixed embd")

    def __call__(self, x: Tensor, step: Step, o: Options) -> Tensor:
        donor = o.donors[step.layer]
        query = self.query(x).reshape(o.head_dim_of(step.layer), o.n_heads[step.layer], x.shape[1])
        query = rotate(self.query_norm(query, o.eps), step, o)
        step.cache.layer(donor)
        key, value = self.keys(x, step, o) if self.keys and donor == step.layer else (None, None)
        return self.output(attention(step.ctx, query, key, value, step.cache, o.scale))


@dataclass
class Router(Linear):
    """Its scale has a factor for each value that goes in."""

    scale: Tensor = gguf("scale", dims="embd", use=Use.VECTOR)

    def __call__(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return self.adapters.linear(self.product(x), x)


@dataclass
class Mixture:
    """Experts beside the MLP; both get the residual through norms of their own and are normalised before they add up."""

    gate_up: SeparateGateUp | PackedGateUp
    router: Router = gguf("ffn_gate_inp", dims="embd experts")
    down: ExpertLinear = gguf("ffn_down_exps", dims="ff_expert embd experts")
    norm: RMSNorm = gguf("pre_ffw_norm_2", dims="embd")
    post_norm: RMSNorm = gguf("post_ffw_norm_2", dims="embd")
    mlp_post_norm: RMSNorm = gguf("post_ffw_norm_1", dims="embd")

    def __call__(self, x: Tensor, step: Step, o: Options) -> Tensor:
        """X [n_embd, n] to [n_embd, n]."""
        assert o.routing is not None, "routing_of refuses a file that has experts and states none"
        n = x.shape[1]
        scores = self.router(x.rms_norm(o.eps).scale(o.n_embd**-0.5))
        experts, weights = choose(step.ctx, scores, o.routing)
        gate, up = self.gate_up(self.norm(x, o.eps).reshape(o.n_embd, 1, n), experts)
        outputs = self.down(gate.geglu(up), experts)
        return self.post_norm(weighted_sum(outputs, weights), o.eps)


@dataclass
class Layer:
    attention: Attention
    mlp: GeGLU
    mixture: Mixture | None
    given: PerLayerGate | None
    attention_norm: RMSNorm = gguf("attn_norm", dims="embd")
    attention_post_norm: RMSNorm = gguf("post_attention_norm", dims="embd")
    mlp_norm: RMSNorm = gguf("ffn_norm", dims="embd")
    mlp_post_norm: RMSNorm = gguf("post_ffw_norm", dims="embd")
    scale: Tensor | None = gguf("layer_output_scale.weight", alt="layer_scalar", dims="1", use=Use.VECTOR, optional=True)

    def __call__(self, x: Tensor, step: Step, o: Options) -> Tensor:
        mixed, x = step.outputs_only(self.attention(self.attention_norm(x, o.eps), step, o), x)
        x = self.attention_post_norm(mixed, o.eps) + x
        made = self.mlp(self.mlp_norm(x, o.eps))
        if self.mixture:
            made = self.mixture.mlp_post_norm(made, o.eps) + self.mixture(x, step, o)
        x = self.mlp_post_norm(made, o.eps) + x
        if self.given and step.per_layer is not None:
            given = part(step.per_layer, step.layer)
            if step.is_selected:
                (given,) = step.outputs_only(given)
            x = x + self.given(x, given, o.eps)
        return x if self.scale is None else x * self.scale


@dataclass
class Weights:
    factors: RopeFactors
    per_layer: PerLayerInputs | None
    embedding: Embedding = gguf("token_embd", dims="embd vocab")
    layers: list[Layer] = gguf("blk")
    output_norm: RMSNorm = gguf("output_norm", dims="embd")
    output: Linear = gguf("output", alt="token_embd", dims="embd vocab")


class Gemma4(GemmaDecoder[Options]):
    Options = Options
    Weights = Weights
    nodes_per_layer = 80

    def __init__(self, file: GGUFFile, backend: Backend, n_ctx: int) -> None:
        super().__init__(file, backend, n_ctx)
        check_own_keys(self.options.donors, [layer.attention.keys is not None for layer in self.weights.layers])

    def enter(self, x: Tensor, step: Step) -> Tensor:
        if self.weights.per_layer:
            step.per_layer = self.weights.per_layer(step.inputs.tokens, x, self.options.eps)
        return x

    def sees_ahead(self, span: Span) -> bool:
        """As it was trained: layers that see everything see only backwards."""
        return span.is_bounded

    def shift(self, layer: int, keys: Tensor, changes: Tensor) -> Tensor:
        o = self.options
        return keys.rope(changes, o.rope_of(layer).rotation, None if o.is_windowed[layer] else self.factors)
