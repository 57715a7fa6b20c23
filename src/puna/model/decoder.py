"""What all stacks of layers that predict the next token have in common; an architecture adds its options and its layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

from puna.errors import FileFormatError
from puna.gguf.layers import n_stored_layers
from puna.gguf.reader import GGUFFile
from puna.kvcache.cache import Cache, Limits
from puna.kvcache.causal import ALL, CausalCache
from puna.kvcache.layered import LayeredCache
from puna.kvcache.span import Span
from puna.ml.backend import Backend, Context, Use
from puna.ml.tensor import DType, RopeOptions, Tensor
from puna.model.model import Inputs
from puna.model.pooling import Pooling, pooling_of
from puna.model.rope import rope_options
from puna.nn.declare import bind, gguf
from puna.nn.experts import Routing

RMS_EPS, LAYER_NORM_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"


@dataclass(frozen=True)
class DecoderOptions:
    """What every architecture's metadata states. A family's own options extend it: their fields have defaults, and their
    ``read`` is ``replace(super().read(file), window=...)``.
    """

    n_layers: int
    n_embd: int
    n_heads: list[int]  # per layer; 0: no attention
    n_kv_heads: list[int]  # per layer
    head_dim: int  # of queries and keys
    head_dim_v: int
    eps: float  # of the norms
    scale: float  # of the dot products
    rope: RopeOptions
    routing: Routing | None = None  # of layers with experts
    values_in_keys: bool = False  # a head's value is the beginning of its key

    is_neox: ClassVar[bool] = True  # which dimensions the family's rotation pairs
    eps_key: ClassVar[str] = RMS_EPS  # of the family's norms; files may state both

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        """Errors: FileFormatError naming what does not fit."""
        meta = file.metadata
        n_stored, n_embd = n_stored_layers(meta), meta.integer("embedding_length")
        # The last layers of some files guess further tokens (multi-token prediction); they take no part in the next one.
        n_layers = n_stored - meta.integer("nextn_predict_layers", 0)
        if not (1 <= n_layers <= n_stored and n_embd >= 1):
            raise FileFormatError(f"{file.path}: {n_layers} of {n_stored} layers, {n_embd} wide is no model")
        n_heads = meta.per_layer("attention.head_count", n_stored)[:n_layers]
        has_kv_heads = meta.has("attention.head_count_kv")
        n_kv_heads = meta.per_layer("attention.head_count_kv", n_stored)[:n_layers] if has_kv_heads else n_heads
        most, is_stated = max(n_heads), meta.has("attention.key_length")
        if most < 1 or (not is_stated and n_embd % most):
            raise FileFormatError(f"{file.path}: {n_embd} values do not divide into {most} heads")
        head_dim = meta.integer("attention.key_length", n_embd // most)
        head_dim_v = meta.integer("attention.value_length", head_dim)
        for layer, (heads, kv_heads) in enumerate(zip(n_heads, n_kv_heads, strict=True)):
            if min(heads, kv_heads) < 0 or (kv_heads and heads % kv_heads):
                raise FileFormatError(f"{file.path}: layer {layer}: {heads} heads cannot share {kv_heads} key/value heads")
        if min(head_dim, head_dim_v) < 1:
            raise FileFormatError(f"{file.path}: heads of {head_dim} and {head_dim_v} values")
        scale = meta.number("attention.scale", 0.0) or head_dim**-0.5
        if not math.isfinite(scale):
            raise FileFormatError(f"{file.path}: {meta.full_key('attention.scale')} {scale} is not usable")
        return cls(
            n_layers=n_layers,
            n_embd=n_embd,
            n_heads=[heads if kv_heads else 0 for heads, kv_heads in zip(n_heads, n_kv_heads, strict=True)],
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            eps=norm_eps(file, cls.eps_key),
            scale=scale,
            rope=rope_options(file, n_dims=head_dim, neox=cls.is_neox),
        )

    def rope_of(self, layer: int) -> RopeOptions | None:
        """How this layer rotates queries and keys; None: its attention knows no positions (NoPE)."""
        return self.rope

    def span(self, layer: int) -> Span:
        """How far back this layer's rows see."""
        return ALL

    def cached(self, layer: int) -> tuple[int, int, int]:
        """How many heads' keys and values of this layer the cache holds, and how many values each has."""
        return self.n_kv_heads[layer], self.head_dim, self.head_dim_v

    def model_dims(self) -> dict[str, int]:
        """Lengths of the axes of weights outside the layers."""
        experts = {"experts": self.routing.n_experts} if self.routing else {}
        return {"embd": self.n_embd, "pairs": self.rope.n_dims // 2, **experts}

    def dims(self, layer: int) -> dict[str, int]:
        """Lengths of this layer's axes, by the names that weights are declared with."""
        heads, kv_heads = self.n_heads[layer], self.n_kv_heads[layer]
        q, k, v = heads * self.head_dim, kv_heads * self.head_dim, kv_heads * self.head_dim_v
        mixed = heads * self.head_dim_v
        each = {"head": self.head_dim, "heads": heads, "kv_heads": kv_heads}
        return {"q": q, "k": k, "v": v, "qkv": q + k + v, "mixed": mixed, **each}


def norm_eps(file: GGUFFile, key: str = RMS_EPS) -> float:
    """As this key states it, or the other kind of norm's where it is missing.

    Errors: FileFormatError for what no norm can use.
    """
    meta = file.metadata
    eps = meta.number(next((k for k in (key, RMS_EPS, LAYER_NORM_EPS) if meta.has(k)), key))
    if not (math.isfinite(eps) and eps >= 0):
        raise FileFormatError(f"{file.path}: norms cannot use the epsilon {eps}")
    return eps


@dataclass
class RopeFactors:
    """Divisors of the rotation's frequencies: Llama 3.1's, or one set each for short and long contexts (LongRoPE)."""

    always: Tensor | None = gguf("rope_freqs.weight", dims="pairs", use=Use.VECTOR, optional=True)
    long: Tensor | None = gguf("rope_factors_long.weight", dims="pairs", use=Use.VECTOR, optional=True)
    short: Tensor | None = gguf("rope_factors_short.weight", dims="pairs", use=Use.VECTOR, optional=True)

    def choose(self, n_ctx: int, original_ctx: int) -> Tensor | None:
        return self.always or (self.long if n_ctx > original_ctx else self.short)


@dataclass
class Step:
    """A graph being built, at one layer."""

    ctx: Context
    inputs: Inputs
    cache: Cache
    factors: Tensor | None  # of the rotation
    temperature: Tensor | None = None  # on queries, [1, 1, n]
    per_layer: Tensor | None = None  # what each layer is given beside the residual, [k, n, n_layers]
    layer: int = 0
    is_last: bool = False
    is_selected: bool = False  # only the rows whose logits are wanted are left

    def rotate(self, x: Tensor, rope: RopeOptions | None) -> Tensor:
        """Queries or keys [head_dim, n_heads, n] by their positions; unchanged without a rotation."""
        return x.rope(self.inputs.positions, rope, self.factors) if rope else x

    def outputs_only(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """In the last layer the rows whose logits are wanted; a layer calls it once its rows no longer need each other."""
        if not self.is_last or self.inputs.outputs is None:
            return tensors
        self.is_selected = True
        return tuple(tensor.rows(self.inputs.outputs) for tensor in tensors)


OptionsT = TypeVar("OptionsT", bound=DecoderOptions)


class Decoder(Generic[OptionsT]):
    """Embedding, layers, norm, head. *Options* and *Weights* are the family's.

    Weights have the fields embedding, layers, output_norm, output, and factors if positions may be stretched; a layer is
    called as ``layer(x, step, options)`` with x [n_embd, n].
    """

    Options: type[OptionsT]
    Weights: type[Any]
    has_axes = False
    nodes_per_layer = 48  # at most, besides what each group of sequences that attends on its own takes

    def __init__(self, file: GGUFFile, backend: Backend, n_ctx: int) -> None:
        o = self.options = self.Options.read(file)
        self.n_ctx_train = file.metadata.integer("context_length", 0)
        self.embeds = pooling_of(file) is not Pooling.NONE
        w = self.weights = bind(self.Weights, backend, file, {"layers": o.n_layers}, o.model_dims(), o.dims)
        self.n_vocab, self.n_embd = file.tensors["token_embd.weight"].shape[1], o.n_embd
        self._n_scales = sum(name.endswith(".scale") for name in file.tensors)
        factors = getattr(w, "factors", None)
        self.factors: Tensor | None = factors.choose(n_ctx, o.rope.original_ctx) if factors else None

    def forward(self, ctx: Context, inputs: Inputs, cache: Cache) -> Tensor:
        """Logits [n_vocab, n_outputs]; of a model that embeds, hidden states [n_embd, n_outputs]."""
        o, w = self.options, self.weights
        step = Step(ctx, inputs, cache, self.factors, self.temperature(inputs.positions))
        x = self.enter(inputs.placed(self.embed(inputs.tokens)), step)
        for i, layer in enumerate(w.layers):
            step.layer, step.is_last = i, i == o.n_layers - 1
            cache.layer(i)
            x = layer(x, step, o)
        x = self.leave(x)
        if not step.is_selected:
            (x,) = step.outputs_only(x)
        hidden = w.output_norm(x, o.eps)
        return hidden if self.embeds else self.head(hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens I32 [n] as the first layer gets them, [n_embd, n]: what rows of an image may stand in for."""
        embedded: Tensor = self.weights.embedding(tokens)
        return embedded

    def enter(self, x: Tensor, step: Step) -> Tensor:
        """What the first layer gets; x [n_embd, n] is embedded."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """The residual [n_embd, n] of what the last layer gives."""
        return x

    def temperature(self, positions: Tensor) -> Tensor | None:
        """Factors of queries by their positions, [1, 1, n]; None: all the same."""
        return None

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of the last layer's normalised output."""
        logits: Tensor = self.weights.output(hidden)
        return logits

    def span(self, layer: int) -> Span:
        """How far back a layer's rows see."""
        return self.options.span(layer)

    def sees_ahead(self, span: Span) -> bool:
        """Whether, in layers that see so far back, the rows of an image that see each other do so."""
        return True

    def shift(self, layer: int, keys: Tensor, changes: Tensor) -> Tensor:
        """Cached keys [head_dim, n_kv_heads, m] turned by changes of their positions, I32 [m], or [4 m] with axes."""
        rope = self.options.rope_of(layer)
        return keys.rope(changes, rope.rotation, self.factors) if rope else keys

    def make_cache(self, backend: Backend, limits: Limits, dtype: DType) -> Cache:
        o = self.options
        layouts = [(self.span(i), *o.cached(i)[1:]) for i in range(o.n_layers)]
        kinds = sorted(set(layouts), key=layouts.index)
        choice = [kinds.index(layout) for layout in layouts]

        def part(kind: int) -> CausalCache:
            heads: Sequence[int] = [o.cached(i)[0] if k == kind else 0 for i, k in enumerate(choice)]
            span, head_dim_k, head_dim_v = kinds[kind]
            return CausalCache(
                backend,
                limits,
                n_kv_heads=heads,
                head_dim_k=head_dim_k,
                head_dim_v=head_dim_v,
                dtype=dtype,
                shift=self.shift,
                span=span,
                values_in_keys=o.values_in_keys,
                has_axes=self.has_axes,
                sees_ahead=self.sees_ahead(span),
            )

        parts = [part(kind) for kind in range(len(kinds))]
        return parts[0] if len(parts) == 1 else LayeredCache(parts, choice, limits.max_sequences)

    def max_nodes(self, limits: Limits) -> int:
        # Each group of sequences that attends on its own takes another 7 nodes in each layer, each expert of a token 2.
        routing = self.options.routing
        in_experts = 32 + 2 * routing.n_used if routing else 0
        in_layers = self.options.n_layers * (self.nodes_per_layer + in_experts + 8 * limits.max_sequences)
        return 64 + in_layers + 4 * self._n_scales
