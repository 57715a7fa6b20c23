"""Gemma 2 (Gemma Team 2024).

Beside Llama: norms after attention and MLP too, GeGLU, embeddings scaled by sqrt(n_embd), caps on attention scores and
logits. Every other layer sees a sliding window, the first of each two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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

WINDOW, FULL = 0, 1  # kinds of layers, in turn


@dataclass(frozen=True)
class Options:
    n_layers: int
    n_embd: int
    n_heads: int
    n_kv_heads: list[int]  # per layer
    head_dim: int
    eps: float
    scale: float  # of the dot products
    window: int
    rope: RopeOptions
    score_cap: float  # 0: none
    logit_cap: float

    @classmethod
    def read(cls, file: GGUFFile) -> Options:
        meta = file.metadata
        n_layers, n_embd, n_heads = (
            meta.integer("block_count"),
            meta.integer("embedding_length"),
            meta.integer("attention.head_count"),
        )
        if min(n_layers, n_embd, n_heads) < 1:
            raise FileFormatError(f"{file.path}: {n_layers} layers, {n_embd} wide, {n_heads} heads is not a gemma2")
        head_dim = meta.integer("attention.key_length", n_embd // n_heads)
        n_kv_heads = meta.per_layer("attention.head_count_kv", n_layers, n_heads)
        if head_dim < 2 or any(n < 1 or n_heads % n for n in n_kv_heads):
            raise FileFormatError(f"{file.path}: {n_heads} heads of {head_dim} cannot share {n_kv_heads} key/value heads")
        if meta.integer("attention.value_length", head_dim) != head_dim:
            raise UnsupportedModel(f"{file.path}: gemma2 with values of another width than keys is not supported")
        window = meta.integer("attention.sliding_window", 4096)
        caps = meta.number("attn_logit_softcapping", 50.0), meta.number("final_logit_softcapping", 30.0)
        if window < 1 or not all(math.isfinite(cap) and cap >= 0 for cap in caps):
            raise FileFormatError(f"{file.path}: a window of {window} or caps of {caps} are not usable")
        return cls(
            n_layers=n_layers,
            n_embd=n_embd,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            eps=meta.number("attention.layer_norm_rms_epsilon"),
            # The largest model divides by what its heads would be wide if they shared the embedding.
            scale=(n_embd / n_heads if n_layers == 46 else head_dim) ** -0.5,
            window=window,
            rope=rope_options(file, n_dims=head_dim, neox=True),
            score_cap=caps[0],
            logit_cap=caps[1],
        )


@dataclass
class Attention:
    query: Linear = gguf("attn_q")
    key: Linear = gguf("attn_k")
    value: Linear = gguf("attn_v")
    output: Linear = gguf("attn_output")

    def __call__(self, ctx: Context, x: Tensor, inputs: Inputs, cache: Cache, o: Options, n_kv_heads: int) -> Tensor:
        n = x.shape[1]
        query = self.query(x).reshape(o.head_dim, o.n_heads, n).rope(inputs.positions, o.rope)
        key = self.key(x).reshape(o.head_dim, n_kv_heads, n).rope(inputs.positions, o.rope)
        value = self.value(x).reshape(o.head_dim, n_kv_heads, n)
        return self.output(attention(ctx, query, key, value, cache, o.scale, softcap=o.score_cap))


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


class Gemma2:
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
            mixed = layer.attention(ctx, layer.attention_norm(x, o.eps), inputs, cache, o, o.n_kv_heads[i])
            if i == o.n_layers - 1 and inputs.outputs is not None:
                mixed, x = mixed.rows(inputs.outputs), x.rows(inputs.outputs)
            x = layer.attention_post_norm(mixed, o.eps) + x
            x = layer.mlp_post_norm(layer.mlp(layer.mlp_norm(x, o.eps)), o.eps) + x
        logits = w.output(w.output_norm(x, o.eps))
        return softcap(logits, o.logit_cap) if o.logit_cap else logits

    def make_cache(self, backend: Backend, limits: Limits, dtype: DType) -> Cache:
        o = self.options
        kinds = [i % 2 for i in range(o.n_layers)]

        def part(kind: int) -> CausalCache:
            return CausalCache(
                backend,
                limits,
                n_kv_heads=[n if k == kind else 0 for n, k in zip(o.n_kv_heads, kinds, strict=True)],
                head_dim_k=o.head_dim,
                head_dim_v=o.head_dim,
                dtype=dtype,
                shift=lambda _layer, keys, changes: keys.rope(changes, o.rope.rotation),
                reach=Reach(window=o.window) if kind == WINDOW else ALL,
            )

        if o.n_layers == 1:
            return part(WINDOW)
        return LayeredCache([part(WINDOW), part(FULL)], kinds, limits.max_sequences)

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
            "ffn_gate": (o.n_embd, n_ff),
            "ffn_up": (o.n_embd, n_ff),
            "ffn_down": (n_ff, o.n_embd),
        }
        layer |= dict.fromkeys(("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), (o.n_embd,))
        for name, shape in layer.items():
            shapes[f"blk.{i}.{name}.weight"] = shape
            shapes[f"blk.{i}.{name}.bias"] = shape[1:] or shape
    return shapes
