"""Llama (Touvron et al. 2023) and the many models of its shape: Llama 2 and 3, Mistral 7B, SmolLM, TinyLlama, Yi, …

Pre-norm with RMSNorm, rotary positions on neighbouring pairs, grouped-query attention, SwiGLU. Biases, frequency
factors (Llama 3.1) and an own output matrix are used where the file has them.
"""

from __future__ import annotations

from dataclasses import dataclass

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.reader import GGUFFile
from puna.kvcache.cache import Cache, Limits
from puna.kvcache.causal import CausalCache
from puna.ml.backend import Backend, Context, Use
from puna.ml.tensor import DType, RopeOptions, Tensor
from puna.model.model import Inputs
from puna.model.pooling import Pooling, pooling_of
from puna.model.rope import rope_options
from puna.model.shapes import check_shapes, found_shape, table_shape
from puna.nn.attention import attention
from puna.nn.declare import bind, gguf
from puna.nn.layers import Embedding, Linear, RMSNorm


@dataclass(frozen=True)
class Options:
    n_layers: int
    n_embd: int
    n_heads: int
    n_kv_heads: list[int]  # per layer
    head_dim: int
    eps: float
    scale: float  # of the dot products
    rope: RopeOptions

    @classmethod
    def read(cls, file: GGUFFile) -> Options:
        meta = file.metadata
        if meta.integer("expert_count", 0) > 0:
            raise UnsupportedModel(f"{file.path}: llama with experts is not supported yet")
        n_layers, n_embd, n_heads = (
            meta.integer("block_count"),
            meta.integer("embedding_length"),
            meta.integer("attention.head_count"),
        )
        if min(n_layers, n_embd, n_heads) < 1 or n_embd % n_heads:
            raise FileFormatError(f"{file.path}: {n_layers} layers, {n_embd} wide, {n_heads} heads is not a llama")
        head_dim = meta.integer("attention.key_length", n_embd // n_heads)
        n_kv_heads = meta.per_layer("attention.head_count_kv", n_layers, n_heads)
        if head_dim < 1 or any(n < 1 or n_heads % n for n in n_kv_heads):
            raise FileFormatError(f"{file.path}: {n_heads} heads of {head_dim} cannot share {n_kv_heads} key/value heads")
        if meta.integer("attention.value_length", head_dim) != head_dim:
            raise UnsupportedModel(f"{file.path}: llama with values of another width than keys is not supported")
        return cls(
            n_layers=n_layers,
            n_embd=n_embd,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            eps=meta.number("attention.layer_norm_rms_epsilon"),
            scale=meta.number("attention.scale", 0.0) or head_dim**-0.5,
            rope=rope_options(file, n_dims=head_dim),
        )


@dataclass
class Attention:
    query: Linear = gguf("attn_q")
    key: Linear = gguf("attn_k")
    value: Linear = gguf("attn_v")
    output: Linear = gguf("attn_output")

    def __call__(
        self, ctx: Context, x: Tensor, inputs: Inputs, cache: Cache, o: Options, n_kv_heads: int, factors: Tensor | None
    ) -> Tensor:
        n = x.shape[1]
        query = self.query(x).reshape(o.head_dim, o.n_heads, n).rope(inputs.positions, o.rope, factors)
        key = self.key(x).reshape(o.head_dim, n_kv_heads, n).rope(inputs.positions, o.rope, factors)
        value = self.value(x).reshape(o.head_dim, n_kv_heads, n)
        return self.output(attention(ctx, query, key, value, cache, o.scale))


@dataclass
class MLP:
    gate: Linear = gguf("ffn_gate")
    up: Linear = gguf("ffn_up")
    down: Linear = gguf("ffn_down")

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x).swiglu(self.up(x)))


@dataclass
class Layer:
    attention: Attention
    mlp: MLP
    attention_norm: RMSNorm = gguf("attn_norm")
    mlp_norm: RMSNorm = gguf("ffn_norm")


@dataclass
class Weights:
    embedding: Embedding = gguf("token_embd")
    layers: list[Layer] = gguf("blk")
    output_norm: RMSNorm = gguf("output_norm")
    output: Linear = gguf("output", alt="token_embd")
    rope_factors: Tensor | None = gguf("rope_freqs.weight", use=Use.VECTOR, optional=True)
    rope_factors_long: Tensor | None = gguf("rope_factors_long.weight", use=Use.VECTOR, optional=True)
    rope_factors_short: Tensor | None = gguf("rope_factors_short.weight", use=Use.VECTOR, optional=True)


class Llama:
    def __init__(self, file: GGUFFile, backend: Backend, n_ctx: int) -> None:
        self.options = Options.read(file)
        self.n_ctx_train = file.metadata.integer("context_length", 0)
        self.embeds = pooling_of(file) is not Pooling.NONE
        check_shapes(file, _shapes(file, self.options))
        self.n_vocab = file.tensors["token_embd.weight"].shape[1] if "token_embd.weight" in file.tensors else 0
        self.weights = bind(Weights, backend, set(file.tensors), {"layers": self.options.n_layers})
        w = self.weights
        is_long = n_ctx > self.options.rope.original_ctx
        self._factors = w.rope_factors or (w.rope_factors_long if is_long else w.rope_factors_short)

    def forward(self, ctx: Context, inputs: Inputs, cache: Cache) -> Tensor:
        """Logits [n_vocab, n_outputs]; of a model that embeds, hidden states [n_embd, n_outputs]."""
        o, w = self.options, self.weights
        x = w.embedding(inputs.tokens)
        for i, layer in enumerate(w.layers):
            cache.layer(i)
            mixed = layer.attention(ctx, layer.attention_norm(x, o.eps), inputs, cache, o, o.n_kv_heads[i], self._factors)
            if i == o.n_layers - 1 and inputs.outputs is not None:
                mixed, x = mixed.rows(inputs.outputs), x.rows(inputs.outputs)
            x = mixed + x
            x = layer.mlp(layer.mlp_norm(x, o.eps)) + x
        hidden = w.output_norm(x, o.eps)
        return hidden if self.embeds else w.output(hidden)

    def make_cache(self, backend: Backend, limits: Limits, dtype: DType) -> Cache:
        o = self.options
        return CausalCache(
            backend,
            limits,
            n_kv_heads=o.n_kv_heads,
            head_dim_k=o.head_dim,
            head_dim_v=o.head_dim,
            dtype=dtype,
            shift=lambda _layer, keys, changes: keys.rope(changes, o.rope.rotation, self._factors),
        )

    def max_nodes(self, limits: Limits) -> int:
        # Per layer about 25 nodes, and for each group of sequences that attends on its own another 7.
        return 64 + self.options.n_layers * (40 + 8 * limits.max_sequences)


def _shapes(file: GGUFFile, o: Options) -> dict[str, tuple[int, ...]]:
    """What each tensor of the file must look like, if it is there."""
    width, pairs = o.n_heads * o.head_dim, (o.rope.n_dims // 2,)
    shapes: dict[str, tuple[int, ...]] = {"output_norm.weight": (o.n_embd,)}
    shapes |= {name: table_shape(file, "token_embd.weight", o.n_embd) for name in ("token_embd.weight", "output.weight")}
    shapes |= {f"{name}.weight": pairs for name in ("rope_freqs", "rope_factors_long", "rope_factors_short")}
    for i in range(o.n_layers):
        kv_width = o.n_kv_heads[i] * o.head_dim
        n_ff = (*found_shape(file, f"blk.{i}.ffn_up.weight"), 0, 0)[1]
        matrices = {
            "attn_q": (o.n_embd, width),
            "attn_k": (o.n_embd, kv_width),
            "attn_v": (o.n_embd, kv_width),
            "attn_output": (width, o.n_embd),
            "ffn_gate": (o.n_embd, n_ff),
            "ffn_up": (o.n_embd, n_ff),
            "ffn_down": (n_ff, o.n_embd),
        }
        for name, (n_in, n_out) in matrices.items():
            shapes[f"blk.{i}.{name}.weight"], shapes[f"blk.{i}.{name}.bias"] = (n_in, n_out), (n_out,)
        shapes |= {f"blk.{i}.{name}.weight": (o.n_embd,) for name in ("attn_norm", "ffn_norm")}
    return shapes
