"""Nomic BERT (Nussbaum et al. 2024), the encoder of nomic-embed-text.

BERT with rotary positions, queries, keys and values from one matrix, SwiGLU, and no biases but those of the norms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.reader import GGUFFile
from puna.gguf.types import TensorType
from puna.kvcache.cache import Cache, Limits
from puna.kvcache.uncached import Uncached
from puna.ml.backend import Backend, Context, Use
from puna.ml.tensor import DType, RopeOptions, Tensor
from puna.model.model import Inputs
from puna.model.rope import rope_options
from puna.model.shapes import check_shapes, found_shape
from puna.nn.attention import attention
from puna.nn.declare import bind, gguf
from puna.nn.layers import Embedding, LayerNorm, Linear

BASE = 1000.0  # of the rotation, in files that do not say


@dataclass(frozen=True)
class Options:
    n_layers: int
    n_embd: int
    n_heads: int
    eps: float
    rope: RopeOptions

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_heads

    @classmethod
    def read(cls, file: GGUFFile) -> Options:
        meta = file.metadata
        n_layers, n_embd, n_heads = (
            meta.integer("block_count"),
            meta.integer("embedding_length"),
            meta.integer("attention.head_count"),
        )
        if min(n_layers, n_embd, n_heads) < 1 or n_embd % n_heads:
            raise FileFormatError(f"{file.path}: {n_layers} layers, {n_embd} wide, {n_heads} heads is not a BERT")
        rope = rope_options(file, n_dims=n_embd // n_heads, neox=True)
        if not meta.has("rope.freq_base"):
            rope = replace(rope, base=BASE)
        return cls(n_layers, n_embd, n_heads, meta.number("attention.layer_norm_epsilon"), rope)


@dataclass
class Attention:
    query_key_value: Linear = gguf("attn_qkv")
    output: Linear = gguf("attn_output")

    def __call__(self, ctx: Context, x: Tensor, inputs: Inputs, cache: Cache, o: Options) -> Tensor:
        head_bytes, part_bytes = 4 * o.head_dim, 4 * o.n_embd
        fused = self.query_key_value(x)
        query, key, value = (
            fused.view((o.head_dim, o.n_heads, x.shape[1]), (head_bytes, 3 * part_bytes), part * part_bytes) for part in range(3)
        )
        query, key = query.rope(inputs.positions, o.rope), key.rope(inputs.positions, o.rope)
        return self.output(attention(ctx, query, key, value, cache, o.head_dim**-0.5))


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
    attention_norm: LayerNorm = gguf("attn_output_norm")
    mlp_norm: LayerNorm = gguf("layer_output_norm")


@dataclass
class Weights:
    embedding: Embedding = gguf("token_embd")
    embedding_norm: LayerNorm = gguf("token_embd_norm")
    layers: list[Layer] = gguf("blk")
    segments: Tensor | None = gguf("token_types.weight", use=Use.VECTOR, optional=True)


class NomicBert:
    sees_whole_text: Literal[True] = True

    def __init__(self, file: GGUFFile, backend: Backend, n_ctx: int) -> None:
        self.options = Options.read(file)
        self.n_ctx_train = file.metadata.integer("context_length", 0)
        _check_shapes(file, self.options)
        self.n_vocab = file.tensors["token_embd.weight"].shape[1] if "token_embd.weight" in file.tensors else 0
        self.weights = bind(Weights, backend, file, {"layers": self.options.n_layers})

    def forward(self, ctx: Context, inputs: Inputs, cache: Cache) -> Tensor:
        """Hidden states [n_embd, n_outputs]."""
        o, w = self.options, self.weights
        x = w.embedding(inputs.tokens)
        if w.segments is not None:
            x = x + ctx.use(w.segments).view((o.n_embd,), (), 0)
        x = w.embedding_norm(x, o.eps)
        for i, layer in enumerate(w.layers):
            cache.layer(i)
            mixed = layer.attention(ctx, x, inputs, cache, o)
            if i == o.n_layers - 1 and inputs.outputs is not None:
                mixed, x = mixed.rows(inputs.outputs), x.rows(inputs.outputs)
            x = layer.attention_norm(mixed + x, o.eps)
            x = layer.mlp_norm(layer.mlp(x) + x, o.eps)
        return x

    def make_cache(self, backend: Backend, limits: Limits, dtype: DType) -> Cache:
        return Uncached()

    def max_nodes(self, limits: Limits) -> int:
        return 64 + self.options.n_layers * 48


def _check_shapes(file: GGUFFile, o: Options) -> None:
    shapes: dict[str, tuple[int, ...]] = {f"token_embd_norm.{part}": (o.n_embd,) for part in ("weight", "bias")}
    n_rows = {name: (*found_shape(file, f"{name}.weight"), 0, 0)[1] for name in ("token_embd", "token_types")}
    shapes |= {f"{name}.weight": (o.n_embd, max(n, 1)) for name, n in n_rows.items()}
    for i in range(o.n_layers):
        n_ff = (*found_shape(file, f"blk.{i}.ffn_up.weight"), 0, 0)[1]
        matrices = {"attn_qkv": (o.n_embd, 3 * o.n_embd), "attn_output": (o.n_embd, o.n_embd)}
        matrices |= {"ffn_gate": (o.n_embd, n_ff), "ffn_up": (o.n_embd, n_ff), "ffn_down": (n_ff, o.n_embd)}
        for name, (n_in, n_out) in matrices.items():
            shapes[f"blk.{i}.{name}.weight"], shapes[f"blk.{i}.{name}.bias"] = (n_in, n_out), (n_out,)
        for name in ("attn_output_norm", "layer_output_norm"):
            shapes |= {f"blk.{i}.{name}.{part}": (o.n_embd,) for part in ("weight", "bias")}
    check_shapes(file, shapes)
    if "token_types.weight" in file.tensors and file.tensors["token_types.weight"].type is not TensorType.F32:
        raise UnsupportedModel(f"{file.path}: token_types.weight must be of type F32")
