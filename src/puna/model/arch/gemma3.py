"""Gemma 3 (Gemma Team 2025), text.

Beside Llama: norms after attention and MLP too, norms of queries and keys, GeGLU, embeddings scaled by sqrt(n_embd).
Five layers of six see a sliding window and have their own rotation; the sixth sees everything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.reader import GGUFFile
from puna.kvcache.cache import Cache, Limits
from puna.kvcache.causal import ALL, CausalCache
from puna.kvcache.layered import LayeredCache
from puna.kvcache.reach import Reach
from puna.ml.backend import Backend, Context
from puna.ml.tensor import DType, RopeOptions, Tensor
from puna.model.model import Inputs
from puna.model.rope import rope_options
from puna.model.shapes import check_shapes, found_shape, table_shape
from puna.nn.attention import attention
from puna.nn.declare import bind, gguf
from puna.nn.layers import Embedding, Linear, RMSNorm, softcap

FULL, WINDOW = 0, 1  # kinds of layers

# Of the published models only these were stretched, by 8; files made early do not say so.
STRETCHED_LAYERS = (34, 48, 62)


@dataclass(frozen=True)
class Options:
    n_embd: int
    n_heads: int
    n_kv_heads: list[int]  # per layer
    head_dim: int
    eps: float
    scale: float  # of the dot products
    window: int
    kinds: list[int]  # per layer: FULL or WINDOW
    ropes: tuple[RopeOptions, RopeOptions]  # by kind
    logit_cap: float  # 0: none

    @property
    def n_layers(self) -> int:
        return len(self.kinds)

    @classmethod
    def read(cls, file: GGUFFile) -> Options:
        meta = file.metadata
        n_layers, n_embd, n_heads = (
            meta.integer("block_count"),
            meta.integer("embedding_length"),
            meta.integer("attention.head_count"),
        )
        if min(n_layers, n_embd, n_heads) < 1:
            raise FileFormatError(f"{file.path}: {n_layers} layers, {n_embd} wide, {n_heads} heads is not a gemma3")
        head_dim = meta.integer("attention.key_length", n_embd // n_heads)
        n_kv_heads = meta.per_layer("attention.head_count_kv", n_layers, n_heads)
        if head_dim < 2 or any(n < 1 or n_heads % n for n in n_kv_heads):
            raise FileFormatError(f"{file.path}: {n_heads} heads of {head_dim} cannot share {n_kv_heads} key/value heads")
        if meta.integer("attention.value_length", head_dim) != head_dim:
            raise UnsupportedModel(f"{file.path}: gemma3 with values of another width than keys is not supported")
        window = meta.integer("attention.sliding_window", 0)
        cap = meta.number("final_logit_softcapping", 0.0)
        if window < 0 or not (math.isfinite(cap) and cap >= 0):
            raise FileFormatError(f"{file.path}: a window of {window} or a cap of {cap} on logits is not usable")
        return cls(
            n_embd=n_embd,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            eps=meta.number("attention.layer_norm_rms_epsilon"),
            # The largest model divides by what its heads would be wide if they shared the embedding.
            scale=(n_embd / n_heads if n_layers == 62 else head_dim) ** -0.5,
            window=window,
            kinds=_kinds(file, n_layers) if window else [FULL] * n_layers,
            ropes=_ropes(file, n_layers, head_dim, window),
            logit_cap=cap,
        )


def _kinds(file: GGUFFile, n_layers: int) -> list[int]:
    """Every so many layers one is full, six unless the file states otherwise; or the file lists the layers with windows."""
    pattern = file.metadata.integers("attention.sliding_window_pattern", [6])
    if len(pattern) == n_layers > 1:
        return [WINDOW if is_window else FULL for is_window in pattern]
    if len(pattern) != 1 or pattern[0] < 1:
        raise FileFormatError(f"{file.path}: attention.sliding_window_pattern does not fit {n_layers} layers: {pattern[:8]}")
    return [FULL if (i + 1) % pattern[0] == 0 else WINDOW for i in range(n_layers)]


def _ropes(file: GGUFFile, n_layers: int, head_dim: int, window: int) -> tuple[RopeOptions, RopeOptions]:
    meta = file.metadata
    full = rope_options(file, n_dims=head_dim, neox=True)
    if not meta.has("rope.freq_base"):
        full = replace(full, base=meta.number("rope.global.freq_base", 1e6))
    is_unstated = not (meta.has("rope.scaling.factor") or meta.has("rope.scaling.type"))
    if is_unstated and n_layers in STRETCHED_LAYERS and 0 < window < meta.integer("context_length", 0):
        full = replace(full, scale=1 / 8)
    local_base = meta.number("rope.freq_base_swa", 0.0) or meta.number("rope.local.freq_base", 10000.0)
    for base in (full.base, local_base):
        if not (math.isfinite(base) and base > 0):
            raise FileFormatError(f"{file.path}: a rotation with the base {base} is not usable")
    return full, RopeOptions(n_dims=full.n_dims, neox=True, base=local_base)


@dataclass
class Attention:
    query: Linear = gguf("attn_q")
    key: Linear = gguf("attn_k")
    value: Linear = gguf("attn_v")
    output: Linear = gguf("attn_output")
    query_norm: RMSNorm = gguf("attn_q_norm")
    key_norm: RMSNorm = gguf("attn_k_norm")

    def __call__(
        self, ctx: Context, x: Tensor, inputs: Inputs, cache: Cache, o: Options, n_kv_heads: int, rope: RopeOptions
    ) -> Tensor:
        n = x.shape[1]
        query = self.query_norm(self.query(x).reshape(o.head_dim, o.n_heads, n), o.eps).rope(inputs.positions, rope)
        key = self.key_norm(self.key(x).reshape(o.head_dim, n_kv_heads, n), o.eps).rope(inputs.positions, rope)
        value = self.value(x).reshape(o.head_dim, n_kv_heads, n)
        return self.output(attention(ctx, query, key, value, cache, o.scale))


@dataclass
class MLP:
    gate: Linear = gguf("ffn_gate")
    up: Linear = gguf("ffn_up")
    down: Linear = gguf("ffn_down")

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x).geglu(self.up(x)))


@dataclass
class Layer:
    attention: Attention
    mlp: MLP
    attention_norm: RMSNorm = gguf("attn_norm")
    attention_post_norm: RMSNorm = gguf("post_attention_norm")
    mlp_norm: RMSNorm = gguf("ffn_norm")
    mlp_post_norm: RMSNorm = gguf("post_ffw_norm")


@dataclass
class Weights:
    embedding: Embedding = gguf("token_embd")
    layers: list[Layer] = gguf("blk")
    output_norm: RMSNorm = gguf("output_norm")
    output: Linear = gguf("output", alt="token_embd")


class Gemma3:
    def __init__(self, file: GGUFFile, backend: Backend, n_ctx: int) -> None:
        self.options = Options.read(file)
        self.n_ctx_train = file.metadata.integer("context_length", 0)
        check_shapes(file, _shapes(file, self.options))
        self.n_vocab = (*found_shape(file, "token_embd.weight"), 0, 0)[1]
        self.weights = bind(Weights, backend, file, {"layers": self.options.n_layers})

    def forward(self, ctx: Context, inputs: Inputs, cache: Cache) -> Tensor:
        o, w = self.options, self.weights
        x = w.embedding(inputs.tokens).scale(math.sqrt(o.n_embd))
        for i, layer in enumerate(w.layers):
            cache.layer(i)
            rope = o.ropes[o.kinds[i]]
            mixed = layer.attention(ctx, layer.attention_norm(x, o.eps), inputs, cache, o, o.n_kv_heads[i], rope)
            if i == o.n_layers - 1 and inputs.outputs is not None:
                mixed, x = mixed.rows(inputs.outputs), x.rows(inputs.outputs)
            x = layer.attention_post_norm(mixed, o.eps) + x
            x = layer.mlp_post_norm(layer.mlp(layer.mlp_norm(x, o.eps)), o.eps) + x
        logits = w.output(w.output_norm(x, o.eps))
        return softcap(logits, o.logit_cap) if o.logit_cap else logits

    def make_cache(self, backend: Backend, limits: Limits, dtype: DType) -> Cache:
        o = self.options

        def part(kind: int) -> CausalCache:
            return CausalCache(
                backend,
                limits,
                n_kv_heads=[n if k == kind else 0 for n, k in zip(o.n_kv_heads, o.kinds, strict=True)],
                head_dim_k=o.head_dim,
                head_dim_v=o.head_dim,
                dtype=dtype,
                shift=lambda _layer, keys, changes: keys.rope(changes, o.ropes[kind].rotation),
                reach=Reach(window=o.window) if kind == WINDOW else ALL,
            )

        if len(set(o.kinds)) == 1:
            return part(o.kinds[0])
        return LayeredCache([part(FULL), part(WINDOW)], o.kinds, limits.max_sequences)

    def max_nodes(self, limits: Limits) -> int:
        # Per layer about 30 nodes, and for each group of sequences that attends on its own another 7.
        return 64 + self.options.n_layers * (48 + 8 * limits.max_sequences)


def _shapes(file: GGUFFile, o: Options) -> dict[str, tuple[int, ...]]:
    """What each tensor of the file must look like, if it is there."""
    width = o.n_heads * o.head_dim
    table = table_shape(file, "token_embd.weight", o.n_embd)
    shapes: dict[str, tuple[int, ...]] = {"output_norm.weight": (o.n_embd,)}
    shapes |= {"token_embd.weight": table, "output.weight": table}
    for i, n_kv_heads in enumerate(o.n_kv_heads):
        kv_width = n_kv_heads * o.head_dim
        n_ff = (*found_shape(file, f"blk.{i}.ffn_up.weight"), 0, 0)[1]
        layer: dict[str, tuple[int, ...]] = {
            "attn_q": (o.n_embd, width),
            "attn_k": (o.n_embd, kv_width),
            "attn_v": (o.n_embd, kv_width),
            "attn_output": (width, o.n_embd),
            "attn_q_norm": (o.head_dim,),
            "attn_k_norm": (o.head_dim,),
            "ffn_gate": (o.n_embd, n_ff),
            "ffn_up": (o.n_embd, n_ff),
            "ffn_down": (n_ff, o.n_embd),
        }
        layer |= dict.fromkeys(("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), (o.n_embd,))
        for name, shape in layer.items():
            shapes[f"blk.{i}.{name}.weight"] = shape
            shapes[f"blk.{i}.{name}.bias"] = shape[1:] or shape
    return shapes
